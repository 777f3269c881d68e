"""Formats that put calls with markers of their own into a section: DeepSeek, Kimi.

The section's markers belong to the adjacent calls: they are removed with a call that is parsed, and stay in the text with
one that is not. A closed call counts even if its section is not closed, as when the turn was cut right after it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from towline.conversation import Tool
from towline.tokens.parsing.base import SPACE, ParsedCall
from towline.tokens.parsing.tagged import CallBlock, Scanner, TaggedFormat, unreadable_call
from towline.tokens.parsing.values import DeclaredTools, bare, encode, make_call


class SectionFormat(TaggedFormat):
    """A format with sections of calls."""

    section: ClassVar[tuple[str, str]]
    block: ClassVar[tuple[str, str]]
    between: ClassVar[str] = ""
    """What is written between two calls."""

    @abstractmethod
    def read_one(
        self, scan: Scanner, inside: int, bound: int, declared: DeclaredTools
    ) -> tuple[ParsedCall, int] | None:
        """The call whose content begins at `inside`, and where its closing marker is."""

    @abstractmethod
    def write_one(self, call: ParsedCall) -> str:
        """The content of a call."""

    def opening(self, scan: Scanner, start: int) -> int:
        return min(scan.find(self.section[0], start), scan.find(self.block[0], start))

    def inside(self, scan: Scanner, at: int) -> int:
        after = at + len(self.section[0]) if scan.at(self.section[0], at) else at
        first = scan.skip(after)
        return first + len(self.block[0]) if scan.at(self.block[0], first) else after

    def read(self, scan: Scanner, at: int, inside: int, bound: int, declared: DeclaredTools) -> CallBlock:
        if not scan.at(self.block[0], inside - len(self.block[0])):
            return unreadable_call(scan, inside, bound, self.section[1])
        found = self.read_one(scan, inside, bound, declared)
        if found is None:
            block = unreadable_call(scan, inside, bound, self.block[1])
        else:
            block = CallBlock(found[1] + len(self.block[1]), [found[0]])
        ending = scan.skip(block.stop)
        if scan.at(self.section[1], ending):
            block.stop = ending + len(self.section[1])
        return block

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = [f"{self.block[0]}{self.write_one(call)}{self.block[1]}" for call in calls]
        return f"{self.section[0]}{self.between.join(written)}{self.section[1]}"


def marker(words: str) -> str:
    """DeepSeek's spelling of a special token, with U+FF5C and U+2581."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


_SEPARATOR = marker("tool sep")
_KIND, _FENCE = "function", "```"


class DeepSeek(SectionFormat):
    """DeepSeek V3, R1 and V3.1, with two shapes of a call.

    V3 and R1: `function`, the separator, the name, a newline, and the arguments in a fenced `json` block. V3.1: the name,
    the separator and the arguments.
    """

    name = "deepseek"
    section = (marker("tool calls begin"), marker("tool calls end"))
    block = (marker("tool call begin"), marker("tool call end"))
    between = "\n"

    def read_one(
        self, scan: Scanner, inside: int, bound: int, declared: DeclaredTools
    ) -> tuple[ParsedCall, int] | None:
        separator = scan.find(_SEPARATOR, inside)
        close = scan.find(self.block[1], inside)
        if separator >= min(close, bound):
            return None
        head = scan.text[inside:separator].strip(SPACE)
        body = separator + len(_SEPARATOR)
        line = scan.find("\n", body)
        if head == _KIND and line < close and not scan.at("{", scan.skip(body)):
            return self._fenced(scan, scan.text[body:line].strip(SPACE), line, bound, declared)
        found = scan.arguments(body, bound, self.block[1], custom=declared.custom(head))
        call = make_call(head, found[0], declared) if found else None
        return (call, found[1]) if call and found else None

    def _fenced(
        self, scan: Scanner, name: str, start: int, bound: int, declared: DeclaredTools
    ) -> tuple[ParsedCall, int] | None:
        fence = scan.skip(start)
        value = scan.skip(scan.skip(fence, _FENCE), "json") if scan.at(_FENCE, fence) else fence
        found = scan.json(scan.skip(value), bound)
        if found is None:
            return None
        place = scan.skip(scan.skip(found[1], _FENCE if scan.at(_FENCE, fence) else ""))
        call = make_call(name, found[0], declared)
        return (call, place) if call and scan.at(self.block[1], place) else None

    def write_one(self, call: ParsedCall) -> str:
        if isinstance(call.arguments, str):
            return f"{call.name}{_SEPARATOR}{call.arguments}"
        return f"{_KIND}{_SEPARATOR}{call.name}\n{_FENCE}json\n{encode(call.arguments)}\n{_FENCE}"


_ARGUMENTS = "<|tool_call_argument_begin|>"
_NAMESPACE = "functions."


class Kimi(SectionFormat):
    """Kimi K2: a call is its native id, `functions.name:index`, and its arguments."""

    name = "kimi"
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    block = ("<|tool_call_begin|>", "<|tool_call_end|>")
    thinking_space = ("", "", "")
    native_ids = True

    def read_one(
        self, scan: Scanner, inside: int, bound: int, declared: DeclaredTools
    ) -> tuple[ParsedCall, int] | None:
        body = scan.find(_ARGUMENTS, inside)
        if body >= min(scan.find(self.block[1], inside), bound):
            return None
        native_id = scan.text[inside:body].strip(SPACE)
        name = _tool_name(native_id)
        found = scan.arguments(body + len(_ARGUMENTS), bound, self.block[1], custom=declared.custom(name))
        call = make_call(name, found[0], declared, native_id) if found else None
        return (call, found[1]) if call and found else None

    def write(
        self,
        reasoning: str | None,
        text: str,
        calls: Sequence[ParsedCall],
        *,
        tools: Sequence[Tool] = (),
        reasoning_open: bool = False,
    ) -> str:
        """Like every format, with a native id for each call whose id does not name its tool."""
        named = [
            call
            if _tool_name(call.native_id) == call.name
            else replace(call, native_id=f"{_NAMESPACE}{call.name}:{index}")
            for index, call in enumerate(calls)
        ]
        return super().write(reasoning, text, named, tools=tools, reasoning_open=reasoning_open)

    def write_one(self, call: ParsedCall) -> str:
        return f"{call.native_id}{_ARGUMENTS}{bare(call.arguments)}"


def _tool_name(native_id: str) -> str:
    """The tool that a native id names."""
    name, colon, index = native_id.rpartition(":")
    return (name if colon and index.isdecimal() else native_id).removeprefix(_NAMESPACE)
