"""GLM 4.5 and later: `<tool_call>name` with `<arg_key>` and bare `<arg_value>` pairs, on lines of their own or not."""

from __future__ import annotations

import re
from collections.abc import Sequence

from towline.tokens.parsing.base import SPACE, ParsedCall
from towline.tokens.parsing.scan import Scan
from towline.tokens.parsing.schema import typed
from towline.tokens.parsing.tagged import Block, Tagged, broken
from towline.tokens.parsing.values import Offered, call, encode

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(r'[^\s<>{}"]++')
_KEY = re.compile(r"<arg_key>([^<>]++)</arg_key>")


class Glm(Tagged):
    name = "glm"
    thinking_space = ("", "", "\n")

    def opening(self, scan: Scan, start: int) -> int:
        return scan.find(_OPEN, start)

    def inside(self, scan: Scan, at: int) -> int:
        return at + len(_OPEN)

    def read(self, scan: Scan, at: int, inside: int, bound: int, offered: Offered) -> Block:
        name = _NAME.match(scan.text, scan.skip(inside))
        found = self._values(scan, name.end(), scan.reach(bound)) if name else None
        if name is not None and found is not None:
            schema = offered.parameters(name[0])
            made = call(name[0], {key: typed(text, schema, key) for key, text in found[0]}, offered)
            if made is not None:
                return Block(found[1], [made])
        return broken(scan, inside, bound, _CLOSE)

    def _values(self, scan: Scan, start: int, reach: int) -> tuple[list[tuple[str, str]], int] | None:
        """Keys with their text, and where the call ends."""
        spans = []
        place = scan.skip(start)
        while key := _KEY.match(scan.text, place):
            value = scan.skip(key.end())
            stop = scan.find(_VALUE_END, value) if scan.at(_VALUE, value) else scan.end
            if stop >= reach:
                return None
            spans.append((key[1].strip(SPACE), value + len(_VALUE), stop))
            place = scan.skip(stop + len(_VALUE_END))
        if not scan.at(_CLOSE, place):
            return None
        return [(key, scan.text[a:b]) for key, a, b in spans], place + len(_CLOSE)

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = []
        for made in calls:
            if isinstance(made.arguments, str):
                raise ValueError("arguments are pairs of a key and a value")
            pairs = [
                f"<arg_key>{key}</arg_key>\n{_VALUE}{value if isinstance(value, str) else encode(value)}{_VALUE_END}\n"
                for key, value in made.arguments.items()
            ]
            written.append(f"\n{_OPEN}{made.name}\n{''.join(pairs)}{_CLOSE}")
        return "".join(written)
