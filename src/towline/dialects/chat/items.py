"""One message of OpenAI's chat completions, read into a neutral `Message`.

What a plain server would show its model is kept: text, reasoning, calls, media. Fields that mean nothing to a model
(`cache_control`, `annotations`, `audio`, vendor extensions) are dropped, so that a harness may add, move or remove them
freely. A part of an unknown type is an error, because dropping it would hide content from the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from towline.conversation import Media, Message, Role, ToolCall
from towline.dialects import media
from towline.dialects.reading import (
    as_list,
    as_object,
    as_text,
    check_depth,
    missing,
    optional_list,
    optional_text,
    path,
    quoted,
    read_arguments,
    required_text,
    wrong_type,
    wrong_value,
)

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields in which servers return reasoning and harnesses send it back; the first non-empty one wins."""
_TEXT_PARTS: Mapping[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Types of text parts, and the field that holds the text."""
_URL_PARTS = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
_MEDIA_PARTS = frozenset((*_URL_PARTS, "input_audio", "file"))


def read_message(item: Any, where: str) -> Message:
    """The message at path `where`."""
    source = as_object(item, where)
    check_depth(source, where)
    role = source.get("role")
    if role is None:
        missing(path(where, "role"))
    if as_text(role, path(where, "role")) not in ROLES:
        wrong_value(path(where, "role"), f"{quoted(role)} is not one of {', '.join(ROLES)}")
    text, reasoning, attached = _content(source, where)
    name = optional_text(source, "name", where) or ""
    if role == "assistant":
        refusal = optional_text(source, "refusal", where)
        return Message(
            "assistant",
            text or refusal or "",
            _reasoning(source, where) or reasoning,
            _tool_calls(source, where),
            name=name,
            media=attached,
        )
    if role in ("user", "system", "developer"):
        if "content" not in source:
            missing(path(where, "content"))
        return Message(ROLES[role], text, name=name, media=attached)
    call_id = optional_text(source, "tool_call_id", where) or ""
    if role == "function" and not name:
        missing(path(where, "name"))
    if not call_id and not name:
        missing(path(where, "tool_call_id"))
    return Message("tool", text, tool_call_id=call_id, name=name, media=attached)


def has_literal_arguments(message: Message, item: Mapping[str, Any]) -> bool:
    """Whether a call of the item has its arguments as an object, not as a string (see `ReadCache.literal`)."""
    if not message.tool_calls:
        return False
    functions = [call.get("function") for call in item.get("tool_calls") or ()] or [item.get("function_call")]
    return any(isinstance(function, dict) and isinstance(function.get("arguments"), dict) for function in functions)


def _content(source: Mapping[str, Any], where: str) -> tuple[str, str | None, tuple[Media, ...]]:
    """The text, the reasoning given as parts, and the media of a message."""
    content = source.get("content")
    if isinstance(content, str):
        return content, None, ()
    if content is None:
        return "", None, ()
    where = path(where, "content")
    if not isinstance(content, list):
        wrong_type(where, "a string or an array of parts", content)
    texts: list[str] = []
    thoughts: list[str] = []
    attached: list[Media] = []
    length = 0
    for index, part in enumerate(content):
        here = f"{where}[{index}]"
        if isinstance(part, str):
            text = part
        else:
            as_object(part, here)
            kind = required_text(part, "type", here)
            if kind in ("thinking", "redacted_thinking"):
                thoughts.append(_thinking(part, here))
                continue
            if kind not in _TEXT_PARTS:
                attached.append(_media(part, kind, length, here))
                continue
            field = _TEXT_PARTS[kind]
            text = as_text(part.get(field), path(here, field))
        texts.append(text)
        length += len(text)
    return "".join(texts), "".join(thoughts) or None, tuple(attached)


def _thinking(part: Mapping[str, Any], where: str) -> str:
    """Reasoning inside content: a string or a list of text parts; empty if it is encrypted."""
    thinking = part.get("thinking")
    if thinking is None or isinstance(thinking, str):
        return thinking or ""
    where = path(where, "thinking")
    texts = []
    for index, item in enumerate(as_list(thinking, where)):
        here = f"{where}[{index}]"
        texts.append(as_text(as_object(item, here).get("text"), path(here, "text")))
    return "".join(texts)


def _media(part: Mapping[str, Any], kind: str, offset: int, where: str) -> Media:
    if kind not in _MEDIA_PARTS:
        wrong_value(path(where, "type"), f"{quoted(kind)} is not a supported type of part")
    where = path(where, kind)
    body = part.get(kind)
    if kind in _URL_PARTS:
        if isinstance(body, str):
            return media.from_url(_URL_PARTS[kind], body, offset, where)
        url = required_text(as_object(body, where), "url", where)
        return media.from_url(_URL_PARTS[kind], url, offset, path(where, "url"))
    source = as_object(body, where)
    if kind == "input_audio":
        return media.from_input_audio(source, offset, where)
    data = optional_text(source, "file_data", where) or ""
    if not data:
        wrong_value(where, "files are not stored here: send `file_data`")
    return media.from_file_data(data, offset, path(where, "file_data"))


def _reasoning(source: Mapping[str, Any], where: str) -> str | None:
    for field in REASONING:
        if field in source and (value := optional_text(source, field, where)):
            return value
    return None


def _tool_calls(source: Mapping[str, Any], where: str) -> tuple[ToolCall, ...]:
    calls = optional_list(source, "tool_calls", where)
    if calls:
        where = path(where, "tool_calls")
        return tuple(_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls))
    legacy = source.get("function_call")
    return () if legacy is None else (_function_call(legacy, "", path(where, "function_call")),)


def _tool_call(call: Any, where: str) -> ToolCall:
    as_object(call, where)
    call_id = optional_text(call, "id", where) or ""
    kind = optional_text(call, "type", where) or "function"
    if kind == "function":
        return _function_call(call.get("function"), call_id, path(where, "function"))
    if kind != "custom":
        wrong_value(path(where, "type"), f"{quoted(kind)} is neither function nor custom")
    where = path(where, "custom")
    custom = as_object(call.get("custom"), where)
    name = as_text(custom.get("name"), path(where, "name"))
    return ToolCall(call_id, name, optional_text(custom, "input", where) or "", custom=True)


def _function_call(function: Any, call_id: str, where: str) -> ToolCall:
    if function is None:
        missing(where)
    name = as_text(as_object(function, where).get("name"), path(where, "name"))
    return ToolCall(call_id, name, read_arguments(function.get("arguments"), path(where, "arguments")))
