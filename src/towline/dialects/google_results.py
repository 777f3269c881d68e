"""Function responses: which call each of them answers, and what it says.

Responses come in any order, in one content or in several, with ids or without (Google's Python client drops them), and
Gemini CLI sends those of a resumed session twice. An id names its call; without one, or with one that no call has, a
response answers the first call of its name that is still open. A response that was given already is not given again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from towline.conversation import Media, Message, ToolCall
from towline.dialects.reading import optional_text, required_text
from towline.dialects.sse import dump

_OUTPUTS = frozenset(("output", "result", "content", "error"))
"""A response with one of these as its only field is what stands in it, if that is text."""


class Results:
    """The calls of the model's last turn and the responses to them, as they are read."""

    def __init__(self, before: Sequence[Message], responses: Sequence[Any]):
        """`before` are the messages so far; `responses` all of the content that is being read."""
        self._open: list[ToolCall] = []
        self._given: list[Message] = []
        start = len(before)
        while start and before[start - 1].role != "assistant":
            start -= 1
        if start:
            self._open += before[start - 1].tool_calls
        for message in before[start:]:
            if message.role == "tool":
                self._close(self._named(message.tool_call_id))
                self._given.append(message)
        self._ids = {response.get("id") for response in responses if _has_id(response)}

    def take(self, response: Mapping[str, Any], text: str, attached: tuple[Media, ...], where: str) -> Message | None:
        """The response as a message; `None` if it is one that was given before."""
        id = optional_text(response, "id", where) or ""
        call = self._named(id)
        name = optional_text(response, "name", where) or (call.name if call else "")
        name = name or required_text(response, "name", where)
        call = call or self._first(name)
        if call is None and any(_same(message, id, name, text, attached) for message in self._given):
            return None
        self._close(call)
        message = Message("tool", text, tool_call_id=call.id if call else id, name=name, media=attached)
        self._given.append(message)
        return message

    def _named(self, id: str) -> ToolCall | None:
        return next((call for call in self._open if call.id == id), None) if id else None

    def _first(self, name: str) -> ToolCall | None:
        """The first open call of that name that no response of this content names by its id."""
        return next((call for call in self._open if call.name == name and call.id not in self._ids), None)

    def _close(self, call: ToolCall | None) -> None:
        if call is not None:
            self._open.remove(call)


def _has_id(response: Any) -> bool:
    return isinstance(response, dict) and isinstance(response.get("id"), str)


def _same(message: Message, id: str, name: str, text: str, attached: tuple[Media, ...]) -> bool:
    return (
        (not id or message.tool_call_id == id)
        and message.name == name
        and message.text == text
        and message.media == attached
    )


def result_text(source: Mapping[str, Any], where: str) -> str:
    """What a response says: the text in its one field, or in the parts of it; all else as the JSON it is."""
    return _text(source.get("response"), optional_text(source, "name", where) or "")


def _text(response: Any, name: str) -> str:
    if not isinstance(response, dict):
        return _written(response)
    said = {key: value for key, value in response.items() if not _says_nothing(key, value, response, name)}
    if not said and _OUTPUTS.issuperset(response):
        return ""
    if len(said) == 1:
        ((key, value),) = said.items()
        if key in _OUTPUTS:
            if isinstance(value, list) and value and all(_is_text(part) for part in value):
                return "".join(part["text"] for part in value)
            if isinstance(value, dict) and isinstance(value.get("content"), list):
                # The result of an MCP tool inside that of the function.
                return _text(value, name)
            if key != "error" or isinstance(value, str):
                return _written(value)
    return _written(response)


def _says_nothing(key: str, value: Any, response: Mapping[str, Any], name: str) -> bool:
    """Nulls, an MCP result's word that nothing failed, and the function's own name beside what it gave."""
    if key == "name":
        return bool(value == name and "content" in response)
    return value is None or (key == "isError" and value is False)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _written(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else dump(value).decode()
