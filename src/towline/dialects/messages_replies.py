"""Neutral answers in the shape of Anthropic's messages, whole or as its stream of events.

What a client assembles from the stream equals the whole answer. A thinking block carries a signature that holds the
thinking once more; clients send it back untouched, also those that asked for the thinking itself to be left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from math import ceil
from typing import Any

from towline.conversation import Answer, Finish, Reply, Request, Usage
from towline.dialects import sse
from towline.dialects.base import Response
from towline.dialects.messages_items import UNPARSED
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
_FINAL = (ErrorKind.QUOTA, ErrorKind.UNAUTHORISED)
"""Errors that clients would try again, in vain: a limit that is used up, a session that is over."""
_EMPTY: dict[str, dict[str, Any]] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}
"""How a block begins in a stream."""


def whole(request: Request, answer: Answer) -> Response:
    """The answer as one `message`."""
    reply = answer.replies[0]
    body = {
        **_head(answer.id, answer.model),
        "content": _blocks(reply, request),
        "stop_reason": _stop_reason(reply),
        "stop_sequence": reply.stop_string,
        "usage": _usage(answer.usage),
    }
    return Response(200, sse.dump(body), dict(JSON_HEADERS))


class MessagesStream:
    """The answer as `message_start`, blocks, `message_delta` and `message_stop`."""

    content_type = sse.CONTENT_TYPE

    def __init__(self, request: Request, id: str, model: str):
        self._request = request
        self._head = _head(id, model)

    def start(self) -> bytes:
        """Nothing: the first event tells the usage, which is known only with the answer.

        Pings may come before it, as they may anywhere. A client that has seen nothing but pings takes an error for that
        of the whole call, and tries again where that helps.
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
    """The reason, with fields named as Anthropic names them (`messages.3.content`)."""
    if error.capability:
        # Claude Code sends the request again without what it asked for.
        return f"capability_rejected: {error.capability}"
    if error.kind is ErrorKind.CONTEXT_LENGTH:
        return _too_long(error.message)
    if not error.param:
        return error.message
    place = error.param.replace("[", ".").replace("]", "")
    return f"{place}: {error.message.replace(error.param, place)}"


def _too_long(message: str) -> str:
    """Clients recognise this wording, take the figures from it, and compact their history."""
    figures = sorted(int(figure) for figure in re.findall(r"\d+", message))
    if len(figures) != 2:
        return f"prompt is too long: {message}"
    most, found = figures
    return f"prompt is too long: {max(found, most + 1)} tokens > {most} maximum"


def error_response(error: ApiError) -> Response:
    headers = dict(JSON_HEADERS)
    if error.kind in _FINAL:
        headers["x-should-retry"] = "false"
    elif error.kind in (ErrorKind.RATE_LIMIT, ErrorKind.OVERLOADED):
        seconds = max(0.0, 1.0 if error.retry_after is None else error.retry_after)
        headers |= {"retry-after": str(ceil(seconds)), "retry-after-ms": str(ceil(seconds * 1000))}
    return Response(_ERRORS[error.kind][0], sse.dump(error_body(error)), headers)


def models_response(names: Sequence[str], created: int) -> Response:
    data = [_model(name, created) for name in names]
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return Response(200, sse.dump({"data": data, "has_more": False, **ends}), dict(JSON_HEADERS))


def model_response(name: str, created: int) -> Response:
    return Response(200, sse.dump(_model(name, created)), dict(JSON_HEADERS))


def _model(name: str, created: int) -> dict[str, Any]:
    since = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": since, "lifecycle": "active"}


def _head(id: str, model: str) -> dict[str, Any]:
    return {"id": PREFIX + id, "type": "message", "role": "assistant", "model": model}


def _blocks(reply: Reply, request: Request) -> list[dict[str, Any]]:
    """Thinking, then text, then tool uses; a reply of nothing at all has no block."""
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
        pieces = sse.pieces(sse.dump(block["input"]).decode())
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
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


def _input(usage: Usage) -> dict[str, Any]:
    """Input tokens are those that were not read from the cache."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    details = {"thinking_tokens": usage.reasoning}
    return {**_input(usage), "output_tokens": usage.sampled, "output_tokens_details": details}
