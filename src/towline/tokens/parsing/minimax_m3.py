"""MiniMax M3: calls as nested elements, every tag behind the model's own namespace token.

An argument is an element named by its key; an object's fields and an array's items are elements inside it. Only the
tool's schema tells a bare `5` from the string, as in other formats that write values bare. `null` is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from towline.tokens.parsing.base import ParsedCall
from towline.tokens.parsing.scan import Scan
from towline.tokens.parsing.schema import child, items, typed_as
from towline.tokens.parsing.tagged import Block, Tagged, broken
from towline.tokens.parsing.values import Offered, call, encode

_MARK = "]<]minimax[>["
_OPEN, _CLOSE = f"{_MARK}<tool_call>", f"{_MARK}</tool_call>"
_INVOKE, _INVOKE_END = f"{_MARK}<invoke", f"{_MARK}</invoke>"
_HEAD = re.compile(r'\s++name="([^"<>\n]++)"\s*+>')
_TAG = re.compile(re.escape(_MARK) + r"\s*+<([^<>/\s][^<>\n]*+)>")
_ITEM = "item"
_DEEPEST = 64


class MiniMaxM3(Tagged):
    name = "minimax_m3"
    thinking = (("<mm:think>", "</mm:think>"),)
    thinking_space = ("", "", "")

    def opening(self, scan: Scan, start: int) -> int:
        return min(scan.find(_OPEN, start), scan.find(f"{_INVOKE} ", start))

    def inside(self, scan: Scan, at: int) -> int:
        if not scan.at(_OPEN, at):
            return at + len(_INVOKE)
        first = scan.skip(at + len(_OPEN))
        return first + len(_INVOKE) if scan.at(f"{_INVOKE} ", first) else at + len(_OPEN)

    def read(self, scan: Scan, at: int, inside: int, bound: int, offered: Offered) -> Block:
        head = _HEAD.match(scan.text, inside) if scan.at(_INVOKE, inside - len(_INVOKE)) else None
        if head is None:
            return broken(scan, inside, bound, _CLOSE)
        schema = offered.parameters(head[1])
        found = _fields(scan, scan.skip(head.end()), scan.reach(bound), schema, schema, 0)
        made = call(head[1], found[0], offered) if found and scan.at(_INVOKE_END, found[1]) else None
        if found is None or made is None:
            block = broken(scan, inside, bound, _INVOKE_END)
        else:
            block = Block(found[1] + len(_INVOKE_END), [made])
        ending = scan.skip(block.stop)
        if scan.at(_CLOSE, ending):
            block.stop = ending + len(_CLOSE)
        return block

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = []
        for made in calls:
            if isinstance(made.arguments, str):
                raise ValueError("arguments are elements")
            fields = "".join(_element(key, value) for key, value in made.arguments.items())
            written.append(f'{_INVOKE} name="{made.name}">{fields}{_INVOKE_END}\n')
        return f"{_OPEN}\n{''.join(written)}{_CLOSE}"


def _element(name: str, value: Any) -> str:
    if value is None:
        raise ValueError("null cannot be written")
    if isinstance(value, dict):
        content = "".join(_element(key, inner) for key, inner in value.items())
    elif isinstance(value, list):
        content = "".join(_element(_ITEM, inner) for inner in value)
    else:
        content = value if isinstance(value, str) else encode(value)
    return f"{_MARK}<{name}>{content}{_MARK}</{name}>"


def _fields(
    scan: Scan, place: int, reach: int, schema: Any, root: Mapping[str, Any], depth: int
) -> tuple[dict[str, Any], int] | None:
    """Elements one after another as an object, and where what follows them begins."""
    values: dict[str, Any] = {}
    while tag := _TAG.match(scan.text, place):
        found = _value(scan, tag.end(), tag[1], reach, child(schema, tag[1], root), root, depth)
        if found is None:
            return None
        values[tag[1]] = found[0]
        place = scan.skip(found[1])
    return values, place


def _value(
    scan: Scan, start: int, name: str, reach: int, schema: Any, root: Mapping[str, Any], depth: int
) -> tuple[Any, int] | None:
    """The content of an element, and where the element ends."""
    close = f"{_MARK}</{name}>"
    first = scan.skip(start)
    tag = _TAG.match(scan.text, first)
    if tag is None:
        stop = scan.text.find(close, start, reach)
        if stop < 0:
            return None
        return typed_as(scan.text[start:stop], schema, root), stop + len(close)
    if depth >= _DEEPEST:
        return None
    if tag[1] == _ITEM:
        listed, place = [], first
        while (tag := _TAG.match(scan.text, place)) and tag[1] == _ITEM:
            item = _value(scan, tag.end(), _ITEM, reach, items(schema, root), root, depth + 1)
            if item is None:
                return None
            listed.append(item[0])
            place = scan.skip(item[1])
        return (listed, place + len(close)) if scan.at(close, place) else None
    found = _fields(scan, first, reach, schema, root, depth + 1)
    return (found[0], found[1] + len(close)) if found and scan.at(close, found[1]) else None
