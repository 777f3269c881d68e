"""Formats that write a call as an `invoke` element with a `parameter` element for each argument.

DeepSeek V3.2 and V4 (DSML) say of each value whether it is a string; MiniMax M2 leaves that to the tool's schema. A
section holds the calls; a complete call counts where the section's tags are missing or the turn was cut behind it.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from towline.tokens.parsing.base import ParsedCall
from towline.tokens.parsing.scan import Scan
from towline.tokens.parsing.schema import typed
from towline.tokens.parsing.tagged import Block, Tagged, broken
from towline.tokens.parsing.values import Offered, call, decode, encode

_HEAD = re.compile(r'\s++name="([^"<>\n]++)"\s*+(/?+)>')
_PARAMETER = re.compile(r'\s++name="([^"<>\n]++)"(?:\s++string="(true|false)")?+\s*+>')


class Invoked(Tagged):
    """A format with `invoke` elements."""

    sections: ClassVar[tuple[str, ...]]
    """Names of the elements that hold calls; the first is the one that is written."""
    mark: ClassVar[str] = ""
    """What stands before the name in every tag."""

    @abstractmethod
    def write_value(self, key: str, value: Any) -> str:
        """The rest of a parameter's opening tag, and its content."""

    @abstractmethod
    def read_value(self, text: str, string: str | None, schema: Mapping[str, Any], key: str) -> tuple[Any] | None:
        """The value of a parameter; `string` is what its tag says of it."""

    def _open(self, name: str) -> str:
        return f"<{self.mark}{name}"

    def _close(self, name: str) -> str:
        return f"</{self.mark}{name}>"

    def opening(self, scan: Scan, start: int) -> int:
        sections = [scan.find(f"{self._open(name)}>", start) for name in self.sections]
        return min(scan.find(f"{self._open('invoke')} ", start), *sections)

    def inside(self, scan: Scan, at: int) -> int:
        for name in self.sections:
            if scan.at(f"{self._open(name)}>", at):
                at += len(self._open(name)) + 1
                first = scan.skip(at)
                return first + len(self._open("invoke")) if scan.at(f"{self._open('invoke')} ", first) else at
        return at + len(self._open("invoke"))

    def read(self, scan: Scan, at: int, inside: int, bound: int, offered: Offered) -> Block:
        head = (
            _HEAD.match(scan.text, inside)
            if scan.at(self._open("invoke"), inside - len(self._open("invoke")))
            else None
        )
        if head is None:
            return broken(scan, inside, bound, self._close(self.sections[0]))
        found = ({}, head.end()) if head[2] else self._arguments(scan, head[1], head.end(), bound, offered)
        made = call(head[1], found[0], offered) if found else None
        if found is None:
            scan.astray()  # It was read to where it broke, which may be far.
        block = Block(found[1], [made]) if found and made else broken(scan, inside, bound, self._close("invoke"))
        ending = scan.skip(block.stop)
        for name in self.sections:
            if scan.at(self._close(name), ending):
                block.stop = ending + len(self._close(name))
        return block

    def _arguments(
        self, scan: Scan, name: str, start: int, bound: int, offered: Offered
    ) -> tuple[dict[str, Any], int] | None:
        """The arguments of a call, and where it ends."""
        place = scan.skip(start)
        if scan.at("{", place):
            whole = scan.json(place, bound)
            end = scan.skip(whole[1]) if whole else place
            if whole and isinstance(whole[0], dict) and scan.at(self._close("invoke"), end):
                return whole[0], end + len(self._close("invoke"))
            return None
        spans = []
        while scan.at(f"{self._open('parameter')} ", place):
            tag = _PARAMETER.match(scan.text, place + len(self._open("parameter")))
            stop = scan.find(self._close("parameter"), tag.end()) if tag else scan.end
            if tag is None or stop >= scan.reach(bound):
                return None
            spans.append((tag[1], tag[2], tag.end(), stop))
            place = scan.skip(stop + len(self._close("parameter")))
        if not scan.at(self._close("invoke"), place):
            return None
        schema, values = offered.parameters(name), dict[str, Any]()
        for key, string, first, last in spans:
            value = self.read_value(scan.text[first:last], string, schema, key)
            if value is None:
                return None
            values[key] = value[0]
        return values, place + len(self._close("invoke"))

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = []
        for made in calls:
            if isinstance(made.arguments, str):
                raise ValueError("arguments are named parameters")
            parameters = [
                f"{self._open('parameter')} {self.write_value(key, value)}{self._close('parameter')}\n"
                for key, value in made.arguments.items()
            ]
            head = f'{self._open("invoke")} name="{made.name}">'
            written.append(f"{head}\n{''.join(parameters)}{self._close('invoke')}\n")
        section = self.sections[0]
        return f"{self.before}{self._open(section)}>\n{''.join(written)}{self._close(section)}"

    before: ClassVar[str] = "\n\n"
    """What is written before the section."""


class Dsml(Invoked):
    """DeepSeek V4; V3.2 calls the section `function_calls`."""

    name = "dsml"
    sections = ("tool_calls", "function_calls")
    mark = "\uff5cDSML\uff5c"
    thinking_space = ("", "", "")

    def write_value(self, key: str, value: Any) -> str:
        if isinstance(value, str):
            return f'name="{key}" string="true">{value}'
        return f'name="{key}" string="false">{encode(value)}'

    def read_value(self, text: str, string: str | None, schema: Mapping[str, Any], key: str) -> tuple[Any] | None:
        if string == "true":
            return (text,)
        return decode(text) if string == "false" else (typed(text, schema, key),)


class MiniMaxM2(Invoked):
    name = "minimax_m2"
    sections = ("minimax:tool_call",)
    before = "\n"

    def write_value(self, key: str, value: Any) -> str:
        return f'name="{key}">{value if isinstance(value, str) else encode(value)}'

    def read_value(self, text: str, string: str | None, schema: Mapping[str, Any], key: str) -> tuple[Any] | None:
        return (typed(text, schema, key),)
