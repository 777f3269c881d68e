"""Apriel: `<tool_calls>` around a JSON list of calls. The prompt begins the reasoning, `[BEGIN FINAL RESPONSE]` ends it."""

from __future__ import annotations

from typing import Any

from towline.tokens.parsing.base import ParsedCall
from towline.tokens.parsing.listed import Listed
from towline.tokens.parsing.values import Offered, call_from_object


class Apriel(Listed):
    name = "apriel"
    tags = ("<tool_calls>", "</tool_calls>")
    thinking = (("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"), ("<thinking>", "</thinking>"))
    thinking_space = ("\n", "\n", "\n")

    def read_item(self, value: Any, offered: Offered) -> ParsedCall | None:
        return call_from_object(value, offered)

    def write_item(self, call: ParsedCall, place: int) -> dict[str, Any]:
        return {"name": call.name, "arguments": call.arguments}

    def between(self, after: str) -> str:
        return "\n" * bool(after)
