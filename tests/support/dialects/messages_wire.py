"""Bodies of Anthropic's messages in few words, for the tests of that dialect."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from typing import Any

from towline.conversation import Media, Message, Request
from towline.dialects.base import DialectCall, ReadCache
from towline.dialects.messages import MessagesDialect

DIALECT = MessagesDialect()
PNG = b"\x89PNG\r\n"
PNG_DATA = b64encode(PNG).decode()
PNG_URL = "data:image/png;base64," + PNG_DATA
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG_DATA}}
MARK = {"cache_control": {"type": "ephemeral"}}
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def read(
    known: ReadCache | None = None, headers: dict[str, str] | None = None, operation: str = "generate", **fields: Any
) -> tuple[Request, ReadCache]:
    body = {"model": "m", "max_tokens": 9, "messages": [USER], **fields}
    return DIALECT.read(DialectCall(operation, body, headers or {}), known or ReadCache())


def messages(*items: dict[str, Any], **fields: Any) -> list[Message]:
    return read(messages=list(items), **fields)[0].messages


def text(value: str, **extra: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **extra}


def use(name: str, given: Any, id: str = "c1", **extra: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": given, **extra}


def result(id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, **fields}


def image(offset: int) -> Media:
    return Media("image", sha256(PNG).hexdigest(), PNG_URL, offset)


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def system(*content: Any) -> dict[str, Any]:
    return {"role": "system", "content": list(content)}


def document(source: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **extra}


TOOL = {"name": "f", "input_schema": SCHEMA}
FETCH = {"name": "fetch", "description": "Fetches.", "input_schema": SCHEMA, "defer_loading": True}
SEARCH = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result", "url": "u"}]}


def reference(name: str) -> dict[str, Any]:
    return {"type": "tool_reference", "tool_name": name}
