"""Walking a reply's text once, from marker to marker, and keeping what is not markup.

Time is linear in the text whatever was sampled. A marker's next place is remembered, so that looking for one that is
far away or absent costs one pass in all. A value may hold its own format's opening marker (an agent that writes about
tool calls), so reading goes as far as the value does; a reply that has sent it astray `_PATIENCE` times is then read
only up to the next opening marker, and each stretch of text once.
"""

from __future__ import annotations

import re
from typing import Any

from towline.tokens.parsing.base import SPACE, ParsedCall
from towline.tokens.parsing.values import decode_at

_PATIENCE = 64
_SPACES = re.compile(f"[{SPACE}]*")


class Scan:
    """One pass over `text` from `start`. Positions grow; a marker that is nowhere is found at `end`."""

    __slots__ = ("_cuts", "_patience", "_seen", "calls", "end", "malformed", "start", "taken", "text", "trim")

    def __init__(self, text: str, start: int = 0, *, trim: bool = False):
        self.text = text
        self.start = start
        self.end = len(text)
        self.trim = trim
        """Reasoning stood before `start`: the space that divides it from the text is not part of either."""
        self.calls: list[ParsedCall] = []
        self.malformed: list[str] = []
        self.taken = -1
        """Where the last call that was read ended."""
        self._cuts: list[tuple[int, int]] = []
        self._seen: dict[str, tuple[int, int]] = {}
        self._patience = _PATIENCE

    def find(self, marker: str, start: int) -> int:
        """Where `marker` next stands at or after `start`."""
        asked, found = self._seen.get(marker, (-1, -1))
        if not asked <= start <= found:
            found = self.text.find(marker, start)
            found = self.end if found < 0 else found
            self._seen[marker] = (start, found)
        return found

    def skip(self, start: int, marker: str = "") -> int:
        """Past the space at `start`, and past `marker` if it is there."""
        match = _SPACES.match(self.text, start)
        place = match.end() if match else start
        return place + len(marker) if marker and self.text.startswith(marker, place) else place

    def at(self, marker: str, place: int) -> bool:
        return self.text.startswith(marker, place)

    def reach(self, bound: int) -> int:
        """How far a block may be read that should end before `bound`, where the next one opens."""
        return self.end if self._patience > 0 else bound

    def astray(self) -> None:
        """Something could not be read: count it."""
        self._patience -= 1

    def json(self, start: int, bound: int) -> tuple[Any, int] | None:
        """The JSON value at `start` and where it ends, `None` if there is none."""
        if self.reach(bound) == self.end:
            found = decode_at(self.text, start)
            if found is None:
                self.astray()
            return found
        found = decode_at(self.text[start:bound], 0)
        return None if found is None else (found[0], start + found[1])

    def arguments(self, start: int, bound: int, close: str, *, custom: bool) -> tuple[Any, int] | None:
        """Arguments that stand alone before the marker `close`, and where that marker is.

        Nothing at all is an empty object. A custom tool's input is the text itself unless it is an object.
        """
        place = self.skip(start)
        if self.at(close, place) and not custom:
            return {}, place
        if not custom or self.at("{", place):
            found = self.json(place, bound)
            if found is not None:
                after = self.skip(found[1])
                if self.at(close, after) and (not custom or isinstance(found[0], dict)):
                    return found[0], after
        after = self.find(close, start)
        return (self.text[start:after], after) if custom and after < self.reach(bound) else None

    def take(self, start: int, stop: int, calls: list[ParsedCall]) -> None:
        """What stands from `start` to `stop` is these calls and not text."""
        self.calls += calls
        self._cuts.append((start, stop))
        self.taken = stop

    def keep(self, start: int, stop: int) -> None:
        """What stands from `start` to `stop` is a call that cannot be read: it stays text."""
        self.malformed.append(self.text[start:stop].rstrip(SPACE))

    def visible(self) -> str:
        """All text outside the calls. Space next to calls and reasoning is trimmed, any other is kept."""
        pieces, place, touches = [], self.start, self.trim
        for start, stop in [*self._cuts, (self.end, self.end)]:
            last = start == self.end and stop == self.end
            piece = self.text[place:start]
            if touches:
                piece = piece.lstrip(SPACE)
            if not last:
                piece = piece.rstrip(SPACE)
            if piece:
                pieces.append(piece)
            place, touches = stop, True
        return "\n".join(pieces)
