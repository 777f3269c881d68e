"""What all formats with tags in running text share: reasoning first, then text with calls in it.

Reasoning is one block at the very start, or what the prompt opened and the first closing tag ends. A tag further on is
ordinary text, since agents write about such tags. Nothing inside reasoning is parsed for calls.

The text is parsed in one pass, from marker to marker, in time linear in the text, whatever was sampled. The next position
of each marker is cached, so that searching for one that is far away or absent costs one pass in total. A value may contain
its own format's opening marker (an agent that writes about tool calls), so parsing goes as far as the value does; after
`_MAX_FAILURES` failed calls in one reply it stops at the next opening marker, and each stretch of text is parsed once.

Writing a reply is checked by parsing it back: a reply that would come out different is refused with the reason.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from towline.conversation import Tool
from towline.tokens.parsing.base import SPACE, OutputFormat, ParsedCall, ParsedReply, UnwritableReply
from towline.tokens.parsing.values import DeclaredTools, canonical, decode_at

_MAX_FAILURES = 64
_SPACES = re.compile(f"[{SPACE}]*")


class Scanner:
    """One pass over `text` from `start`. Positions only grow; an absent marker is found at `end`."""

    __slots__ = ("_cuts", "_failures_left", "_seen", "calls", "end", "malformed", "start", "taken", "text", "trim")

    def __init__(self, text: str, start: int = 0, *, trim: bool = False):
        self.text = text
        self.start = start
        self.end = len(text)
        self.trim = trim
        """There is reasoning before `start`: the white space after it is part of neither reasoning nor text."""
        self.calls: list[ParsedCall] = []
        self.malformed: list[str] = []
        self.taken = -1
        """Where the last parsed call ended."""
        self._cuts: list[tuple[int, int]] = []
        self._seen: dict[str, tuple[int, int]] = {}
        self._failures_left = _MAX_FAILURES

    def find(self, marker: str, start: int) -> int:
        """The next position of `marker` at or after `start`."""
        asked, found = self._seen.get(marker, (-1, -1))
        if not asked <= start <= found:
            found = self.text.find(marker, start)
            found = self.end if found < 0 else found
            self._seen[marker] = (start, found)
        return found

    def skip(self, start: int, marker: str = "") -> int:
        """The position after the white space at `start`, and after `marker` if it follows."""
        match = _SPACES.match(self.text, start)
        place = match.end() if match else start
        return place + len(marker) if marker and self.text.startswith(marker, place) else place

    def at(self, marker: str, place: int) -> bool:
        return self.text.startswith(marker, place)

    def reach(self, bound: int) -> int:
        """How far a call may be parsed that should end before `bound`, where the next one opens."""
        return self.end if self._failures_left > 0 else bound

    def failed(self) -> None:
        """Count a call that could not be parsed."""
        self._failures_left -= 1

    def json(self, start: int, bound: int) -> tuple[Any, int] | None:
        """The JSON value at `start` and where it ends, `None` if there is none."""
        if self.reach(bound) == self.end:
            found = decode_at(self.text, start)
            if found is None:
                self.failed()
            return found
        found = decode_at(self.text[start:bound], 0)
        return None if found is None else (found[0], start + found[1])

    def arguments(self, start: int, bound: int, close: str, *, custom: bool) -> tuple[Any, int] | None:
        """The arguments between `start` and the marker `close`, and where that marker is.

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
        """The text from `start` to `stop` is these calls."""
        self.calls += calls
        self._cuts.append((start, stop))
        self.taken = stop

    def keep(self, start: int, stop: int) -> None:
        """The text from `start` to `stop` is a call that cannot be parsed: it stays text."""
        self.malformed.append(self.text[start:stop].rstrip(SPACE))

    def visible(self) -> str:
        """All text outside the calls. White space next to calls and reasoning is trimmed, any other is kept."""
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


@dataclass(slots=True)
class CallBlock:
    """What an opening marker turned out to begin: calls, a call that cannot be parsed, or just text."""

    stop: int
    calls: list[ParsedCall] | None
    """`None` if it cannot be parsed; empty if it is not a call."""


