"""DeepSeek V3, R1 and V3.1. Two shapes of a call:

V3 and R1: `function`, the separator, the name, a newline, and the arguments in a fenced `json` block.
V3.1: the name, the separator and the arguments.

The markers are written with U+FF5C and U+2581, as in `marker`.
"""

from __future__ import annotations

from towline.tokens.parsing.base import SPACE, ParsedCall
from towline.tokens.parsing.scan import Scan
from towline.tokens.parsing.sectioned import Sectioned
from towline.tokens.parsing.values import Offered, call, encode


def marker(words: str) -> str:
    """DeepSeek's spelling of a special token."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


_SEPARATOR = marker("tool sep")
_KIND, _FENCE = "function", "```"


class DeepSeek(Sectioned):
    name = "deepseek"
    section = (marker("tool calls begin"), marker("tool calls end"))
    block = (marker("tool call begin"), marker("tool call end"))
    between = "\n"

    def read_one(self, scan: Scan, inside: int, bound: int, offered: Offered) -> tuple[ParsedCall, int] | None:
        separator = scan.find(_SEPARATOR, inside)
        close = scan.find(self.block[1], inside)
        if separator >= min(close, bound):
            return None
        head = scan.text[inside:separator].strip(SPACE)
        body = separator + len(_SEPARATOR)
        line = scan.find("\n", body)
        if head == _KIND and line < close and not scan.at("{", scan.skip(body)):
            return self._fenced(scan, scan.text[body:line].strip(SPACE), line, bound, offered)
        found = scan.arguments(body, bound, self.block[1], custom=offered.custom(head))
        made = call(head, found[0], offered) if found else None
        return (made, found[1]) if made and found else None

    def _fenced(self, scan: Scan, name: str, start: int, bound: int, offered: Offered) -> tuple[ParsedCall, int] | None:
        fence = scan.skip(start)
        value = scan.skip(scan.skip(fence, _FENCE), "json") if scan.at(_FENCE, fence) else fence
        found = scan.json(scan.skip(value), bound)
        if found is None:
            return None
        place = scan.skip(scan.skip(found[1], _FENCE if scan.at(_FENCE, fence) else ""))
        made = call(name, found[0], offered)
        return (made, place) if made and scan.at(self.block[1], place) else None

    def write_one(self, call: ParsedCall) -> str:
        if isinstance(call.arguments, str):
            return f"{call.name}{_SEPARATOR}{call.arguments}"
        return f"{_KIND}{_SEPARATOR}{call.name}\n{_FENCE}json\n{encode(call.arguments)}\n{_FENCE}"
