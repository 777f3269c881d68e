"""Formats that put all calls of a turn into one JSON list between two tags: Apertus, Apriel, Command R7B, Nemotron.

A list is one piece of text: with a call in it that cannot be read, it stays as it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from towline.tokens.parsing.base import ParsedCall
from towline.tokens.parsing.scan import Scan
from towline.tokens.parsing.tagged import Block, Tagged, broken
from towline.tokens.parsing.values import Offered, encode


class Listed(Tagged):
    """A format with a list of calls."""

    tags: ClassVar[tuple[str, str]]
    ends_turn: ClassVar[bool] = False
    """The closing tag may be the end of the turn itself, which is not part of its text."""

    @abstractmethod
    def read_item(self, value: Any, offered: Offered) -> ParsedCall | None:
        """The call that an item of the list is."""

    @abstractmethod
    def write_item(self, call: ParsedCall, place: int) -> dict[str, Any]:
        """The item of a call, the `place`-th of its turn."""

    def opening(self, scan: Scan, start: int) -> int:
        return scan.find(self.tags[0], start)

    def inside(self, scan: Scan, at: int) -> int:
        return at + len(self.tags[0])

    def read(self, scan: Scan, at: int, inside: int, bound: int, offered: Offered) -> Block:
        found = scan.json(scan.skip(inside), bound)
        if found is not None and isinstance(found[0], list):
            place = scan.skip(found[1])
            calls = [made for item in found[0] if (made := self.read_item(item, offered)) is not None]
            if calls and len(calls) == len(found[0]):
                if scan.at(self.tags[1], place):
                    return Block(place + len(self.tags[1]), calls)
                if self.ends_turn and place == scan.end:
                    return Block(place, calls)
        return broken(scan, inside, bound, self.tags[1])

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        items = [encode(self.write_item(call, place)) for place, call in enumerate(calls)]
        return f"{self.between(after)}{self.tags[0]}[{', '.join(items)}]{self.tags[1]}"

    def between(self, after: str) -> str:
        """What is written between the text `after` and the list."""
        return ""
