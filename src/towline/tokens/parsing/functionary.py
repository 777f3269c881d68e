"""functionary 3.1 and 3.2.

3.1: `<function=name>` around the JSON object of the arguments, or Python after `<|python_tag|>`. 3.2: a turn is a sequence
of messages, each `>>>`, a recipient, a newline and the content; the recipient `all` is the user, any other is a tool. The
prompt has written the first `>>>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from towline.conversation import Tool
from towline.tokens.parsing.base import SPACE, ParsedCall, ParsedReply
from towline.tokens.parsing.tagged import (
    CallBlock,
    Scanner,
    TaggedFormat,
    check_round_trip,
    encode_or_refuse,
    unreadable_call,
)
from towline.tokens.parsing.values import DeclaredTools, bare, make_call

_OPEN, _CLOSE, _PYTHON = "<function=", "</function>", "<|python_tag|>"
_NAME = re.compile(r"([^<>\n{}]++)>")
_HEAD = re.compile(r"[ \t\r\n]*+(?:>>>)?+([^\s<>{}\"]++)[ \t]*+\n")
_NEXT = re.compile(r">>>([^\s<>{}\"]++)[ \t]*+\n")
_USER = "all"


class Functionary31(TaggedFormat):
    """functionary 3.1."""

    name = "functionary_3_1"

    def opening(self, scan: Scanner, start: int) -> int:
        return min(scan.find(_OPEN, start), scan.find(_PYTHON, start))

    def inside(self, scan: Scanner, at: int) -> int:
        return at + len(_PYTHON if scan.at(_PYTHON, at) else _OPEN)

    def read(self, scan: Scanner, at: int, inside: int, bound: int, declared: DeclaredTools) -> CallBlock:
        if scan.at(_PYTHON, at):
            custom = declared.custom("python")
            found = (scan.text[inside:bound], bound) if custom else scan.json(scan.skip(inside), bound)
            call = make_call("python", found[0], declared) if found else None
            return CallBlock(found[1], [call]) if found and call else CallBlock(bound, None)
        name = _NAME.match(scan.text, inside)
        if name is not None:
            title = name[1].strip(SPACE)
            found = scan.arguments(name.end(), bound, _CLOSE, custom=declared.custom(title))
            call = make_call(title, found[0], declared) if found else None
            if found and call:
                return CallBlock(found[1] + len(_CLOSE), [call])
        return unreadable_call(scan, inside, bound, _CLOSE)

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = []
        for call in calls:
            body = bare(call.arguments)
            written.append(f"{_PYTHON}{body}" if call.name == "python" else f"{_OPEN}{call.name}>{body}{_CLOSE}")
        return "".join(written)


class Functionary32:
    """functionary 3.2: messages to recipients."""

    name: ClassVar[str] = "functionary_3_2"
    thinking: ClassVar[tuple[tuple[str, str], ...]] = ()

    def parse(self, text: str, tools: Sequence[Tool], *, reasoning_open: bool) -> ParsedReply:
        scan, declared = Scanner(text), DeclaredTools(tools)
        head = _HEAD.match(text)
        if head is None:
            return ParsedReply(text, None, (), (), False)
        visible: list[str] = []
        place, recipient, start = head.end(), head[1], 0
        while True:
            following = self._next(scan, place, recipient, declared)
            stop = following.start() if following else scan.end
            if recipient == _USER:
                visible.append(text[place:stop])
            else:
                call = self._call(scan, recipient, place, stop, declared)
                if call is None:
                    scan.failed()
                    scan.keep(start, stop)
                    visible.append(scan.malformed[-1])
                else:
                    scan.calls.append(call)
            if following is None:
                break
            place, recipient, start = following.end(), following[1], following.start()
        shown = "\n".join(part for part in visible if part.strip(SPACE))
        return ParsedReply(shown, None, tuple(scan.calls), tuple(scan.malformed), False)

    def _next(self, scan: Scanner, place: int, recipient: str, declared: DeclaredTools) -> re.Match[str] | None:
        """Where the next message begins: a header quoted in a text or inside an argument does not count."""
        if recipient != _USER and not declared.custom(recipient):
            found = scan.json(scan.skip(place), scan.end)
            if found is not None:
                return _NEXT.match(scan.text, scan.skip(found[1]))
        for match in _NEXT.finditer(scan.text, place):
            if match[1] == _USER or declared.known(match[1]):
                return match
        return None

    def _call(self, scan: Scanner, name: str, start: int, stop: int, declared: DeclaredTools) -> ParsedCall | None:
        if declared.custom(name):
            return make_call(name, scan.text[start:stop], declared)
        found = scan.json(scan.skip(start), stop)
        return make_call(name, found[0], declared) if found and scan.skip(found[1]) >= stop else None

    def write(
        self,
        reasoning: str | None,
        text: str,
        calls: Sequence[ParsedCall],
        *,
        tools: Sequence[Tool] = (),
        reasoning_open: bool = False,
    ) -> str:
        written = encode_or_refuse(self.name, lambda: _written(reasoning, text, calls))
        check_round_trip(self, written, None, text, calls, tools, reasoning_open, native_ids=False)
        return written


def _written(reasoning: str | None, text: str, calls: Sequence[ParsedCall]) -> str:
    if reasoning:
        raise ValueError("the format has no reasoning")
    messages = [f"{_USER}\n{text}"] if text or not calls else []
    for call in calls:
        if call.name == _USER:
            raise ValueError("a tool cannot be named `all`")
        messages.append(f"{call.name}\n{bare(call.arguments)}")
    return ">>>".join(messages)
