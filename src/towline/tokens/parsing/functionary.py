"""functionary 3.1: `<function=name>` around the JSON object of the arguments, or Python behind `<|python_tag|>`.

functionary 3.2: a turn is a sequence of messages, each `>>>`, a recipient, a newline and the content. The recipient `all`
is the user, any other is a tool. The prompt has written the first `>>>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from towline.conversation import Tool
from towline.tokens.parsing.base import SPACE, Parsed, ParsedCall
from towline.tokens.parsing.scan import Scan
from towline.tokens.parsing.tagged import Block, Tagged, broken
from towline.tokens.parsing.values import Offered, call, encode
from towline.tokens.parsing.writing import check, encoded

_OPEN, _CLOSE, _PYTHON = "<function=", "</function>", "<|python_tag|>"
_NAME = re.compile(r"([^<>\n{}]++)>")
_HEAD = re.compile(r"[ \t\r\n]*+(?:>>>)?+([^\s<>{}\"]++)[ \t]*+\n")
_NEXT = re.compile(r">>>([^\s<>{}\"]++)[ \t]*+\n")
_USER = "all"


class Functionary31(Tagged):
    name = "functionary_3_1"

    def opening(self, scan: Scan, start: int) -> int:
        return min(scan.find(_OPEN, start), scan.find(_PYTHON, start))

    def inside(self, scan: Scan, at: int) -> int:
        return at + len(_PYTHON if scan.at(_PYTHON, at) else _OPEN)

    def read(self, scan: Scan, at: int, inside: int, bound: int, offered: Offered) -> Block:
        if scan.at(_PYTHON, at):
            custom = offered.custom("python")
            found = (scan.text[inside:bound], bound) if custom else scan.json(scan.skip(inside), bound)
            made = call("python", found[0], offered) if found else None
            return Block(found[1], [made]) if found and made else Block(bound, None)
        name = _NAME.match(scan.text, inside)
        if name is not None:
            title = name[1].strip(SPACE)
            found = scan.arguments(name.end(), bound, _CLOSE, custom=offered.custom(title))
            made = call(title, found[0], offered) if found else None
            if found and made:
                return Block(found[1] + len(_CLOSE), [made])
        return broken(scan, inside, bound, _CLOSE)

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = []
        for made in calls:
            body = made.arguments if isinstance(made.arguments, str) else encode(made.arguments)
            written.append(f"{_PYTHON}{body}" if made.name == "python" else f"{_OPEN}{made.name}>{body}{_CLOSE}")
        return "".join(written)


class Functionary32:
    """Messages to recipients."""

    name: ClassVar[str] = "functionary_3_2"
    thinking: ClassVar[tuple[tuple[str, str], ...]] = ()

    def parse(self, text: str, tools: Sequence[Tool], *, reasoning_open: bool) -> Parsed:
        scan, offered = Scan(text), Offered(tools)
        head = _HEAD.match(text)
        if head is None:
            return Parsed(text, None, (), (), False)
        visible: list[str] = []
        place, recipient, start = head.end(), head[1], 0
        while True:
            following = self._next(scan, place, recipient, offered)
            stop = following.start() if following else scan.end
            if recipient == _USER:
                visible.append(text[place:stop])
            else:
                made = self._call(scan, recipient, place, stop, offered)
                if made is None:
                    scan.astray()
                    scan.keep(start, stop)
                    visible.append(scan.malformed[-1])
                else:
                    scan.calls.append(made)
            if following is None:
                break
            place, recipient, start = following.end(), following[1], following.start()
        shown = "\n".join(part for part in visible if part.strip(SPACE))
        return Parsed(shown, None, tuple(scan.calls), tuple(scan.malformed), False)

    def _next(self, scan: Scan, place: int, recipient: str, offered: Offered) -> re.Match[str] | None:
        """Where the next message begins: what a text quotes, or an argument holds, begins none."""
        if recipient != _USER and not offered.custom(recipient):
            found = scan.json(scan.skip(place), scan.end)
            if found is not None:
                return _NEXT.match(scan.text, scan.skip(found[1]))
        for match in _NEXT.finditer(scan.text, place):
            if match[1] == _USER or offered.known(match[1]):
                return match
        return None

    def _call(self, scan: Scan, name: str, start: int, stop: int, offered: Offered) -> ParsedCall | None:
        if offered.custom(name):
            return call(name, scan.text[start:stop], offered)
        found = scan.json(scan.skip(start), stop)
        return call(name, found[0], offered) if found and scan.skip(found[1]) >= stop else None

    def write(
        self,
        reasoning: str | None,
        text: str,
        calls: Sequence[ParsedCall],
        *,
        tools: Sequence[Tool] = (),
        reasoning_open: bool = False,
    ) -> str:
        written = encoded(self.name, lambda: _written(reasoning, text, calls))
        check(self, written, None, text, calls, tools, reasoning_open, native_ids=False)
        return written


def _written(reasoning: str | None, text: str, calls: Sequence[ParsedCall]) -> str:
    if reasoning:
        raise ValueError("it has no reasoning")
    messages = [f"{_USER}\n{text}"] if text or not calls else []
    for made in calls:
        if made.name == _USER:
            raise ValueError("a tool cannot be called `all`")
        messages.append(f"{made.name}\n{made.arguments if isinstance(made.arguments, str) else encode(made.arguments)}")
    return ">>>".join(messages)
