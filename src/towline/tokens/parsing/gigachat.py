"""GigaChat 3: `<|function_call|>` and a JSON object with `name` and `arguments`; nothing closes it but its end."""

from __future__ import annotations

from collections.abc import Sequence

from towline.tokens.parsing.base import ParsedCall
from towline.tokens.parsing.scan import Scan
from towline.tokens.parsing.tagged import Block, Tagged
from towline.tokens.parsing.values import Offered, call_from_object, encode

_OPEN = "<|function_call|>"


class GigaChat(Tagged):
    name = "gigachat"

    def opening(self, scan: Scan, start: int) -> int:
        return scan.find(_OPEN, start)

    def inside(self, scan: Scan, at: int) -> int:
        return at + len(_OPEN)

    def read(self, scan: Scan, at: int, inside: int, bound: int, offered: Offered) -> Block:
        found = scan.json(scan.skip(inside), bound)
        made = call_from_object(found[0], offered) if found else None
        return Block(found[1], [made]) if found and made else Block(bound, None)

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        return "".join(f"{_OPEN}{encode({'name': made.name, 'arguments': made.arguments})}" for made in calls)
