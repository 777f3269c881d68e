"""The shape that simulated clients share, whatever dialect they speak.

Inside the audit a request has one shape, that of chat completions: messages with `role`, `content`, `reasoning_content`
and `tool_calls`, and parameters beside them. A `DialectClient` encodes such a request in its dialect and decodes the
answer. Parts of an answer that have no place in that shape are kept in extra fields, so that a harness that echoes
faithfully sends back everything it received: `signature` seals the reasoning, `items` and a call's `item` are item ids,
`answer` is the response id.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from towline.errors import TowlineError

WireJson = dict[str, Any]
"""A message or a request in its wire form."""
MEANINGFUL_FIELDS = frozenset(
    (
        *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"),
        *("signature", "items", "answer"),
    )
)
"""Message fields that the audit interprets; clients pass on all others if their dialect has room for them."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "signature")


class GatewayRefused(TowlineError):
    """The gateway answered with an error."""


@dataclass(slots=True)
class WireRequest:
    """A request as it is sent."""

    path: str
    body: WireJson
    query: str = ""


class DialectClient(Protocol):
    """A client of one dialect."""

    name: str

    def credentials(self, key: str) -> dict[str, str]:
        """The headers that carry the session's key."""
        ...

    def encode(self, request: WireJson) -> WireRequest:
        """A request of the common shape in this dialect."""
        ...

    def decode(self, data: bytes, *, stream: bool) -> list[WireJson]:
        """The choices of an answer: each a `message` and its `finish_reason`."""
        ...


def reasoning_text(message: WireJson) -> str:
    """The readable reasoning of a message."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


def text_parts(content: Any) -> Iterator[WireJson]:
    """The parts of a message's content: each a `text` with its other fields."""
    if isinstance(content, str):
        yield {"text": content}
    for part in content if isinstance(content, list) else ():
        yield {name: value for name, value in part.items() if name != "type"}


def joined_text(content: Any) -> str:
    return "".join(part["text"] for part in text_parts(content))


def extra_fields(message: WireJson) -> WireJson:
    """Fields without a meaning."""
    return {name: value for name, value in message.items() if name not in MEANINGFUL_FIELDS}


def make_choice(
    content: str | None, reasoning: str, calls: list[WireJson], *, truncated: bool, signature: str = "", **kept: Any
) -> WireJson:
    """An answer in the common shape."""
    message: WireJson = {"role": "assistant", "content": content, **kept}
    if reasoning:
        message["reasoning_content"] = reasoning
    if signature:
        message["signature"] = signature
    if calls:
        message["tool_calls"] = calls
    return {"message": message, "finish_reason": "length" if truncated else "stop"}


def make_call(id: str, name: str, arguments: str, **kept: Any) -> WireJson:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}, **kept}


def sse_events(data: bytes) -> Iterator[Any]:
    """The JSON payloads of server-sent events."""
    for line in data.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            event = orjson.loads(line[6:])
            if "error" in event and event["error"] is not None:
                raise GatewayRefused(f"error in the stream: {event['error']}")
            yield event
