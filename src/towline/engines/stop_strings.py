"""Matching of stop sequences: finds a stop string in the decoded text as it grows, one token at a time.

This module only matches. The caller ends the turn (`EngineTurn.emit` in `embedded/turn.py`, `_append` in
`llamacpp/engine.py`; `scripted.py` matches on its own), and `read_reply` in `gateway/sampling.py` cuts the text from the
reply; the row keeps every sampled token. vLLM, SGLang and chat servers are sent the strings and match them themselves
(`vllm/wire.py`, `sglang.py`, `openai.py`). Stop *ids* end a turn in each engine's own loop.

Text is decoded in a window that starts one token before what is new, because decoders treat the first token of a
sequence differently (a leading space, the bytes of one character spread over tokens). Text that ends in the middle of a
character is searched, but not taken as final.

Invariant: the token that completes a stop string is the one at which `feed` reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StopStrings:
    """Matches the stop strings of one turn."""

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]):
        self._strings = tuple(string for string in strings if string)
        self._decode = decode
        self._window: list[int] = []
        self._settled = 0
        """How many ids of the window are in `_tail` already."""
        self._tail = ""
        """The end of the text so far, long enough for a stop string that began in it."""
        self._keep = max((len(string) for string in self._strings), default=1) - 1

    def feed(self, token: int) -> str | None:
        """Add one token; returns the stop string that it completes, the one that begins first if it completes several."""
        self._window.append(token)
        settled = self._decode(self._window[: self._settled]) if self._settled else ""
        added = self._decode(self._window)[len(settled) :]
        text = self._tail + added
        found = [(at, order) for order, string in enumerate(self._strings) if (at := text.find(string)) >= 0]
        if found:
            return self._strings[min(found)[1]]
        if added and not added.endswith(INCOMPLETE):
            self._tail = text[-self._keep :] if self._keep else ""
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
        return None
