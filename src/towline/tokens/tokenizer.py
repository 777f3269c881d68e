"""Text to ids and back, through the `tokenizers` library itself.

`tokenizer.json` is loaded as it is: wrappers that rebuild a tokenizer from a class name give other ids for some families.
No post-processor adds ids here; the chat template writes what begins or ends a prompt.

Encoded lines are cached (`LineCache`): text that was encoded once is not encoded again.

Tool results repeat: the samples of one task read the same files, and an agent prints a file more than once. Splitting text
into words is most of the cost of encoding, so the ids of every line are cached, and a known line costs one lookup.

Invariant: the ids are those of the text as a whole. Text is split only where the tokenizer provably sees nothing across the
split: after a line feed, if the white space that follows contains no further line end and no `/` comes next.
`can_split_at_lines` proves it from the tokenizer's components; text of any other tokenizer is one piece:

- Normalization is NFC or none: nothing composes with a line feed.
- No added token contains a line feed, strips adjacent space, or depends on its neighbours.
- Words come from one regular expression whose alternatives are all in `_WITHIN` or `_SPACE`. Those of `_WITHIN` match no
  line feed, or only a run of line ends (with slashes) at their end. White space is matched by `\\s*[\\r\\n]+` before the
  others are tried: wherever a match begins, it reaches the last line end of the white space, which is the split; so
  `\\s+` and the lookahead in `\\s+(?!\\S)` are never reached there. No alternative looks behind.
- The model is BPE without dropout, which encodes each word independently.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from towline.errors import ConfigError

_SPLIT = re.compile(r"\n(?![^\S\r\n]*[\r\n]|/)")
_WITHIN = frozenset(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"'(?i:[sdmt]|ll|ve|re)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"\p{L}+",
        r"\p{N}",
        r"\p{N}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"[^\p{L}\p{N}\n]+",
        r"\n+",
        r"\s*[\r\n]+",
    )
)
"""Alternatives that never match across a split, as model families write them."""
_SPACE = frozenset((r"\s+(?!\S)", r"\s+"))
"""Alternatives that would match across it, unless `_LINE_ENDS` is tried first."""
_LINE_ENDS = r"\s*[\r\n]+"
_OVERHEAD = 250
"""Approximate bytes per cached piece besides its characters and ids."""
_MAX_BYTES = 24 << 20
"""Maximum bytes of each of the two generations."""


class LineCache:
    """Encodes text line by line and caches the lines, recently used ones longest.

    There are two generations: used lines move to the young one; when that is full it becomes the old one, and lines that
    were not used since are evicted.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], *, bytes_of: Sequence[int] = (), max_bytes: int = _MAX_BYTES
    ):
        """`bytes_of` is the number of bytes per id; without it text is not split. `max_bytes=0` disables the cache."""
        self._encode = encode
        self._bytes_of = np.asarray(bytes_of, np.int32)
        self._max_bytes = max_bytes
        self._young: dict[str, array[int]] = {}
        self._old: dict[str, array[int]] = {}
        self._size = 0

    def encode(self, text: str) -> list[int]:
        if not self._max_bytes:
            return self._encode(text)
        young, ids, unknown = self._young, array("i"), list[str]()
        for piece in _pieces(text) if len(self._bytes_of) else (text,):
            known = young.get(piece)
            if known is None and (known := self._old.get(piece)) is not None:
                self._store(piece, known)
            if known is None:
                unknown.append(piece)
                continue
            if unknown:
                ids += self._encode_new(unknown)
                unknown = []
            ids += known
        if unknown:
            ids += self._encode_new(unknown)
        return ids.tolist()

    def _encode_new(self, pieces: list[str]) -> array[int]:
        """The ids of consecutive pieces; encoding one long text is faster than encoding its lines."""
        text, ids = "".join(pieces), array("i")
        if len(pieces) == 1 or not text.isascii():
            # Normalization may change the lengths of other text.
            for piece in pieces:
                alone = array("i", self._encode(piece))
                self._store(piece, alone)
                ids += alone
            return ids
        ids.extend(self._encode(text))
        ends = np.cumsum([len(piece) for piece in pieces])
        so_far = np.cumsum(self._bytes_of[np.frombuffer(ids, np.int32)])
        places = np.searchsorted(so_far, ends)
        if so_far[-1] == ends[-1] and np.array_equal(so_far[places], ends):
            start = 0
            for piece, place in zip(pieces, places.tolist(), strict=True):
                self._store(piece, ids[start : place + 1])
                start = place + 1
        return ids

    def _store(self, piece: str, ids: array[int]) -> None:
        size = _OVERHEAD + len(piece) + 4 * len(ids)
        if size > self._max_bytes // 16:
            return
        if self._size + size > self._max_bytes:
            self._old, self._young, self._size = self._young, {}, 0
        self._young[piece] = ids
        self._size += size


def _pieces(text: str) -> list[str]:
    """The text, split where nothing sees across."""
    pieces, start = [], 0
    for match in _SPLIT.finditer(text):
        end = match.end()
        pieces.append(text[start:end])
        start = end
    if start < len(text):
        pieces.append(text[start:])
    return pieces


def bytes_per_id(backend: tokenizers.Tokenizer) -> list[int]:
    """The number of bytes per id, if text may be split at lines for this tokenizer; else empty."""
    if not can_split_at_lines(backend):
        return []
    # In a byte-level vocabulary every character is one byte.
    vocabulary = backend.get_vocab(with_added_tokens=False)
    added = {id: len(token.content.encode()) for id, token in backend.get_added_tokens_decoder().items()}
    counts = {id: len(token) for token, id in vocabulary.items()} | added
    return [counts.get(id, 0) for id in range(max(counts, default=-1) + 1)]


