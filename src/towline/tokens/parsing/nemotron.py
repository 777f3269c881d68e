"""Nemotron Nano v2: `<TOOLCALL>` around a JSON list of calls."""

from __future__ import annotations

from typing import Any

from towline.tokens.parsing.base import ParsedCall
from towline.tokens.parsing.listed import Listed
from towline.tokens.parsing.values import Offered, call_from_object


class Nemotron(Listed):
    name = "nemotron"
    tags = ("<TOOLCALL>", "</TOOLCALL>")

    def read_item(self, value: Any, offered: Offered) -> ParsedCall | None:
        return call_from_object(value, offered)

    def write_item(self, call: ParsedCall, place: int) -> dict[str, Any]:
        return {"name": call.name, "arguments": call.arguments}

    def between(self, after: str) -> str:
        return "\n" * bool(after)
