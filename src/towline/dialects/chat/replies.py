"""Answers, errors and model lists in the format of OpenAI's chat completions. `responses` shares the errors and lists.

What a client assembles from the stream equals the complete answer. Reasoning goes into `reasoning_content`, which clients
that do not know it skip and those that do send back. Status, type and code of an error are what OpenAI's clients act on:
they retry 429 and 5xx unless `x-should-retry` says no, and harnesses compact their history on `context_length_exceeded`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import Any

from towline.conversation import Answer, Finish, Reply, Request, TokenLogprob, ToolCall, Usage
from towline.dialects import wire
from towline.dialects.base import Response
from towline.errors import ApiError, ErrorKind

_SHAPES: dict[ErrorKind, tuple[int, str, str | None]] = {
    ErrorKind.BAD_REQUEST: (400, "invalid_request_error", None),
    ErrorKind.UNAUTHORISED: (401, "invalid_request_error", "invalid_api_key"),
    ErrorKind.NOT_FOUND: (404, "invalid_request_error", None),
    ErrorKind.METHOD: (405, "invalid_request_error", "method_not_supported"),
    ErrorKind.TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
    ErrorKind.CONTEXT_LENGTH: (400, "invalid_request_error", "context_length_exceeded"),
    ErrorKind.QUOTA: (429, "insufficient_quota", "insufficient_quota"),
    ErrorKind.RATE_LIMIT: (429, "requests", "rate_limit_exceeded"),
    ErrorKind.OVERLOADED: (503, "server_error", "overloaded"),
    ErrorKind.INTERNAL: (500, "server_error", None),
}
"""Status, type and code per kind of error."""


def error_body(error: ApiError) -> dict[str, Any]:
    """The value of `error`, in a response and in a stream."""
    _, kind, code = _SHAPES[error.kind]
    param = error.param
    if error.kind is ErrorKind.NOT_FOUND and param == "model":
        code = "model_not_found"
    if error.kind is ErrorKind.CONTEXT_LENGTH and param is None:
        param = "messages"
    return {"message": error.message, "type": kind, "param": param, "code": code}


def error_response(error: ApiError) -> Response:
    headers = dict(wire.JSON_HEADERS)
    if error.kind is ErrorKind.QUOTA:
        headers["x-should-retry"] = "false"
    elif error.kind in (ErrorKind.RATE_LIMIT, ErrorKind.OVERLOADED):
        wait = wire.retry_seconds(error)
        headers |= {"retry-after": str(ceil(wait)), "retry-after-ms": str(ceil(wait * 1000))}
    return wire.json_response({"error": error_body(error)}, _SHAPES[error.kind][0], headers)


def model_response(name: str, created: int) -> Response:
    return wire.json_response(_model(name, created))


def models_response(names: Sequence[str], created: int) -> Response:
    body = {"object": "list", "data": [_model(name, created) for name in names]}
    return wire.json_response(body)


def _model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "towline"}


PREFIX = "chatcmpl-"
_LEAST_LOGPROB = -9999.0
"""OpenAI's value for a nearly impossible token; JSON has no infinity."""
_FINISH = {
    Finish.STOP: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
    Finish.ABORT: "content_filter",
}
"""An aborted turn is the one case in which a client must neither trust nor continue the text."""


def full_response(request: Request, answer: Answer) -> Response:
    """The answer as one `chat.completion`."""
    legacy = bool(request.wire.get("functions"))
    body = {
        "id": PREFIX + answer.id,
        "object": "chat.completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [
            {
                "index": index,
                "message": _message(reply, legacy),
                "logprobs": _logprobs(request, answer, index),
                "finish_reason": _finish_reason(reply, legacy),
            }
            for index, reply in enumerate(answer.replies)
        ],
        "usage": _usage(answer.usage),
    }
    return wire.json_response(body)


