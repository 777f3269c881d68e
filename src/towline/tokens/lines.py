"""Encoding line by line: what was encoded once is not encoded again.

Tool results repeat: the samples of one task read the same files, and an agent prints a file more than once. Splitting text
into words is most of the cost of encoding it, so the ids of every line are remembered, and a line that was seen before
costs a look-up.

Invariant: the ids are those of the text as a whole. It holds because text is cut only where a tokenizer provably sees
nothing across the cut: behind a line feed, if the white space that follows holds no further line end and no `/` comes
next. `cuts_at_lines` proves it from the tokenizer's own parts, and text of any other tokenizer is one piece:

- Normalisation is NFC or none: nothing composes with a line feed.
- No added token holds a line feed, takes the space beside it, or looks at its neighbours.
- Words come from one regular expression whose alternatives are all in `_WITHIN` or `_SPACE`. Those of `_WITHIN` match no
  line feed, or only a run of line ends (with slashes) at their end. White space is matched by `\\s*[\\r\\n]+` before the
  others are tried: from wherever in it a match begins, it reaches the last line end of the white space, which is the cut;
  so `\\s+` and the look-ahead in `\\s+(?!\\S)` are never reached there. No alternative looks behind.
- The model is BPE without dropout, which encodes each word by itself.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tokenizers

_CUT = re.compile(r"\n(?![^\S\r\n]*[\r\n]|/)")
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
"""Alternatives that never match across a cut, as families write them."""
_SPACE = frozenset((r"\s+(?!\S)", r"\s+"))
"""Alternatives that would, unless `_LINE_ENDS` is tried before them."""
_LINE_ENDS = r"\s*[\r\n]+"
_OVERHEAD = 250
"""Bytes that remembering a piece takes beside its characters and ids, about."""
_MOST = 24 << 20
"""Bytes of each of the two generations that are remembered."""


class Lines:
    """Encodes text by its lines and remembers them, the recently used ones longest.

    There are two generations: what is used moves to the young one; when that is full, it becomes the old one, and what
    was not used since the last time is forgotten.
    """

    def __init__(self, encode: Callable[[str], list[int]], *, bytes_of: Sequence[int] = (), most: int = _MOST):
        """`bytes_of` tells how many bytes each id stands for; without it text is not cut. `most` 0 remembers nothing."""
        self._encode = encode
        self._bytes_of = np.asarray(bytes_of, np.int32)
        self._most = most
        self._young: dict[str, array[int]] = {}
        self._old: dict[str, array[int]] = {}
        self._size = 0

    def encode(self, text: str) -> list[int]:
        if not self._most:
            return self._encode(text)
        young, ids, unknown = self._young, array("i"), list[str]()
        for piece in _pieces(text) if len(self._bytes_of) else (text,):
            known = young.get(piece)
            if known is None and (known := self._old.get(piece)) is not None:
                self._keep(piece, known)
            if known is None:
                unknown.append(piece)
                continue
            if unknown:
                ids += self._learn(unknown)
                unknown = []
            ids += known
        if unknown:
            ids += self._learn(unknown)
        return ids.tolist()

    def _learn(self, pieces: list[str]) -> array[int]:
        """The ids of pieces that follow one another; one long text is encoded faster than its lines."""
        text, ids = "".join(pieces), array("i")
        if len(pieces) == 1 or not text.isascii():
            # What normalisation may change has other lengths afterwards.
            for piece in pieces:
                alone = array("i", self._encode(piece))
                self._keep(piece, alone)
                ids += alone
            return ids
        ids.extend(self._encode(text))
        ends = np.cumsum([len(piece) for piece in pieces])
        so_far = np.cumsum(self._bytes_of[np.frombuffer(ids, np.int32)])
        places = np.searchsorted(so_far, ends)
        if so_far[-1] == ends[-1] and np.array_equal(so_far[places], ends):
            start = 0
            for piece, place in zip(pieces, places.tolist(), strict=True):
                self._keep(piece, ids[start : place + 1])
                start = place + 1
        return ids

    def _keep(self, piece: str, ids: array[int]) -> None:
        size = _OVERHEAD + len(piece) + 4 * len(ids)
        if size > self._most // 16:
            return
        if self._size + size > self._most:
            self._old, self._young, self._size = self._young, {}, 0
        self._young[piece] = ids
        self._size += size


def _pieces(text: str) -> list[str]:
    """The text, cut where nothing sees across."""
    pieces, start = [], 0
    for match in _CUT.finditer(text):
        end = match.end()
        pieces.append(text[start:end])
        start = end
    if start < len(text):
        pieces.append(text[start:])
    return pieces


def bytes_of_ids(backend: tokenizers.Tokenizer) -> list[int]:
    """How many bytes each id stands for, if the tokenizer's text may be cut at lines; else nothing."""
    if not cuts_at_lines(backend):
        return []
    # In a vocabulary of bytes every character is one.
    vocabulary = backend.get_vocab(with_added_tokens=False)
    added = {id: len(token.content.encode()) for id, token in backend.get_added_tokens_decoder().items()}
    counts = {id: len(token) for token, id in vocabulary.items()} | added
    return [counts.get(id, 0) for id in range(max(counts, default=-1) + 1)]


def cuts_at_lines(backend: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer provably gives the ids of a text line by line."""
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
    """The alternatives of a regular expression, those inside its groups left alone."""
    parts, depth = [""], 0
    for sign in pattern:
        depth += (sign == "(") - (sign == ")")
        if sign == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _state(part: Any) -> dict[str, Any]:
    """The definition of a tokenizer's part, as in tokenizer.json."""
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state
