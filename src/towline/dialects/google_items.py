"""Contents of a Google request, read into neutral messages.

An item is the system instruction or one content. A user's content may hold function responses and text at once: each
response becomes a `tool` message, the rest one `user` message behind them. Function calls and responses often carry no
id: a response then answers the first call of its name that is still open in the content before it. Field names are read
in camel case and in snake case, as Google itself reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from towline.conversation import Media, Message, ToolCall
from towline.dialects import media
from towline.dialects.reading import (
    as_list,
    as_object,
    as_text,
    check_depth,
    optional_flag,
    optional_text,
    path,
    quoted,
    read_arguments,
    required_text,
    wrong_value,
)
from towline.dialects.sealed import unseal
from towline.dialects.sse import dump

_ROLES = {
    "user": "user",
    "model": "assistant",
    "assistant": "assistant",
    "function": "user",
    "tool": "user",
    "system": "system",
}
_OUTPUTS = ("output", "result", "content")
"""A response with one of these as its only field and a text in it is that text."""
_KINDS = {"image": "image", "audio": "audio", "video": "video"}


def field(source: Mapping[str, Any], name: str) -> Any:
    """A field by its camel-case name, or by the same in snake case."""
    if name in source:
        return source[name]
    return source.get("".join(f"_{c.lower()}" if c.isupper() else c for c in name))


def read_system(content: Any, where: str) -> str:
    """System text: a content, a list of parts, or a string."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else _parts(as_object(content, where), where)
    texts = []
    for index, part in enumerate(parts):
        here = f"{where}.parts[{index}]"
        texts.append(part if isinstance(part, str) else as_text(as_object(part, here).get("text"), path(here, "text")))
    return "\n".join(texts)


def read_item(item: Any, where: str, before: Message | None) -> list[Message]:
    """The neutral messages of one content; `before` is the message before it."""
    if isinstance(item, str):
        return [Message("user", item)]
    source = as_object(item, where)
    check_depth(source, where)
    name = optional_text(source, "role", where) or "user"
    if name not in _ROLES:
        wrong_value(path(where, "role"), f"{quoted(name)} is not one of user, model")
    role = _ROLES[name]
    if role == "system":
        return [Message("system", read_system(source, where))]
    parts = _parts(source, where)
    return [_model(parts, where)] if role == "assistant" else _user(parts, where, before)


def holds_objects(item: Any) -> bool:
    """Whether values of the item count as JSON and not only by Python's `==` (see `Known.literal`)."""
    parts = item.get("parts") if isinstance(item, dict) else None
    return isinstance(parts, list) and any(
        isinstance(part, dict) and not isinstance(part.get("text"), str) for part in parts
    )


def _parts(source: Mapping[str, Any], where: str) -> list[Any]:
    parts = source.get("parts")
    if parts is None:
        return []
    if isinstance(parts, dict):
        return [parts]
    return as_list(parts, path(where, "parts"))


def _model(parts: Sequence[Any], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    sealed: str | None = None
    calls: list[ToolCall] = []
    for index, part in enumerate(parts):
        here = f"{where}.parts[{index}]"
        source = as_object(part, here)
        signature = field(source, "thoughtSignature")
        if sealed is None and isinstance(signature, str):
            sealed = unseal(signature)
        if (call := field(source, "functionCall")) is not None:
            calls.append(_call(call, path(here, "functionCall")))
        elif (text := source.get("text")) is not None:
            shown = as_text(text, path(here, "text"))
            (thoughts if optional_flag(source, "thought", here) else texts).append(shown)
        elif (other := _other(source)) is not None:
            texts.append(other)
        elif signature is None and source:
            wrong_value(here, "it holds no supported kind of data")
    return Message("assistant", "".join(texts), "".join(thoughts) or sealed or None, tuple(calls))


def _call(call: Any, where: str) -> ToolCall:
    source = as_object(call, where)
    arguments = read_arguments(field(source, "args"), path(where, "args"))
    return ToolCall(optional_text(source, "id", where) or "", required_text(source, "name", where), arguments)


def _other(source: Mapping[str, Any]) -> str | None:
    """Code that a provider ran, as text."""
    for name in ("executableCode", "codeExecutionResult"):
        if (value := field(source, name)) is not None:
            return dump({name: value}).decode()
    return None


def _user(parts: Sequence[Any], where: str, before: Message | None) -> list[Message]:
    messages: list[Message] = []
    texts: list[str] = []
    attached: list[Media] = []
    length = 0
    open_calls = list(before.tool_calls) if before is not None else []
    for index, part in enumerate(parts):
        here = f"{where}.parts[{index}]"
        if isinstance(part, str):
            part = {"text": part}
        source = as_object(part, here)
        if (response := field(source, "functionResponse")) is not None:
            messages.append(_response(response, open_calls, path(here, "functionResponse")))
            continue
        item = _media(source, length, here)
        if item is not None:
            attached.append(item)
            continue
        text = source.get("text")
        shown = as_text(text, path(here, "text")) if text is not None else _other(source)
        if shown is None:
            if source and field(source, "thoughtSignature") is None:
                wrong_value(here, "it holds no supported kind of data")
            continue
        texts.append(shown)
        length += len(shown)
    if texts or attached or not messages:
        messages.append(Message("user", "".join(texts), media=tuple(attached)))
    return messages


def _response(response: Any, open_calls: list[ToolCall], where: str) -> Message:
    source = as_object(response, where)
    name = required_text(source, "name", where)
    id = optional_text(source, "id", where) or ""
    answered = next((call for call in open_calls if (call.id == id if id else call.name == name)), None)
    if answered is not None:
        open_calls.remove(answered)
        id = id or answered.id
    attached = []
    for index, part in enumerate(as_list(field(source, "parts") or [], path(where, "parts"))):
        here = f"{where}.parts[{index}]"
        item = _media(as_object(part, here), 0, here)
        if item is not None:
            attached.append(item)
    text = _output(source.get("response"))
    return Message("tool", text, tool_call_id=id, name=name, media=tuple(attached))


def _output(response: Any) -> str:
    if response is None:
        return ""
    if isinstance(response, str):
        return response
    if isinstance(response, dict) and len(response) == 1:
        key, value = next(iter(response.items()))
        if key in _OUTPUTS:
            return value if isinstance(value, str) else dump(value).decode()
    return dump(response).decode()


def _media(source: Mapping[str, Any], offset: int, where: str) -> Media | None:
    if (data := field(source, "inlineData")) is not None:
        where = path(where, "inlineData")
        mime = as_text(field(as_object(data, where), "mimeType"), path(where, "mimeType"))
        content = required_text(data, "data", where).replace("-", "+").replace("_", "/")
        content += "=" * (-len(content) % 4)
        return media.from_base64(_KINDS.get(mime.split("/")[0], "file"), content, mime, offset, path(where, "data"))
    if (file := field(source, "fileData")) is not None:
        where = path(where, "fileData")
        uri = as_text(field(as_object(file, where), "fileUri"), path(where, "fileUri"))
        mime = optional_text(file, "mimeType", where) or optional_text(file, "mime_type", where) or ""
        return media.from_url(_KINDS.get(mime.split("/")[0], "file"), uri, offset, path(where, "fileUri"))
    return None
