"""Neutral answers in the shape of Anthropic's messages, whole or as its stream of events.

What a client assembles from the stream equals the whole answer. A thinking block carries a signature that holds the
thinking once more; clients send it back untouched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any

from towline.conversation import Answer, Finish, Reply, Request, Usage
from towline.dialects import sse
from towline.dialects.base import Response
from towline.dialects.sealed import seal
from towline.errors import ApiError, ErrorKind

PREFIX = "msg_"
JSON_HEADERS = {"content-type": "application/json"}
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


_EMPTY: dict[str, dict[str, Any]] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}
"""How a block begins in a stream."""


def whole(request: Request, answer: Answer) -> Response:
    reply = answer.replies[0]
    body = {
        **_head(answer.id, answer.model),
        "content": _blocks(reply),
        "stop_reason": _stop_reason(reply),
        "stop_sequence": reply.stop_string,
        "usage": _usage(answer.usage, answer.usage.sampled),
    }
    return Response(200, sse.dump(body), dict(JSON_HEADERS))


class MessagesStream:
    """The answer as `message_start`, blocks, `message_delta` and `message_stop`."""

    def __init__(self, request: Request, id: str, created: int, model: str):
        self._id = id
        self._model = model
        self._pinged = False

    def start(self) -> bytes:
        """Nothing: usage stands in the first event, and is known only with the answer. Pings come before it."""
        return b""

    def ping(self) -> bytes:
        return _event({"type": "ping"})

    def finish(self, answer: Answer) -> Iterable[bytes]:
        reply = answer.replies[0]
        message = {
            **_head(self._id, self._model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(answer.usage, 1),
        }
        yield _event({"type": "message_start", "message": message})
        for index, block in enumerate(_blocks(reply)):
            yield from _block_events(index, block)
        yield _event(
            {
                "type": "message_delta",
                "delta": {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_string},
                "usage": _usage(answer.usage, answer.usage.sampled),
            }
        )
        yield _event({"type": "message_stop"})

    def error(self, error: ApiError) -> bytes:
        return _event(error_body(error))


def error_body(error: ApiError) -> dict[str, Any]:
    message = error.message
    if error.kind is ErrorKind.CONTEXT_LENGTH:
        # Clients recognise this wording and compact their history.
        message = f"prompt is too long: {message}"
    elif error.param and error.param not in message:
        message = f"{error.param}: {message}"
    return {"type": "error", "error": {"type": _ERRORS[error.kind][1], "message": message}}


def error_response(error: ApiError) -> Response:
    headers = dict(JSON_HEADERS)
    if error.kind is ErrorKind.QUOTA:
        headers["x-should-retry"] = "false"
    elif error.kind in (ErrorKind.RATE_LIMIT, ErrorKind.OVERLOADED):
        headers["retry-after"] = str(ceil(max(0.0, 1.0 if error.retry_after is None else error.retry_after)))
    return Response(_ERRORS[error.kind][0], sse.dump(error_body(error)), headers)


def models_response(names: Sequence[str], created: int) -> Response:
    data = [_model(name) for name in names]
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return Response(200, sse.dump({"data": data, "has_more": False, **ends}), dict(JSON_HEADERS))


def model_response(name: str) -> Response:
    return Response(200, sse.dump(_model(name)), dict(JSON_HEADERS))


def _model(name: str) -> dict[str, Any]:
    return {"type": "model", "id": name, "display_name": name, "created_at": "2026-01-01T00:00:00Z"}


def _head(id: str, model: str) -> dict[str, Any]:
    return {"id": PREFIX + id, "type": "message", "role": "assistant", "model": model}


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    """Thinking, then text, then tool uses; a reply of nothing at all has no block."""
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": seal(reply.reasoning)})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.tool_calls:
        arguments = {"input": call.arguments} if isinstance(call.arguments, str) else call.arguments
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def _block_events(index: int, block: dict[str, Any]) -> Iterable[bytes]:
    kind = block["type"]
    empty = _EMPTY[kind]
    yield _event({"type": "content_block_start", "index": index, "content_block": {**block, **empty}})
    if kind == "tool_use":
        deltas = [
            {"type": "input_json_delta", "partial_json": p} for p in sse.pieces(sse.dump(block["input"]).decode())
        ]
    else:
        deltas = [{"type": f"{kind}_delta", kind: piece} for piece in sse.pieces(block[kind])]
    if kind == "thinking":
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    for delta in deltas:
        yield _event({"type": "content_block_delta", "index": index, "delta": delta})
    yield _event({"type": "content_block_stop", "index": index})


def _event(value: dict[str, Any]) -> bytes:
    return sse.event(value, value["type"])


def _stop_reason(reply: Reply) -> str:
    if reply.finish is Finish.LENGTH:
        return "max_tokens"
    if reply.finish is Finish.ABORT:
        return "refusal"
    if reply.tool_calls:
        return "tool_use"
    return "stop_sequence" if reply.finish is Finish.STOP_STRING else "end_turn"


def _usage(usage: Usage, sampled: int) -> dict[str, Any]:
    """Input tokens are those that were not read from the cache."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": sampled,
    }
