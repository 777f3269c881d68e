"""gpt-oss: the harmony format, a sequence of messages with channels and recipients.

The prompt ends in `<|start|>assistant`, so the text begins inside a header. `analysis` is reasoning; `final`, and
`commentary` without a recipient, are text; a message to a function is a call on any channel. A message ends with a marker,
with the next header, or with the text: the marker that ended the turn was removed. Only a complete header counts as
markup; everything else between messages is text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from towline.conversation import Tool
from towline.tokens.parsing.base import SPACE, ParsedCall, ParsedReply
from towline.tokens.parsing.tagged import Scanner, check_round_trip, encode_or_refuse
from towline.tokens.parsing.values import DeclaredTools, bare, make_call

_START, _END, _CALL, _MESSAGE = "<|start|>", "<|end|>", "<|call|>", "<|message|>"
_BORDER = re.compile(r"<\|(start|channel|end|call|return)\|>")
_HEADER = re.compile(
    r"(?:assistant)?+(?:\s++to=(?P<first>[^\s<]++)|to=(?P<bare>[^\s<]++))?+\s*+"
    r"<\|channel\|>\s*+(?P<channel>analysis|commentary|final)(?:\s++to=(?P<second>[^\s<]++))?+"
    r"\s*+(?:<\|constrain\|>\s*+)?+[a-z]*+\s*+<\|message\|>"
)
_NAMESPACE = "functions."
_NOT_TOOLS = {"assistant", "user", "all"}
"""Recipients that are not tools."""


class GptOss:
    """gpt-oss."""

    name: ClassVar[str] = "gptoss"
    thinking: ClassVar[tuple[tuple[str, str], ...]] = (("<|channel|>analysis<|message|>", "<|end|>"),)

    def parse(self, text: str, tools: Sequence[Tool], *, reasoning_open: bool) -> ParsedReply:
        messages = _Messages(text, DeclaredTools(tools))
        messages.read(reasoning_open)
        reasoning = "\n".join(messages.reasoning).strip(SPACE) or None
        visible = "\n\n".join(messages.visible)
        scan = messages.scan
        return ParsedReply(visible, reasoning, tuple(scan.calls), tuple(scan.malformed), messages.reasoning_open)

    def write(
        self,
        reasoning: str | None,
        text: str,
        calls: Sequence[ParsedCall],
        *,
        tools: Sequence[Tool] = (),
        reasoning_open: bool = False,
    ) -> str:
        written = encode_or_refuse(self.name, lambda: _written(reasoning, text, calls, reasoning_open))
        check_round_trip(self, written, reasoning, text, calls, tools, reasoning_open, native_ids=False)
        return written


def _written(reasoning: str | None, text: str, calls: Sequence[ParsedCall], reasoning_open: bool) -> str:
    messages = []
    if reasoning_open:
        messages.append(f"{reasoning or ''}{_END}")
    elif reasoning:
        messages.append(f"{_header('analysis')}{reasoning}{_END}")
    if calls and text:
        messages.append(f"{_header('commentary')}{text}{_END}")
    elif not calls:
        messages.append(f"{_header('final')}{text}")
    for index, call in enumerate(calls):
        header = _header(f"commentary to={_NAMESPACE}{call.name} <|constrain|>json")
        body = bare(call.arguments)
        # The marker after the last call is the end of the turn itself.
        messages.append(f"{header}{body}{_CALL if index < len(calls) - 1 else ''}")
    return f"{_START}assistant".join(messages)


def _header(channel: str) -> str:
    return f"<|channel|>{channel}{_MESSAGE}"


class _Messages:
    """One pass over the messages of a text."""

    def __init__(self, text: str, declared: DeclaredTools):
        self.scan = Scanner(text)
        self.declared = declared
        self.reasoning: list[str] = []
        self.visible: list[str] = []
        self.reasoning_open = False

    def read(self, reasoning_open: bool) -> None:
        scan = self.scan
        place = self._body(0, "analysis") if reasoning_open else 0
        while place < scan.end:
            header = _HEADER.match(scan.text, scan.skip(place, _START))
            if header is None:
                place = self._body(place, "final")
                continue
            recipient = header["first"] or header["bare"] or header["second"]
            if recipient is None or recipient in _NOT_TOOLS:
                place = self._body(header.end(), header["channel"])
            else:
                place = self._call(place, header.end(), recipient.removeprefix(_NAMESPACE))

    def _body(self, start: int, channel: str) -> int:
        """Parse a message's text; returns where the next message starts."""
        stop, after = self._border(start)
        body = self.scan.text[start:stop]
        if channel == "analysis":
            self.reasoning.append(body)
            self.reasoning_open = stop == after == self.scan.end
        elif body.strip(SPACE) or (not self.visible and after == self.scan.end):
            self.visible.append(body)
        return after

    def _call(self, start: int, body: int, name: str) -> int:
        """Parse a call; returns where the next message starts."""
        scan = self.scan
        stop, after = self._border(body)
        found = scan.json(scan.skip(body), after)
        if found is not None and found[1] > stop:
            # A marker inside a string of the arguments: the message continues after them.
            stop, after = self._border(found[1])
        if found is not None and scan.skip(found[1]) < stop:
            found = None
        if self.declared.custom(name) and (found is None or not isinstance(found[0], dict)):
            found = (scan.text[body:stop], stop)
        call = make_call(name, found[0], self.declared) if found else None
        if call is None:
            scan.failed()
            scan.keep(scan.skip(start), after)
            self.visible.append(scan.malformed[-1])
        else:
            scan.calls.append(call)
        return after

    def _border(self, start: int) -> tuple[int, int]:
        """Where the message around `start` ends, and where the next one begins."""
        text = self.scan.text
        for mark in _BORDER.finditer(text, start):
            if mark[1] in ("end", "call", "return"):
                return mark.start(), mark.end()
            header = mark.end() if mark[1] == "start" else mark.start()
            if _HEADER.match(text, header):
                return mark.start(), mark.start()
        return len(text), len(text)
