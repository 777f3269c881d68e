"""Command R7B: `<|START_ACTION|>` and a JSON list of calls, or `<|START_RESPONSE|>` and text.

A call's `tool_call_id` is its number in the conversation, which templates count anew; it is not an id to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from towline.conversation import Tool
from towline.tokens.parsing.base import SPACE, Parsed, ParsedCall
from towline.tokens.parsing.listed import Listed
from towline.tokens.parsing.values import Offered, call

_RESPONSE, _RESPONSE_END = "<|START_RESPONSE|>", "<|END_RESPONSE|>"
_KEYS = frozenset(("tool_call_id", "tool_name", "parameters"))


class CommandR7B(Listed):
    name = "command_r7b"
    tags = ("<|START_ACTION|>", "<|END_ACTION|>")
    thinking = (("<|START_THINKING|>", "<|END_THINKING|>"),)
    thinking_space = ("", "", "")

    def parse(self, text: str, tools: Sequence[Tool], *, reasoning_open: bool) -> Parsed:
        read = super().parse(text, tools, reasoning_open=reasoning_open)
        said = read.text.strip(SPACE)
        if not said.startswith(_RESPONSE):
            # The prompt of other Command templates has opened the response.
            return replace(read, text=said.removesuffix(_RESPONSE_END)) if said.endswith(_RESPONSE_END) else read
        return replace(read, text=said.removeprefix(_RESPONSE).removesuffix(_RESPONSE_END))

    def read_item(self, value: Any, offered: Offered) -> ParsedCall | None:
        if not isinstance(value, dict) or not _KEYS.issuperset(value):
            return None
        return call(value.get("tool_name"), value.get("parameters", {}), offered)

    def write(
        self,
        reasoning: str | None,
        text: str,
        calls: Sequence[ParsedCall],
        *,
        tools: Sequence[Tool] = (),
        reasoning_open: bool = False,
    ) -> str:
        """As every format; a reply without calls is a response, and words beside calls are written bare."""
        written = super().write(reasoning, text, calls, tools=tools, reasoning_open=reasoning_open)
        return written if calls or not text else f"{written[: -len(text)]}{_RESPONSE}{text}{_RESPONSE_END}"

    def write_item(self, call: ParsedCall, place: int) -> dict[str, Any]:
        return {"tool_call_id": str(place), "tool_name": call.name, "parameters": call.arguments}