class TaggedFormat(ABC):
    """A format that marks calls with tags."""

    name: ClassVar[str]
    tags: ClassVar[tuple[str, str]] = ("", "")
    """Opening and closing tag of a call; formats with more than one opening tag override `opening` and `inside`."""
    thinking: ClassVar[tuple[tuple[str, str], ...]] = (("<think>", "</think>"),)
    """Pairs of reasoning tags; the first pair is the one that is written."""
    thinking_space: ClassVar[tuple[str, str, str]] = ("\n", "\n", "\n\n")
    """What is written after the opening tag, before the closing tag and after it."""
    native_ids: ClassVar[bool] = False

    def opening(self, scan: Scanner, start: int) -> int:
        """Where the next call opens at or after `start`."""
        return scan.find(self.tags[0], start)

    def inside(self, scan: Scanner, at: int) -> int:
        """Where the content of the call that opens at `at` begins."""
        return at + len(self.tags[0])

    @abstractmethod
    def read(self, scan: Scanner, at: int, inside: int, bound: int, declared: DeclaredTools) -> CallBlock:
        """Parse the call that opens at `at`; the next one opens at `bound`."""

    @abstractmethod
    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        """The calls as sampled after the text `after`. Raises `ValueError` for what the format cannot express."""

    def parse(self, text: str, tools: Sequence[Tool], *, reasoning_open: bool) -> ParsedReply:
        reasoning, start = self._reasoning(text, reasoning_open)
        if start is None:
            return ParsedReply("", reasoning, (), (), True)
        scan = Scanner(text, start, trim=start > 0)
        declared = DeclaredTools(tools)
        at = self.opening(scan, start)
        while at < scan.end:
            inside = self.inside(scan, at)
            block = self.read(scan, at, inside, self.opening(scan, inside), declared)
            if block.calls is None:
                scan.keep(at, block.stop)
                scan.failed()
            elif block.calls:
                scan.take(at, block.stop, block.calls)
            at = self.opening(scan, block.stop)
        return ParsedReply(scan.visible(), reasoning, tuple(scan.calls), tuple(scan.malformed), False)

    def _reasoning(self, text: str, opened: bool) -> tuple[str | None, int | None]:
        """The reasoning and where the text after it starts; no start if the reasoning is not closed."""
        place = len(text) - len(text.lstrip(SPACE))
        pairs = list(self.thinking)
        for open, close in self.thinking:
            if text.startswith(open, place):
                # A model may repeat the tag that the prompt already opened.
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
            written += encode_or_refuse(self.name, lambda: self.write_calls(calls, text))
        check_round_trip(self, written, reasoning, text, calls, tools, reasoning_open, native_ids=self.native_ids)
        return written


class Plain(TaggedFormat):
    """No calls at all: for templates with no known way to call a tool."""

    name = "plain"

    def opening(self, scan: Scanner, start: int) -> int:
        return scan.end

    def read(self, scan: Scanner, at: int, inside: int, bound: int, declared: DeclaredTools) -> CallBlock:
        return CallBlock(scan.end, [])

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        raise UnwritableReply(self.name, "it has no calls")


def unreadable_call(scan: Scanner, inside: int, bound: int, close: str) -> CallBlock:
    """A call that cannot be parsed: it extends to its closing marker, or to the next call, or to the end."""
    closing = scan.find(close, inside)
    return CallBlock(closing + len(close) if closing < bound else bound, None)


# Checked writing


def encode_or_refuse(format: str, write: Callable[[], str]) -> str:
    """The result of `write`; a `ValueError` becomes `UnwritableReply`."""
    try:
        return write()
    except ValueError as error:
        raise UnwritableReply(format, str(error)) from error


def check_round_trip(
    format: OutputFormat,
    written: str,
    reasoning: str | None,
    text: str,
    calls: Sequence[ParsedCall],
    tools: Sequence[Tool],
    reasoning_open: bool,
    *,
    native_ids: bool,
) -> None:
    """Raise `UnwritableReply` unless `written` parses to the same reply."""
    read = format.parse(written, tools or _fitting_tools(calls), reasoning_open=reasoning_open)
    if (read.reasoning or "") != (reasoning or "").strip(SPACE) or read.reasoning_open:
        raise UnwritableReply(format.name, "the reasoning would be parsed differently")
    if _comparable(read.calls, native_ids) != _comparable(calls, native_ids) or read.malformed:
        raise UnwritableReply(format.name, "the calls would be parsed differently")
    if read.text.strip(SPACE) != text.strip(SPACE):
        raise UnwritableReply(format.name, "the text would be parsed differently")


def _comparable(calls: Sequence[ParsedCall], native_ids: bool) -> list[tuple[str, bytes | None, str]]:
    return [(call.name, canonical(call.arguments), call.native_id if native_ids else "") for call in calls]


def _fitting_tools(calls: Sequence[ParsedCall]) -> list[Tool]:
    """Declarations that these calls fit: a parameter is a string if all its values are."""
    strings: dict[str, dict[str, bool]] = {}
    custom: set[str] = set()
    for call in calls:
        keys = strings.setdefault(call.name, {})
        if isinstance(call.arguments, str):
            custom.add(call.name)
            continue
        for key, value in call.arguments.items():
            keys[key] = keys.get(key, True) and isinstance(value, str)
    tools = []
    for name, keys in strings.items():
        properties: dict[str, Any] = {key: {"type": "string"} for key, string in keys.items() if string}
        tools.append(Tool(name, parameters={"type": "object", "properties": properties}, custom=name in custom))
    return tools
