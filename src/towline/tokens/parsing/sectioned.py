"""Formats that put calls with markers of their own into a section: DeepSeek, Kimi.

The section's markers belong to the calls next to them: they go with a call that is read, and stay in the text with one
that is not. A call that is closed counts even where its section is not, as when the turn was cut right behind it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from towline.tokens.parsing.base import ParsedCall
from towline.tokens.parsing.scan import Scan
from towline.tokens.parsing.tagged import Block, Tagged, broken
from towline.tokens.parsing.values import Offered


class Sectioned(Tagged):
    """A format with sections of calls."""

    section: ClassVar[tuple[str, str]]
    block: ClassVar[tuple[str, str]]
    between: ClassVar[str] = ""
    """What is written between two calls."""

    @abstractmethod
    def read_one(self, scan: Scan, inside: int, bound: int, offered: Offered) -> tuple[ParsedCall, int] | None:
        """The call whose inside begins at `inside`, and where its closing marker stands."""

    @abstractmethod
    def write_one(self, call: ParsedCall) -> str:
        """The inside of a call."""

    def opening(self, scan: Scan, start: int) -> int:
        return min(scan.find(self.section[0], start), scan.find(self.block[0], start))

    def inside(self, scan: Scan, at: int) -> int:
        after = at + len(self.section[0]) if scan.at(self.section[0], at) else at
        first = scan.skip(after)
        return first + len(self.block[0]) if scan.at(self.block[0], first) else after

    def read(self, scan: Scan, at: int, inside: int, bound: int, offered: Offered) -> Block:
        if not scan.at(self.block[0], inside - len(self.block[0])):
            return broken(scan, inside, bound, self.section[1])
        found = self.read_one(scan, inside, bound, offered)
        if found is None:
            block = broken(scan, inside, bound, self.block[1])
        else:
            block = Block(found[1] + len(self.block[1]), [found[0]])
        ending = scan.skip(block.stop)
        if scan.at(self.section[1], ending):
            block.stop = ending + len(self.section[1])
        return block

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = [f"{self.block[0]}{self.write_one(call)}{self.block[1]}" for call in calls]
        return f"{self.section[0]}{self.between.join(written)}{self.section[1]}"
