"""Answers, errors and model lists in the format of Anthropic's messages, complete or as its stream of events.

What a client assembles from the stream equals the complete answer. A thinking block carries a signature that holds the
thinking again; clients send it back unchanged, also those that asked for the thinking itself to be omitted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from math import ceil
from typing import Any

from towline.conversation import Answer, Finish, Reply, Request, Usage
from towline.dialects import wire
from towline.dialects.base import Response
from towline.dialects.messages.items import UNPARSED
from towline.dialects.wire import seal
from towline.errors import ApiError, ErrorKind

PREFIX = "msg_"
_ERRORS: dict[ErrorKind, tuple[int, str]] = {
    ErrorKind.BAD_REQUEST: (400, "invalid_request_error"),
    ErrorKind.UNAUTHORISED: (401, "authentication_error"),
    ErrorKind.NOT_FOUND: (404, "not_found_error"),
    ErrorKind.METHOD: (405, "invalid_request_error"),
    ErrorKind.TOO_LARGE: (413, "request_too_large"),
    ErrorKind.CONTEXT_LENGTH: (400, "invalid_request_error"),
    ErrorKind.QUOTA: (429, "rate_limit_error"),
    ErrorKind.RATE_LIMIT: (429, "rate_limit_error"),
    ErrorKind.OVERLOADED: (529, "overloaded_error"),
    ErrorKind.INTERNAL: (500, "api_error"),
}
_FINAL = (ErrorKind.QUOTA, ErrorKind.UNAUTHORISED)
"""Errors that clients would retry in vain: an exhausted limit, an ended session."""
_EMPTY: dict[str, dict[str, Any]] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}
"""A block at its start in a stream."""


def full_response(request: Request, answer: Answer) -> Response:
    """The answer as one `message`."""
    reply = answer.replies[0]
    body = {
        **_head(answer.id, answer.model),
        "content": _blocks(reply, request),
        "stop_reason": _stop_reason(reply),
        "stop_sequence": reply.stop_string,
        "usage": _usage(answer.usage),
    }
    return wire.json_response(body)


class MessagesStream:
    """The answer as `message_start`, blocks, `message_delta` and `message_stop`."""

    content_type = wire.CONTENT_TYPE

    def __init__(self, request: Request, id: str, model: str):
        self._request = request
        self._head = _head(id, model)

    def start(self) -> bytes:
        """Nothing: the first event contains the usage, which is known only with the answer.

        Pings may come before it. A client that has seen only pings treats an error as that of the whole call, and retries
        where that helps.
        """
        return b""

    def ping(self) -> bytes:
        return _event({"type": "ping"})

    def finish(self, answer: Answer) -> Iterable[bytes]:
        reply = answer.replies[0]
        message = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_input(answer.usage), "output_tokens": min(1, answer.usage.sampled)},
        }
        yield _event({"type": "message_start", "message": message})
        for index, block in enumerate(_blocks(reply, self._request)):
            yield from _block_events(index, block)
        yield _event(
            {
                "type": "message_delta",
                "delta": {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_string},
                "usage": _usage(answer.usage),
            }
        )
        yield _event({"type": "message_stop"})

    def error(self, error: ApiError) -> bytes:
        return _event(error_body(error))


def error_body(error: ApiError) -> dict[str, Any]:
    return {"type": "error", "error": {"type": _ERRORS[error.kind][1], "message": _error_message(error)}}


def _error_message(error: ApiError) -> str:
    """The reason, with fields in Anthropic's notation (`messages.3.content`)."""
    if error.capability:
        # Claude Code retries the request without the rejected capability.
        return f"capability_rejected: {error.capability}"
    if error.kind is ErrorKind.CONTEXT_LENGTH:
        return _too_long(error.message)
    if not error.param:
        return error.message
    place = error.param.replace("[", ".").replace("]", "")
    return f"{place}: {error.message.replace(error.param, place)}"


def _too_long(message: str) -> str:
    """Clients recognise this wording, parse the numbers, and compact their history."""
    figures = sorted(int(figure) for figure in re.findall(r"\d+", message))
    if len(figures) != 2:
        return f"prompt is too long: {message}"
    most, found = figures
    return f"prompt is too long: {max(found, most + 1)} tokens > {most} maximum"


def error_response(error: ApiError) -> Response:
    headers = dict(wire.JSON_HEADERS)
    if error.kind in _FINAL:
        headers["x-should-retry"] = "false"
    elif error.kind in (ErrorKind.RATE_LIMIT, ErrorKind.OVERLOADED):
        seconds = wire.retry_seconds(error)
        headers |= {"retry-after": str(ceil(seconds)), "retry-after-ms": str(ceil(seconds * 1000))}
    return wire.json_response(error_body(error), _ERRORS[error.kind][0], headers)


def models_response(names: Sequence[str], created: int) -> Response:
    data = [_model(name, created) for name in names]
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return wire.json_response({"data": data, "has_more": False, **ends})


def model_response(name: str, created: int) -> Response:
    return wire.json_response(_model(name, created))


def _model(name: str, created: int) -> dict[str, Any]:
    since = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": since, "lifecycle": "active"}


def _head(id: str, model: str) -> dict[str, Any]:
    return {"id": PREFIX + id, "type": "message", "role": "assistant", "model": model}


def _blocks(reply: Reply, request: Request) -> list[dict[str, Any]]:
    """Thinking, then text, then tool uses; an empty reply has no block."""
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        shown = "" if request.wire.get("omit_thinking") else reply.reasoning
        blocks.append({"type": "thinking", "thinking": shown, "signature": seal(reply.reasoning)})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.tool_calls:
        arguments = {UNPARSED: call.arguments} if isinstance(call.arguments, str) else call.arguments
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def _block_events(index: int, block: dict[str, Any]) -> Iterable[bytes]:
    kind = block["type"]
    empty = _EMPTY[kind]
    yield _event({"type": "content_block_start", "index": index, "content_block": {**block, **empty}})
    if kind == "tool_use":
        pieces = wire.pieces(wire.dump(block["input"]).decode())
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
    else:
        deltas = [{"type": f"{kind}_delta", kind: piece} for piece in wire.pieces(block[kind])]
    if kind == "thinking":
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    for delta in deltas:
        yield _event({"type": "content_block_delta", "index": index, "delta": delta})
    yield _event({"type": "content_block_stop", "index": index})


def _event(value: dict[str, Any]) -> bytes:
    return wire.event(value, value["type"])


def _stop_reason(reply: Reply) -> str:
    if reply.finish is Finish.LENGTH:
        return "max_tokens"
    if reply.finish is Finish.ABORT:
        return "refusal"
    if reply.tool_calls:
        return "tool_use"
    return "stop_sequence" if reply.finish is Finish.STOP_STRING else "end_turn"


def _input(usage: Usage) -> dict[str, Any]:
    """Input tokens are those not read from the cache."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    details = {"thinking_tokens": usage.reasoning}
    return {**_input(usage), "output_tokens": usage.sampled, "output_tokens_details": details}
