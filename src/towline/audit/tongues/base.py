"""What a simulated harness says and hears, whatever dialect it speaks.

Inside the audit a request is written in one shape, that of chat completions: messages with `role`, `content`,
`reasoning_content` and `tool_calls`, and parameters beside them. A `Tongue` tells such a request in its dialect and hears
the answer back. What an answer holds that has no place in that shape is kept in fields of its own, so that a harness that
echoes faithfully sends back all that it was given: `signature` seals the reasoning, `items` and a call's `item` are ids of
items, `answer` is the id of the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from towline.errors import TowlineError

Wired = dict[str, Any]
"""A message or a request as it is on the wire."""
OWN = frozenset(
    (
        *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"),
        *("signature", "items", "answer"),
    )
)
"""Fields of a message that have a meaning here; tongues pass on all others where their dialect has room."""
REASONING = ("reasoning_content", "reasoning", "signature")


class Refused(TowlineError):
    """The gateway answered with an error."""


@dataclass(slots=True)
class Told:
    """A request as it goes out."""

    path: str
    body: Wired
    query: str = ""


class Tongue(Protocol):
    """One dialect, as a harness speaks it."""

    name: str

    def credentials(self, key: str) -> dict[str, str]:
        """The headers that carry the session's key."""
        ...

    def tell(self, ask: Wired) -> Told:
        """A request in this dialect."""
        ...

    def hear(self, data: bytes, *, stream: bool) -> list[Wired]:
        """The choices of an answer: each a `message` and its `finish_reason`."""
        ...


def thought(message: Wired) -> str:
    """The reasoning that a message carries in the open."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


def texts(content: Any) -> Iterator[Wired]:
    """The parts of a message's content: each a `text`, with what stands beside it."""
    if isinstance(content, str):
        yield {"text": content}
    for part in content if isinstance(content, list) else ():
        yield {name: value for name, value in part.items() if name != "type"}


def text(content: Any) -> str:
    return "".join(part["text"] for part in texts(content))


def others(message: Wired) -> Wired:
    """Fields that mean nothing."""
    return {name: value for name, value in message.items() if name not in OWN}


def choice(
    said: str | None, reasoning: str, calls: list[Wired], *, cut: bool, signature: str = "", **kept: Any
) -> Wired:
    """An answer in the common shape."""
    message: Wired = {"role": "assistant", "content": said, **kept}
    if reasoning:
        message["reasoning_content"] = reasoning
    if signature:
        message["signature"] = signature
    if calls:
        message["tool_calls"] = calls
    return {"message": message, "finish_reason": "length" if cut else "stop"}


def call(id: str, name: str, arguments: str, **kept: Any) -> Wired:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}, **kept}


def events(data: bytes) -> Iterator[Any]:
    """The JSON of server-sent events."""
    for line in data.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            event = orjson.loads(line[6:])
            if "error" in event and event["error"] is not None:
                raise Refused(f"error in the stream: {event['error']}")
            yield event
