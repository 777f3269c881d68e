"""A model folder from a GGUF file: tokenizer, chat template and end ids as the file tells them.

The folder is in the user's cache, named by its content, so it is made once for a model. A `tokenizer.json` next to the
file stands before what the file says.

Invariant: only byte-level vocabularies whose way of splitting text is in the table are taken; anything else is refused,
because a tokenizer that is nearly right gives prompts that the model was not trained on.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towline.engines.llamacpp.gguf import Gguf
from towline.errors import ConfigError

CONTROL, USER_DEFINED = 3, 4
"""Types of token: special, and markup that is never split."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Split:
    """How text is cut before pairs are merged."""

    pattern: str = ""
    """GPT-2's own if empty."""
    digits: bool = False
    """Each digit by itself, before anything else."""
    normalised: bool = False
    """Text is brought to Unicode's composed form first."""
    whole_words: bool = False
    """A piece that is a token is one, whatever the merges say."""


_SPLITS = {
    "gpt-2": _Split(),
    "smollm": _Split(digits=True),
    "starcoder": _Split(digits=True),
    "refact": _Split(digits=True),
    "command-r": _Split(digits=True),
    "qwen2": _Split(_WORDS + r"\p{N}" + _REST, normalised=True),
    "llama-bpe": _Split(_WORDS + r"\p{N}{1,3}" + _REST, whole_words=True),
}
"""By the name that `tokenizer.ggml.pre` gives."""


def model_folder(gguf: Gguf) -> Path:
    """The folder that the model's codec is loaded from."""
    if (gguf.path.parent / "tokenizer.json").is_file():
        return gguf.path.parent
    files = {name: json.dumps(content, ensure_ascii=False) for name, content in _documents(gguf).items()}
    files["chat_template.jinja"] = _template(gguf)
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:12]
    folder = _cache() / f"{gguf.name}-{digest}"
    if not folder.is_dir():
        _write(folder, files)
    return folder


def _documents(gguf: Gguf) -> dict[str, Any]:
    told = gguf.metadata
    names = {kind: _named(gguf, f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "padding", "unknown")}
    ends = [told.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
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


def _named(gguf: Gguf, key: str) -> str | None:
    id = gguf.metadata.get(key)
    return gguf.tokens[id] if isinstance(id, int) and 0 <= id < len(gguf.tokens) else None


def _tokenizer(gguf: Gguf) -> dict[str, Any]:
    """`tokenizer.json`, as the `tokenizers` library reads it."""
    kind, name = gguf.metadata.get("tokenizer.ggml.model"), gguf.metadata.get("tokenizer.ggml.pre")
    split = _SPLITS.get(str(name))
    if kind != "gpt2" or split is None:
        raise ConfigError(
            f"{gguf.path}: a tokenizer of kind {kind!r} ({name!r}) cannot be made from the file; "
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


def _template(gguf: Gguf) -> str:
    template = gguf.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str) or not template:
        raise ConfigError(
            f"{gguf.path} has no chat template; put the model's tokenizer.json, tokenizer_config.json and "
            "chat_template.jinja next to it"
        )
    return template


def _cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a relative path is to be ignored.
    return (base if base.is_absolute() else Path.home() / ".cache") / "towline" / "gguf"


def _write(folder: Path, files: dict[str, str]) -> None:
    """The folder appears whole or not at all; of two makers at the same time the first wins."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            for name, text in files.items():
                (made / name).write_text(text, "utf-8")
            made.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise ConfigError(
                f"cannot make {folder}: {error.strerror}; set XDG_CACHE_HOME to a folder of yours"
            ) from error
