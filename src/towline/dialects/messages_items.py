"""Items of an Anthropic request, read into neutral messages.

An item is the `system` field or one message. A user message may hold results of tools and text of the user at once: each
result becomes a `tool` message, what is left one `user` message behind them. An assistant message is one neutral message:
text blocks joined, thinking as reasoning, tool uses as calls. Signatures and cache markers mean nothing to a model and
are left out; a block of a type that is not known is an error, because a model would miss it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from towline.conversation import Media, Message, ToolCall
from towline.dialects import media
from towline.dialects.reading import (
    as_list,
    as_object,
    as_text,
    check_depth,
    missing,
    optional_flag,
    optional_text,
    path,
    quoted,
    read_arguments,
    required_text,
    wrong_type,
    wrong_value,
)
from towline.dialects.sse import dump

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_FIELDS = {"text": "text", "thinking": "thinking", "redacted_thinking": "data"}
_CALLS = frozenset(("tool_use", "server_tool_use", "mcp_tool_use"))


def read_item(item: Any, where: str) -> list[Message]:
    """The neutral messages of one item; never none."""
    source = as_object(item, where)
    check_depth(source, where)
    role = source.get("role")
    if role is None:
        missing(path(where, "role"))
    if as_text(role, path(where, "role")) not in _ROLES:
        wrong_value(path(where, "role"), f"{quoted(role)} is not one of {', '.join(_ROLES)}")
    content = source.get("content")
    if content is None:
        missing(path(where, "content"))
    if role in ("system", "developer"):
        return [Message("system", read_system(content, path(where, "content")))]
    blocks = list(_blocks(content, path(where, "content")))
    return [_assistant(blocks)] if role == "assistant" else _user(blocks)


def read_system(content: Any, where: str) -> str:
    """System text, given as a string or as blocks; blocks are paragraphs of their own."""
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(as_list(content, where)):
        here = f"{where}[{index}]"
        kind = required_text(as_object(block, here), "type", here)
        if kind != "text":
            wrong_value(path(here, "type"), f"{quoted(kind)} cannot stand in system text")
        texts.append(as_text(block.get("text"), path(here, "text")))
    return "\n".join(texts)


def holds_objects(item: Mapping[str, Any]) -> bool:
    """Whether values of the item count as JSON and not only by Python's `==` (see `Known.literal`)."""
    content = item.get("content")
    return isinstance(content, list) and any(
        block.get("type") in _CALLS for block in content if isinstance(block, dict)
    )


def _blocks(content: Any, where: str) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    """Each block with its type and its path."""
    if isinstance(content, str):
        yield {"text": content}, "text", where
        return
    if not isinstance(content, list):
        wrong_type(where, "a string or an array of blocks", content)
    for index, block in enumerate(content):
        here = f"{where}[{index}]"
        yield as_object(block, here), required_text(block, "type", here), here


def _assistant(blocks: list[tuple[Mapping[str, Any], str, str]]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block, kind, where in blocks:
        if kind == "text":
            texts.append(_text(block, where))
        elif kind == "thinking":
            thoughts.append(as_text(block.get("thinking"), path(where, "thinking")))
        elif kind == "redacted_thinking":
            as_text(block.get("data"), path(where, "data"))
        elif kind in _CALLS:
            name = required_text(block, "name", where)
            arguments = read_arguments(block.get("input"), path(where, "input"))
            calls.append(ToolCall(optional_text(block, "id", where) or "", name, arguments))
        elif kind.endswith("_tool_result") or kind in ("mcp_tool_result", "container_upload", "compaction"):
            texts.append(dump({key: value for key, value in block.items() if key != "cache_control"}).decode())
        else:
            wrong_value(path(where, "type"), f"{quoted(kind)} is not a supported block of an assistant message")
    return Message("assistant", "".join(texts), "\n".join(filter(None, thoughts)) or None, tuple(calls))


def _user(blocks: list[tuple[Mapping[str, Any], str, str]]) -> list[Message]:
    messages: list[Message] = []
    texts: list[str] = []
    attached: list[Media] = []
    length = 0
    for block, kind, where in blocks:
        if kind == "tool_result":
            messages.append(_result(block, where))
            continue
        text, item = _shown(block, kind, length, where)
        if item is not None:
            attached.append(item)
        if text:
            texts.append(text)
            length += len(text)
    if texts or attached or not messages:
        messages.append(Message("user", "".join(texts), media=tuple(attached)))
    return messages


def _result(block: Mapping[str, Any], where: str) -> Message:
    """A tool's result. Where the tool failed the model is told so, as Anthropic's own models are."""
    id = required_text(block, "tool_use_id", where)
    optional_flag(block, "is_error", where)
    content = block.get("content")
    texts: list[str] = []
    attached: list[Media] = []
    length = 0
    for part, kind, here in [] if content is None else list(_blocks(content, path(where, "content"))):
        text, item = _shown(part, kind, length, here)
        if item is not None:
            attached.append(item)
        texts.append(text)
        length += len(text)
    return Message("tool", "".join(texts), tool_call_id=id, media=tuple(attached))


def _shown(block: Mapping[str, Any], kind: str, offset: int, where: str) -> tuple[str, Media | None]:
    """What a block shows a model: text, or media."""
    if kind == "text":
        return _text(block, where), None
    if kind in ("image", "document"):
        return _attached(block, kind, offset, where)
    if kind == "search_result":
        texts = [_text(part, here) for part, _, here in _blocks(block.get("content"), path(where, "content"))]
        title = optional_text(block, "title", where) or ""
        return "\n".join([title, *texts]).strip(), None
    if kind == "tool_reference":
        return required_text(block, "tool_name", where), None
    wrong_value(path(where, "type"), f"{quoted(kind)} is not a supported block of a user message")


def _attached(block: Mapping[str, Any], kind: str, offset: int, where: str) -> tuple[str, Media | None]:
    where = path(where, "source")
    source = as_object(block.get("source"), where)
    form = required_text(source, "type", where)
    name = "image" if kind == "image" else "file"
    if form == "base64":
        mime = required_text(source, "media_type", where)
        data = required_text(source, "data", where)
        return "", media.from_base64(name, data, mime, offset, path(where, "data"))
    if form == "url":
        return "", media.from_url(name, required_text(source, "url", where), offset, path(where, "url"))
    if form == "text" and kind == "document":
        return as_text(source.get("data"), path(where, "data")), None
    if form == "content" and kind == "document":
        parts = _blocks(source.get("content"), path(where, "content"))
        return "".join(_text(part, here) for part, inner, here in parts if inner == "text"), None
    wrong_value(path(where, "type"), f"{quoted(form)} is not a supported source: no files are stored here")


def _text(block: Mapping[str, Any], where: str) -> str:
    return as_text(block.get("text"), path(where, "text"))
