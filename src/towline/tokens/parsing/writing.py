"""Writing a reply is checked by reading it back: what would come out different is refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from towline.conversation import Tool
from towline.tokens.parsing.base import SPACE, Format, ParsedCall, Unwritable
from towline.tokens.parsing.values import canonical


def encoded(format: str, write: Callable[[], str]) -> str:
    """What `write` gives, with values that JSON cannot carry refused."""
    try:
        return write()
    except ValueError as error:
        raise Unwritable(format, str(error)) from error


def check(
    format: Format,
    written: str,
    reasoning: str | None,
    text: str,
    calls: Sequence[ParsedCall],
    tools: Sequence[Tool],
    reasoning_open: bool,
    *,
    native_ids: bool,
) -> None:
    """Raise `Unwritable` unless `written` is read back as the same reply."""
    read = format.parse(written, tools or _as_declared(calls), reasoning_open=reasoning_open)
    if (read.reasoning or "") != (reasoning or "").strip(SPACE) or read.reasoning_open:
        raise Unwritable(format.name, "the reasoning would be read back differently")
    if _plain(read.calls, native_ids) != _plain(calls, native_ids) or read.malformed:
        raise Unwritable(format.name, "the calls would be read back differently")
    if read.text.strip(SPACE) != text.strip(SPACE):
        raise Unwritable(format.name, "the text would be read back differently")


def _plain(calls: Sequence[ParsedCall], native_ids: bool) -> list[tuple[str, bytes | None, str]]:
    return [(call.name, canonical(call.arguments), call.native_id if native_ids else "") for call in calls]


def _as_declared(calls: Sequence[ParsedCall]) -> list[Tool]:
    """Tools that these calls fit: a parameter is a string where all its values are."""
    strings: dict[str, dict[str, bool]] = {}
    custom: set[str] = set()
    for call in calls:
        keys = strings.setdefault(call.name, {})
        if isinstance(call.arguments, str):
            custom.add(call.name)
            continue
        for key, value in call.arguments.items():
            keys[key] = keys.get(key, True) and isinstance(value, str)
    tools = []
    for name, keys in strings.items():
        properties: dict[str, Any] = {key: {"type": "string"} for key, string in keys.items() if string}
        tools.append(Tool(name, parameters={"type": "object", "properties": properties}, custom=name in custom))
    return tools
