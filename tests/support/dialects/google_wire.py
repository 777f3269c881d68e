"""Google's wire in short: contents, parts and requests for the tests of its dialect."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from typing import Any

from towline.conversation import Media, Message, Request
from towline.dialects.base import DialectCall, ReadCache
from towline.dialects.google import GoogleDialect

DIALECT = GoogleDialect()
PNG = b"\x89PNG\xff\xfe\xfb"
PNG_URL = "data:image/png;base64," + b64encode(PNG).decode()
PICTURE = Media("image", sha256(PNG).hexdigest(), PNG_URL, 0)
INLINE = {"inlineData": {"mimeType": "image/png", "data": b64encode(PNG).decode()}}
USER = {"role": "user", "parts": [{"text": "hi"}]}
MODEL = "v1beta/models/m"


def read(
    known: ReadCache | None = None, headers: dict[str, str] | None = None, **fields: Any
) -> tuple[Request, ReadCache]:
    call = DialectCall("generate", {"contents": [USER], **fields}, headers or {}, {}, {"model": MODEL})
    return DIALECT.read(call, known or ReadCache())


def messages(*contents: Any) -> list[Message]:
    return read(contents=list(contents))[0].messages


def model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def text(value: str, **extra: Any) -> dict[str, Any]:
    return {"text": value, **extra}


def call(name: str = "f", id: str | None = "c1", args: Any = None, **extra: Any) -> dict[str, Any]:
    made = {"name": name, "args": {} if args is None else args}
    return {"functionCall": made if id is None else {"id": id, **made}, **extra}


def result(name: str = "f", id: str | None = "c1", response: Any = "ok", **extra: Any) -> dict[str, Any]:
    response = {"output": response} if isinstance(response, str) else response
    made = {"name": name, "response": response, **extra}
    return {"functionResponse": made if id is None else {"id": id, **made}}


def tool(body: str, id: str, name: str = "f", *media: Media) -> Message:
    return Message("tool", body, tool_call_id=id, name=name, media=media)
