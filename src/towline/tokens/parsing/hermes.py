"""Hermes, Qwen2.5, Qwen3: `<tool_call>` around a JSON object with `name` and `arguments`."""

from __future__ import annotations

from collections.abc import Sequence

from towline.tokens.parsing.base import ParsedCall
from towline.tokens.parsing.scan import Scan
from towline.tokens.parsing.tagged import Block, Tagged, broken
from towline.tokens.parsing.values import Offered, call_from_object, encode

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Hermes(Tagged):
    name = "hermes"

    def opening(self, scan: Scan, start: int) -> int:
        return scan.find(_OPEN, start)

    def inside(self, scan: Scan, at: int) -> int:
        return at + len(_OPEN)

    def read(self, scan: Scan, at: int, inside: int, bound: int, offered: Offered) -> Block:
        found = scan.json(scan.skip(inside), bound)
        if found is not None:
            place = scan.skip(found[1])
            call = call_from_object(found[0], offered)
            if call is not None and scan.at(_CLOSE, place):
                return Block(place + len(_CLOSE), [call])
        return broken(scan, inside, bound, _CLOSE)

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = [f"{_OPEN}\n{encode({'name': c.name, 'arguments': c.arguments})}\n{_CLOSE}" for c in calls]
        return "\n" * bool(after) + "\n".join(written)
