"""Neutral answers in the shape of OpenAI's chat completions, whole or as a stream of chunks.

Both carry the same: what a client assembles from the stream equals the whole answer. Reasoning goes into
`reasoning_content`, which clients that do not know it skip and those that do send back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from towline.conversation import Answer, Finish, Reply, Request, TokenLogprob, ToolCall, Usage
from towline.dialects import sse
from towline.dialects.base import Response
from towline.dialects.openai_errors import JSON_HEADERS, error_body
from towline.errors import ApiError

PREFIX = "chatcmpl-"
_LEAST_LOGPROB = -9999.0
"""OpenAI's figure for a token that is all but impossible; JSON has no infinity."""
_FINISH = {
    Finish.STOP: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
    Finish.ABORT: "content_filter",
}
"""A turn that was cut short for good is the one case in which a client must neither trust nor continue the text."""


def whole(request: Request, answer: Answer) -> Response:
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
    return Response(200, sse.dump(body), dict(JSON_HEADERS))


class ChatStream:
    """The answer as `chat.completion.chunk` events."""

    content_type = sse.CONTENT_TYPE

    def __init__(self, request: Request, id: str, created: int, model: str):
        self._request = request
        self._usage = bool(request.wire.get("include_usage"))
        self._legacy = bool(request.wire.get("functions"))
        self._head = {"id": PREFIX + id, "object": "chat.completion.chunk", "created": created, "model": model}

    def start(self) -> bytes:
        roles = ({"role": "assistant", "content": None} for _ in range(self._request.sampling.n))
        return b"".join(self._chunk(index, delta) for index, delta in enumerate(roles))

    def ping(self) -> bytes:
        return sse.comment("ping")

    def finish(self, answer: Answer) -> Iterable[bytes]:
        for index, reply in enumerate(answer.replies):
            for delta in _deltas(reply, self._legacy):
                yield self._chunk(index, delta)
            logprobs = _logprobs(self._request, answer, index)
            yield self._chunk(index, {}, _finish_reason(reply, self._legacy), logprobs)
        if self._usage:
            yield sse.event({**self._head, "choices": [], "usage": _usage(answer.usage)})
        yield sse.DONE

    def error(self, error: ApiError) -> bytes:
        return sse.event({"error": error_body(error)})

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._head, "choices": [choice]}
        if self._usage:
            chunk["usage"] = None
        return sse.event(chunk)


def _message(reply: Reply, legacy: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _content(reply), "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls and legacy:
        first = reply.tool_calls[0]
        message["function_call"] = {"name": first.name, "arguments": sse.dump_arguments(first.arguments)}
    elif reply.tool_calls:
        message["tool_calls"] = [_tool_call(call, sse.dump_arguments(call.arguments)) for call in reply.tool_calls]
    return message


def _content(reply: Reply) -> str | None:
    """Null beside calls, as OpenAI has it; a reply of nothing at all is the empty string."""
    return None if reply.tool_calls and not reply.text else reply.text


def _tool_call(call: ToolCall, arguments: str) -> dict[str, Any]:
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _deltas(reply: Reply, legacy: bool) -> Iterator[dict[str, Any]]:
    for piece in sse.pieces(reply.reasoning or ""):
        yield {"reasoning_content": piece}
    for piece in sse.pieces(reply.text):
        yield {"content": piece}
    if not reply.text and not reply.tool_calls:
        yield {"content": ""}
    if legacy and reply.tool_calls:
        first = reply.tool_calls[0]
        yield {"function_call": {"name": first.name, "arguments": ""}}
        for piece in sse.pieces(sse.dump_arguments(first.arguments)):
            yield {"function_call": {"arguments": piece}}
        return
    for index, call in enumerate(reply.tool_calls):
        yield {"tool_calls": [{"index": index, **_tool_call(call, "")}]}
        kind, field = ("custom", "input") if call.custom else ("function", "arguments")
        for piece in sse.pieces(sse.dump_arguments(call.arguments)):
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
    return {"content": _tokens(answer.logprobs(index)), "refusal": None}


def _tokens(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {
            "token": token.text,
            # The comparison is false for NaN as well, which JSON has no word for either.
            "logprob": token.logprob if token.logprob > _LEAST_LOGPROB else _LEAST_LOGPROB,
            "bytes": list(token.data),
            "top_logprobs": [],
        }
        for token in tokens
    ]