def can_split_at_lines(backend: tokenizers.Tokenizer) -> bool:
    """Whether encoding line by line provably gives the ids of the whole text."""
    model, normalizer, splitter = backend.model, backend.normalizer, backend.pre_tokenizer
    if not isinstance(model, tokenizers.models.BPE) or model.dropout or splitter is None:
        return False
    if normalizer is not None and _state(normalizer) != {"type": "NFC"}:
        return False
    added = backend.get_added_tokens_decoder().values()
    if any("\n" in token.content or token.lstrip or token.rstrip or token.single_word for token in added):
        return False
    return _splits_within_lines(_state(splitter))


def _splits_within_lines(splitter: dict[str, Any]) -> bool:
    steps = splitter.get("pretokenizers", [])
    if splitter.get("type") != "Sequence" or [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        return False
    split, byte_level = steps
    if split.get("behavior") != "Isolated" or split.get("invert") or byte_level.get("use_regex", True):
        return False
    if byte_level.get("add_prefix_space", True):
        return False
    alternatives = _alternatives(split.get("pattern", {}).get("Regex", ""))
    first_space = next((place for place, part in enumerate(alternatives) if part in _SPACE), len(alternatives))
    return _WITHIN.issuperset(alternatives[:first_space]) and (
        _WITHIN.union(_SPACE).issuperset(alternatives[first_space:])
        and (first_space == len(alternatives) or _LINE_ENDS in alternatives[:first_space])
    )


def _alternatives(pattern: str) -> list[str]:
    """The top-level alternatives of a regular expression."""
    parts, depth = [""], 0
    for sign in pattern:
        depth += (sign == "(") - (sign == ")")
        if sign == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _state(part: Any) -> dict[str, Any]:
    """The definition of a tokenizer component, as in tokenizer.json."""
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


class Tokenizer:
    """A model's tokenizer with its special tokens by name.

    Attributes and methods with Hugging Face names (`convert_tokens_to_ids`, `eos_token_id`, …) are the protocol that the
    `renderers` package requires.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None, name: str = ""):
        # Files saved during training may enable both; a prompt is never truncated or padded.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.config = config or {}
        self.name_or_path = name
        self.added = {token.content: id for id, token in backend.get_added_tokens_decoder().items()}
        """Every added token: special tokens and markup such as `<tool_call>`."""
        self.special = {t.content: id for id, t in backend.get_added_tokens_decoder().items() if t.special}
        self.bos_token = _token_text(self.config.get("bos_token"))
        self.eos_token = _token_text(self.config.get("eos_token"))
        self.pad_token = _token_text(self.config.get("pad_token"))
        self.unk_token = _token_text(self.config.get("unk_token"))

    @classmethod
    def unknown(cls) -> Tokenizer:
        """A tokenizer without tokens, for models whose tokenizer is not available."""
        return cls(tokenizers.Tokenizer(tokenizers.models.BPE()))

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json: use a model folder in the Hugging Face layout")
        config_path = folder / "tokenizer_config.json"
        config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
        return cls(tokenizers.Tokenizer.from_file(str(path)), config, folder.name)

    @cached_property
    def size(self) -> int:
        """One more than the highest id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Ids of `text`; text that spells an added token becomes that token, as in an engine."""
        return self._line_cache.encode(text)

    @cached_property
    def _line_cache(self) -> LineCache:
        return LineCache(self._encode, bytes_of=bytes_per_id(self.backend))

    def _encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def limit_cache(self, max_bytes: int) -> None:
        """Clear the cache of encoded lines and limit it to `max_bytes` bytes; 0 disables it."""
        self._line_cache = LineCache(
            self._encode, bytes_of=bytes_per_id(self.backend) if max_bytes else (), max_bytes=max_bytes
        )

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` with the text of special tokens encoded as plain text."""
        return self._plain.encode(text, add_special_tokens=False).ids

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        document = json.loads(self.backend.to_str())
        document["added_tokens"] = []
        document["post_processor"] = None
        return tokenizers.Tokenizer.from_str(json.dumps(document))

    @cached_property
    def added_pattern(self) -> re.Pattern[str]:
        """Matches the text of any added token, longest first."""
        texts = sorted((t for t in self.added if t.strip()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of `ids`, special tokens included by default."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_of(self, token: str) -> int | None:
        """The id of the token with this exact text, `None` if there is none."""
        return self.backend.token_to_id(token)

    def id_of_text(self, text: str) -> int | None:
        """The id of the single token that decodes to this text, `None` if there is none."""
        ids = self.encode(text)
        return ids[0] if len(ids) == 1 and self.decode(ids) == text else None

    def token_of(self, id: int) -> str | None:
        return self.backend.id_to_token(id)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self.id_of(tokens)
        return [self.id_of(token) for token in tokens]

    @property
    def all_special_tokens(self) -> list[str]:
        return list(self.special)

    @property
    def eos_token_id(self) -> int | None:
        return self.id_of(self.eos_token) if self.eos_token else None

    @property
    def unk_token_id(self) -> int | None:
        return self.id_of(self.unk_token) if self.unk_token else None


def _token_text(value: Any) -> str:
    """A token in tokenizer_config.json is a string, an object with `content`, or null."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