class ChatStream:
    """The answer as `chat.completion.chunk` events."""

    content_type = wire.CONTENT_TYPE

    def __init__(self, request: Request, id: str, created: int, model: str):
        self._request = request
        self._usage = bool(request.wire.get("include_usage"))
        self._legacy = bool(request.wire.get("functions"))
        self._head = {"id": PREFIX + id, "object": "chat.completion.chunk", "created": created, "model": model}

    def start(self) -> bytes:
        roles = ({"role": "assistant", "content": None} for _ in range(self._request.sampling.n))
        return b"".join(self._chunk(index, delta) for index, delta in enumerate(roles))

    def ping(self) -> bytes:
        return wire.comment("ping")

    def finish(self, answer: Answer) -> Iterable[bytes]:
        for index, reply in enumerate(answer.replies):
            for delta in _deltas(reply, self._legacy):
                yield self._chunk(index, delta)
            logprobs = _logprobs(self._request, answer, index)
            yield self._chunk(index, {}, _finish_reason(reply, self._legacy), logprobs)
        if self._usage:
            yield wire.event({**self._head, "choices": [], "usage": _usage(answer.usage)})
        yield wire.DONE

    def error(self, error: ApiError) -> bytes:
        return wire.event({"error": error_body(error)})

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._head, "choices": [choice]}
        if self._usage:
            chunk["usage"] = None
        return wire.event(chunk)


def _message(reply: Reply, legacy: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _content(reply), "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls and legacy:
        first = reply.tool_calls[0]
        message["function_call"] = {"name": first.name, "arguments": wire.dump_arguments(first.arguments)}
    elif reply.tool_calls:
        message["tool_calls"] = [_tool_call(call, wire.dump_arguments(call.arguments)) for call in reply.tool_calls]
    return message


def _content(reply: Reply) -> str | None:
    """Null next to calls, as OpenAI does it; an empty reply is the empty string."""
    return None if reply.tool_calls and not reply.text else reply.text


def _tool_call(call: ToolCall, arguments: str) -> dict[str, Any]:
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _deltas(reply: Reply, legacy: bool) -> Iterator[dict[str, Any]]:
    for piece in wire.pieces(reply.reasoning or ""):
        yield {"reasoning_content": piece}
    for piece in wire.pieces(reply.text):
        yield {"content": piece}
    if not reply.text and not reply.tool_calls:
        yield {"content": ""}
    if legacy and reply.tool_calls:
        first = reply.tool_calls[0]
        yield {"function_call": {"name": first.name, "arguments": ""}}
        for piece in wire.pieces(wire.dump_arguments(first.arguments)):
            yield {"function_call": {"arguments": piece}}
        return
    for index, call in enumerate(reply.tool_calls):
        yield {"tool_calls": [{"index": index, **_tool_call(call, "")}]}
        kind, field = ("custom", "input") if call.custom else ("function", "arguments")
        for piece in wire.pieces(wire.dump_arguments(call.arguments)):
            yield {"tool_calls": [{"index": index, kind: {field: piece}}]}


def _finish_reason(reply: Reply, legacy: bool) -> str:
    if reply.tool_calls and reply.finish in (Finish.STOP, Finish.STOP_STRING):
        return "function_call" if legacy else "tool_calls"
    return _FINISH[reply.finish]


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.sampled,
        "total_tokens": usage.prompt + usage.sampled,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def _logprobs(request: Request, answer: Answer, index: int) -> dict[str, Any] | None:
    if answer.logprobs is None or not request.wire.get("logprobs"):
        return None
    return {"content": logprob_entries(answer.logprobs(index)), "refusal": None}


def logprob_entries(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Sampled tokens with their logprobs, as OpenAI's dialects write them."""
    return [
        {
            "token": token.text,
            # The comparison is also false for NaN, which JSON cannot express either.
            "logprob": token.logprob if token.logprob > _LEAST_LOGPROB else _LEAST_LOGPROB,
            "bytes": list(token.data),
            "top_logprobs": [],
        }
        for token in tokens
    ]
