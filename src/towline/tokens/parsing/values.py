"""JSON as calls need it: strict to read, and sure to be written again.

Arguments go on to harnesses as JSON, so a value counts only if it survives that: no NaN or infinity, no lone surrogate,
no nesting past what the writer takes. Integers stay exact, whatever their length. Of duplicate keys the last one counts,
as in every common reader.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from towline import exact_json
from towline.conversation import Tool
from towline.tokens.parsing.base import ParsedCall

_CALL_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})


def decode_at(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value that begins exactly at `start` and where it ends; `None` if there is none."""
    try:
        return exact_json.decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def decode(text: str) -> tuple[Any] | None:
    """The one JSON value that `text` is, in a tuple since the value may be `None` itself."""
    try:
        return (exact_json.decoder.decode(text),)
    except (ValueError, RecursionError):
        return None


def encode(value: Any) -> str:
    """JSON as chat templates write it. Raises `ValueError` with the reason for what JSON cannot carry."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def canonical(value: Any) -> bytes | None:
    """The value as harnesses will receive it; `None` if it cannot be written."""
    return exact_json.dumps(value) if exact_json.writable(value) else None


class Offered:
    """The tools of a request by name. Calls of other tools are calls too; only typing needs to know a tool."""

    __slots__ = ("_tools",)

    def __init__(self, tools: Iterable[Tool]):
        self._tools = {tool.name: tool for tool in tools}

    def custom(self, name: str) -> bool:
        tool = self._tools.get(name)
        return tool is not None and tool.custom

    def known(self, name: str) -> bool:
        return name in self._tools

    def parameters(self, name: str) -> Mapping[str, Any]:
        """The JSON Schema of a tool's arguments; empty if nothing is known."""
        tool = self._tools.get(name)
        return tool.parameters if tool is not None and isinstance(tool.parameters, dict) else {}


def call(name: Any, arguments: Any, offered: Offered, native_id: Any = "") -> ParsedCall | None:
    """A call, if it has a name and arguments that can be passed on; else `None`.

    Arguments are an object, or the JSON text of one. A custom tool takes any string as it is.
    """
    if not isinstance(name, str) or not name.strip() or not isinstance(native_id, str):
        return None
    if isinstance(arguments, str) and not offered.custom(name):
        inner = decode(arguments)
        arguments = inner[0] if inner else None
        if isinstance(arguments, str):
            return None
    if not isinstance(arguments, dict | str) or canonical([name, arguments, native_id]) is None:
        return None
    return ParsedCall(name, arguments, native_id)


def is_call_object(value: Any) -> bool:
    """Whether a JSON value has the keys of a call and no others: anything else in it would be lost."""
    if not isinstance(value, dict) or not _CALL_KEYS.issuperset(value) or value.get("type", "function") != "function":
        return False
    return not ("arguments" in value and "parameters" in value)


def call_from_object(value: Any, offered: Offered) -> ParsedCall | None:
    """A call from its JSON object: `name`, and `arguments` or `parameters` unless there are none."""
    if not is_call_object(value):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return call(value.get("name"), arguments, offered, value.get("id", ""))
