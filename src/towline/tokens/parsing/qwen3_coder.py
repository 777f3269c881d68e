"""Qwen3-Coder, Qwen3.5 and later, Nemotron 3: `<function=name>` with bare `<parameter=key>` values.

A value stands between one newline on each side, which are not part of it. The models at times leave out the
surrounding `<tool_call>`; a complete `<function=…>…</function>` is a call without it too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from towline.tokens.parsing.base import SPACE, ParsedCall
from towline.tokens.parsing.scan import Scan
from towline.tokens.parsing.schema import typed
from towline.tokens.parsing.tagged import Block, Tagged, broken
from towline.tokens.parsing.values import Offered, call, encode

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"([^<>\n]++)>")


class Qwen3Coder(Tagged):
    name = "qwen3_coder"
    tags: ClassVar[tuple[str, str]] = ("<tool_call>", "</tool_call>")
    around: ClassVar[str] = "\n"
    """What stands on each side of a value and is not part of it."""

    def opening(self, scan: Scan, start: int) -> int:
        return min(scan.find(self.tags[0], start), scan.find(_FUNCTION, start))

    def inside(self, scan: Scan, at: int) -> int:
        after = at + len(self.tags[0]) if scan.at(self.tags[0], at) else at
        function = scan.skip(after)
        return function + len(_FUNCTION) if scan.at(_FUNCTION, function) else after

    def read(self, scan: Scan, at: int, inside: int, bound: int, offered: Offered) -> Block:
        wrapped = scan.at(self.tags[0], at)
        name = _NAME.match(scan.text, inside) if scan.at(_FUNCTION, inside - len(_FUNCTION)) else None
        if name is None:
            return broken(scan, inside, bound, self.tags[1]) if wrapped else Block(inside, [])
        found = self._parameters(scan, name.end(), scan.reach(bound))
        if found is not None:
            values, stop = found
            closing = scan.skip(stop)
            if scan.at(self.tags[1], closing):
                stop = closing + len(self.tags[1])
            if stop > closing or not wrapped:
                title = name[1].strip(SPACE)
                schema = offered.parameters(title)
                made = call(title, {key: typed(text, schema, key) for key, text in values}, offered)
                if made is not None:
                    return Block(stop, [made])
        return broken(scan, inside, bound, self.tags[1] if wrapped else _FUNCTION_END)

    def _parameters(self, scan: Scan, start: int, reach: int) -> tuple[list[tuple[str, str]], int] | None:
        """Keys with their text, and where the function ends."""
        spans = []
        place = scan.skip(start)
        while scan.at(_PARAMETER, place):
            key = _NAME.match(scan.text, place + len(_PARAMETER))
            stop = scan.find(_PARAMETER_END, key.end()) if key else scan.end
            if key is None or stop >= reach:
                return None
            spans.append((key[1].strip(SPACE), key.end(), stop))
            place = scan.skip(stop + len(_PARAMETER_END))
        if not scan.at(_FUNCTION_END, place):
            return None
        values = [(key, scan.text[a:b].removeprefix(self.around).removesuffix(self.around)) for key, a, b in spans]
        return values, place + len(_FUNCTION_END)

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = []
        for made in calls:
            if isinstance(made.arguments, str):
                raise ValueError("arguments are named parameters")
            parameters = [
                f"{_PARAMETER}{key}>{self.around}{_bare(value)}{self.around}{_PARAMETER_END}\n"
                for key, value in made.arguments.items()
            ]
            function = f"{_FUNCTION}{made.name}>\n{''.join(parameters)}{_FUNCTION_END}"
            written.append(f"{self.tags[0]}\n{function}\n{self.tags[1]}")
        return "\n\n" * bool(after) + "\n".join(written)


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else encode(value)
