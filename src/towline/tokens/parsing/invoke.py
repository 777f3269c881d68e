"""Formats that write a call as an `invoke` element: DSML (DeepSeek V3.2 and V4), MiniMax M2 and M3.

In DSML and MiniMax M2 each argument is a `parameter` element; DSML marks which values are strings, M2 leaves that to the
tool's schema. In M3 arguments are nested elements. A section holds the calls; a complete call counts even if the section's
tags are missing or the turn was cut after it.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from towline.tokens.parsing.base import ParsedCall
from towline.tokens.parsing.tagged import CallBlock, Scanner, TaggedFormat, unreadable_call
from towline.tokens.parsing.values import (
    DeclaredTools,
    bare,
    decode,
    encode,
    field_schema,
    item_schema,
    make_call,
    named_arguments,
    typed_value,
    value_as,
)

_HEAD = re.compile(r'\s++name="([^"<>\n]++)"\s*+(/?+)>')
_PARAMETER = re.compile(r'\s++name="([^"<>\n]++)"(?:\s++string="(true|false)")?+\s*+>')


class InvokeFormat(TaggedFormat):
    """A format with an `invoke` element per call and a `parameter` element per argument."""

    sections: ClassVar[tuple[str, ...]]
    """Names of the elements that hold calls; the first one is written."""
    mark: ClassVar[str] = ""
    """Prefix of the name in every tag."""

    @abstractmethod
    def write_value(self, key: str, value: Any) -> str:
        """The rest of a parameter's opening tag, and its content."""

    @abstractmethod
    def read_value(self, text: str, string: str | None, schema: Mapping[str, Any], key: str) -> tuple[Any] | None:
        """The value of a parameter; `string` is the attribute of its tag."""

    def _open(self, name: str) -> str:
        return f"<{self.mark}{name}"

    def _close(self, name: str) -> str:
        return f"</{self.mark}{name}>"

    def opening(self, scan: Scanner, start: int) -> int:
        sections = [scan.find(f"{self._open(name)}>", start) for name in self.sections]
        return min(scan.find(f"{self._open('invoke')} ", start), *sections)

    def inside(self, scan: Scanner, at: int) -> int:
        for name in self.sections:
            if scan.at(f"{self._open(name)}>", at):
                at += len(self._open(name)) + 1
                first = scan.skip(at)
                return first + len(self._open("invoke")) if scan.at(f"{self._open('invoke')} ", first) else at
        return at + len(self._open("invoke"))

    def read(self, scan: Scanner, at: int, inside: int, bound: int, declared: DeclaredTools) -> CallBlock:
        head = (
            _HEAD.match(scan.text, inside)
            if scan.at(self._open("invoke"), inside - len(self._open("invoke")))
            else None
        )
        if head is None:
            return unreadable_call(scan, inside, bound, self._close(self.sections[0]))
        found = ({}, head.end()) if head[2] else self._arguments(scan, head[1], head.end(), bound, declared)
        call = make_call(head[1], found[0], declared) if found else None
        if found is None:
            scan.failed()  # It was parsed up to the error, which may be far away.
        block = (
            CallBlock(found[1], [call])
            if found and call
            else unreadable_call(scan, inside, bound, self._close("invoke"))
        )
        ending = scan.skip(block.stop)
        for name in self.sections:
            if scan.at(self._close(name), ending):
                block.stop = ending + len(self._close(name))
        return block

    def _arguments(
        self, scan: Scanner, name: str, start: int, bound: int, declared: DeclaredTools
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
        schema, values = declared.parameters(name), dict[str, Any]()
        for key, string, first, last in spans:
            value = self.read_value(scan.text[first:last], string, schema, key)
            if value is None:
                return None
            values[key] = value[0]
        return values, place + len(self._close("invoke"))

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = []
        for call in calls:
            parameters = [
                f"{self._open('parameter')} {self.write_value(key, value)}{self._close('parameter')}\n"
                for key, value in named_arguments(call).items()
            ]
            head = f'{self._open("invoke")} name="{call.name}">'
            written.append(f"{head}\n{''.join(parameters)}{self._close('invoke')}\n")
        section = self.sections[0]
        return f"{self.before}{self._open(section)}>\n{''.join(written)}{self._close(section)}"

    before: ClassVar[str] = "\n\n"
    """What is written before the section."""


class Dsml(InvokeFormat):
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
        return decode(text) if string == "false" else (typed_value(text, schema, key),)


class MiniMaxM2(InvokeFormat):
    """MiniMax M2."""

    name = "minimax_m2"
    sections = ("minimax:tool_call",)
    before = "\n"

    def write_value(self, key: str, value: Any) -> str:
        return f'name="{key}">{bare(value)}'

    def read_value(self, text: str, string: str | None, schema: Mapping[str, Any], key: str) -> tuple[Any] | None:
        return (typed_value(text, schema, key),)


_M3_MARK = "]<]minimax[>["
_M3_OPEN, _M3_CLOSE = f"{_M3_MARK}<tool_call>", f"{_M3_MARK}</tool_call>"
_M3_INVOKE, _M3_INVOKE_END = f"{_M3_MARK}<invoke", f"{_M3_MARK}</invoke>"
_M3_HEAD = re.compile(r'\s++name="([^"<>\n]++)"\s*+>')
_M3_TAG = re.compile(re.escape(_M3_MARK) + r"\s*+<([^<>/\s][^<>\n]*+)>")
_M3_ITEM = "item"
_MAX_DEPTH = 64


class MiniMaxM3(TaggedFormat):
    """MiniMax M3: calls as nested elements, every tag after the model's own namespace token.

    An argument is an element named by its key; an object's fields and an array's items are elements inside it. Only the
    tool's schema tells a bare `5` from the string. `null` cannot be written.
    """

    name = "minimax_m3"
    thinking = (("<mm:think>", "</mm:think>"),)
    thinking_space = ("", "", "")

    def opening(self, scan: Scanner, start: int) -> int:
        return min(scan.find(_M3_OPEN, start), scan.find(f"{_M3_INVOKE} ", start))

    def inside(self, scan: Scanner, at: int) -> int:
        if not scan.at(_M3_OPEN, at):
            return at + len(_M3_INVOKE)
        first = scan.skip(at + len(_M3_OPEN))
        return first + len(_M3_INVOKE) if scan.at(f"{_M3_INVOKE} ", first) else at + len(_M3_OPEN)

    def read(self, scan: Scanner, at: int, inside: int, bound: int, declared: DeclaredTools) -> CallBlock:
        head = _M3_HEAD.match(scan.text, inside) if scan.at(_M3_INVOKE, inside - len(_M3_INVOKE)) else None
        if head is None:
            return unreadable_call(scan, inside, bound, _M3_CLOSE)
        schema = declared.parameters(head[1])
        found = _fields(scan, scan.skip(head.end()), scan.reach(bound), schema, schema, 0)
        call = make_call(head[1], found[0], declared) if found and scan.at(_M3_INVOKE_END, found[1]) else None
        if found is None or call is None:
            block = unreadable_call(scan, inside, bound, _M3_INVOKE_END)
        else:
            block = CallBlock(found[1] + len(_M3_INVOKE_END), [call])
        ending = scan.skip(block.stop)
        if scan.at(_M3_CLOSE, ending):
            block.stop = ending + len(_M3_CLOSE)
        return block

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = []
        for call in calls:
            fields = "".join(_element(key, value) for key, value in named_arguments(call).items())
            written.append(f'{_M3_INVOKE} name="{call.name}">{fields}{_M3_INVOKE_END}\n')
        return f"{_M3_OPEN}\n{''.join(written)}{_M3_CLOSE}"


def _element(name: str, value: Any) -> str:
    if value is None:
        raise ValueError("null cannot be written")
    if isinstance(value, dict):
        content = "".join(_element(key, inner) for key, inner in value.items())
    elif isinstance(value, list):
        content = "".join(_element(_M3_ITEM, inner) for inner in value)
    else:
        content = bare(value)
    return f"{_M3_MARK}<{name}>{content}{_M3_MARK}</{name}>"


def _fields(
    scan: Scanner, place: int, reach: int, schema: Any, root: Mapping[str, Any], depth: int
) -> tuple[dict[str, Any], int] | None:
    """Consecutive elements as an object, and where they end."""
    values: dict[str, Any] = {}
    while tag := _M3_TAG.match(scan.text, place):
        found = _value(scan, tag.end(), tag[1], reach, field_schema(schema, tag[1], root), root, depth)
        if found is None:
            return None
        values[tag[1]] = found[0]
        place = scan.skip(found[1])
    return values, place


def _value(
    scan: Scanner, start: int, name: str, reach: int, schema: Any, root: Mapping[str, Any], depth: int
) -> tuple[Any, int] | None:
    """The value of an element, and where the element ends."""
    close = f"{_M3_MARK}</{name}>"
    first = scan.skip(start)
    tag = _M3_TAG.match(scan.text, first)
    if tag is None:
        stop = scan.text.find(close, start, reach)
        if stop < 0:
            return None
        return value_as(scan.text[start:stop], schema, root), stop + len(close)
    if depth >= _MAX_DEPTH:
        return None
    if tag[1] == _M3_ITEM:
        listed, place = [], first
        while (tag := _M3_TAG.match(scan.text, place)) and tag[1] == _M3_ITEM:
            item = _value(scan, tag.end(), _M3_ITEM, reach, item_schema(schema, root), root, depth + 1)
            if item is None:
                return None
            listed.append(item[0])
            place = scan.skip(item[1])
        return (listed, place + len(close)) if scan.at(close, place) else None
    found = _fields(scan, first, reach, schema, root, depth + 1)
    return (found[0], found[1] + len(close)) if found and scan.at(close, found[1]) else None
