"""No calls at all: what is left when a template shows no way to call a tool."""

from __future__ import annotations

from collections.abc import Sequence

from towline.tokens.parsing.base import ParsedCall, Unwritable
from towline.tokens.parsing.scan import Scan
from towline.tokens.parsing.tagged import Block, Tagged
from towline.tokens.parsing.values import Offered


class Plain(Tagged):
    name = "plain"

    def opening(self, scan: Scan, start: int) -> int:
        return scan.end

    def inside(self, scan: Scan, at: int) -> int:
        return scan.end

    def read(self, scan: Scan, at: int, inside: int, bound: int, offered: Offered) -> Block:
        return Block(scan.end, [])

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        raise Unwritable(self.name, "it has no calls")
