"""Kimi K2: a call is its native id, `functions.name:index`, and its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from towline.conversation import Tool
from towline.tokens.parsing.base import SPACE, ParsedCall
from towline.tokens.parsing.scan import Scan
from towline.tokens.parsing.sectioned import Sectioned
from towline.tokens.parsing.values import Offered, call, encode

_ARGUMENTS = "<|tool_call_argument_begin|>"
_NAMESPACE = "functions."


class Kimi(Sectioned):
    name = "kimi"
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    block = ("<|tool_call_begin|>", "<|tool_call_end|>")
    thinking_space = ("", "", "")
    native_ids = True

    def read_one(self, scan: Scan, inside: int, bound: int, offered: Offered) -> tuple[ParsedCall, int] | None:
        body = scan.find(_ARGUMENTS, inside)
        if body >= min(scan.find(self.block[1], inside), bound):
            return None
        native_id = scan.text[inside:body].strip(SPACE)
        name = _named(native_id)
        found = scan.arguments(body + len(_ARGUMENTS), bound, self.block[1], custom=offered.custom(name))
        made = call(name, found[0], offered, native_id) if found else None
        return (made, found[1]) if made and found else None

    def write(
        self,
        reasoning: str | None,
        text: str,
        calls: Sequence[ParsedCall],
        *,
        tools: Sequence[Tool] = (),
        reasoning_open: bool = False,
    ) -> str:
        """As every format, with an id of Kimi's for each call whose id does not name it."""
        named = [
            made if _named(made.native_id) == made.name else replace(made, native_id=f"{_NAMESPACE}{made.name}:{index}")
            for index, made in enumerate(calls)
        ]
        return super().write(reasoning, text, named, tools=tools, reasoning_open=reasoning_open)

    def write_one(self, call: ParsedCall) -> str:
        arguments = call.arguments if isinstance(call.arguments, str) else encode(call.arguments)
        return f"{call.native_id}{_ARGUMENTS}{arguments}"


def _named(native_id: str) -> str:
    """The tool that an id names."""
    name, colon, index = native_id.rpartition(":")
    return (name if colon and index.isdecimal() else native_id).removeprefix(_NAMESPACE)
