"""Apertus: `<|tools_prefix|>` and a JSON list of objects with one key each, the name of the tool.

The template writes results right behind `<|tools_suffix|>`, so that a turn with calls ends there.
"""

from __future__ import annotations

from typing import Any

from towline.tokens.parsing.base import ParsedCall
from towline.tokens.parsing.listed import Listed
from towline.tokens.parsing.values import Offered, call


class Apertus(Listed):
    name = "apertus"
    tags = ("<|tools_prefix|>", "<|tools_suffix|>")
    ends_turn = True
    thinking = (("<|inner_prefix|>", "<|inner_suffix|>"),)
    thinking_space = ("", "", "")

    def read_item(self, value: Any, offered: Offered) -> ParsedCall | None:
        if not isinstance(value, dict) or len(value) != 1:
            return None
        ((name, arguments),) = value.items()
        return call(name, arguments, offered)

    def write_item(self, call: ParsedCall, place: int) -> dict[str, Any]:
        return {call.name: call.arguments}
