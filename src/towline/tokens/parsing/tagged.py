"""The course that all formats with tags in running text share: reasoning first, then text with calls in it.

Reasoning is one block at the very start, or what the prompt opened and the first closing tag ends; a tag further on is
text like any other, since agents write about such tags. Nothing inside reasoning is looked at for calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from towline.conversation import Tool
from towline.tokens.parsing.base import SPACE, Parsed, ParsedCall
from towline.tokens.parsing.scan import Scan
from towline.tokens.parsing.values import Offered
from towline.tokens.parsing.writing import check, encoded


@dataclass(slots=True)
class Block:
    """What an opening marker turned out to begin: calls, a call that cannot be read, or text after all."""

    stop: int
    calls: list[ParsedCall] | None
    """`None` if it cannot be read; empty if it is no call."""


class Tagged(ABC):
    """A format that marks calls with tags."""

    name: ClassVar[str]
    thinking: ClassVar[tuple[tuple[str, str], ...]] = (("<think>", "</think>"),)
    """Tags of reasoning; the first pair is the one that is written."""
    thinking_space: ClassVar[tuple[str, str, str]] = ("\n", "\n", "\n\n")
    """What is written after the opening tag, before the closing tag and after it."""
    native_ids: ClassVar[bool] = False

    @abstractmethod
    def opening(self, scan: Scan, start: int) -> int:
        """Where the next call opens at or after `start`."""

    @abstractmethod
    def inside(self, scan: Scan, at: int) -> int:
        """Where the inside of the call that opens at `at` begins."""

    @abstractmethod
    def read(self, scan: Scan, at: int, inside: int, bound: int, offered: Offered) -> Block:
        """Read the call that opens at `at`; the next one opens at `bound`."""

    @abstractmethod
    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        """The calls as sampled after the text `after`."""

    def parse(self, text: str, tools: Sequence[Tool], *, reasoning_open: bool) -> Parsed:
        reasoning, start = self._reasoning(text, reasoning_open)
        if start is None:
            return Parsed("", reasoning, (), (), True)
        scan = Scan(text, start, trim=start > 0)
        offered = Offered(tools)
        at = self.opening(scan, start)
        while at < scan.end:
            inside = self.inside(scan, at)
            block = self.read(scan, at, inside, self.opening(scan, inside), offered)
            if block.calls is None:
                scan.keep(at, block.stop)
                scan.astray()
            elif block.calls:
                scan.take(at, block.stop, block.calls)
            at = self.opening(scan, block.stop)
        return Parsed(scan.visible(), reasoning, tuple(scan.calls), tuple(scan.malformed), False)

    def _reasoning(self, text: str, opened: bool) -> tuple[str | None, int | None]:
        """The reasoning and where the text after it starts; no start if the reasoning is not closed."""
        place = len(text) - len(text.lstrip(SPACE))
        pairs = list(self.thinking)
        for open, close in self.thinking:
            if text.startswith(open, place):
                # A model may repeat the tag that the prompt has opened.
                place, pairs, opened = place + len(open), [(open, close)], True
                break
        if not opened:
            return None, 0
        stop, close = min((at if (at := text.find(close, place)) >= 0 else len(text), close) for _, close in pairs)
        reasoning = text[place:stop].strip(SPACE) or None
        return reasoning, stop + len(close) if stop < len(text) else None

    def write(
        self,
        reasoning: str | None,
        text: str,
        calls: Sequence[ParsedCall],
        *,
        tools: Sequence[Tool] = (),
        reasoning_open: bool = False,
    ) -> str:
        written = ""
        if reasoning or reasoning_open:
            (open, close), (first, last, after) = self.thinking[0], self.thinking_space
            written = f"{'' if reasoning_open else open + first}{reasoning or ''}{last}{close}{after}"
        written += text
        if calls:
            written += encoded(self.name, lambda: self.write_calls(calls, text))
        check(self, written, reasoning, text, calls, tools, reasoning_open, native_ids=self.native_ids)
        return written


def broken(scan: Scan, inside: int, bound: int, close: str) -> Block:
    """A call that cannot be read: it goes up to its closing marker, or to the next call, or to the end."""
    closing = scan.find(close, inside)
    return Block(closing + len(close) if closing < bound else bound, None)
