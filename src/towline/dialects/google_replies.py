"""Neutral answers in the shape of Google's generateContent, whole or as a stream of the same.

Thoughts are shown if the client asked for them; in either case the first part that is not a thought carries a signature
that holds them, so that a client which keeps only signatures sends them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import Any

from towline.conversation import Answer, Finish, Reply, Request, Usage
from towline.dialects import sse
from towline.dialects.base import Response
from towline.dialects.sealed import seal
from towline.errors import ApiError, ErrorKind

JSON_HEADERS = {"content-type": "application/json; charset=utf-8"}
_ERRORS: dict[ErrorKind, tuple[int, str]] = {
    ErrorKind.BAD_REQUEST: (400, "INVALID_ARGUMENT"),
    ErrorKind.UNAUTHORISED: (401, "UNAUTHENTICATED"),
    ErrorKind.NOT_FOUND: (404, "NOT_FOUND"),
    ErrorKind.METHOD: (405, "INVALID_ARGUMENT"),
    ErrorKind.TOO_LARGE: (413, "INVALID_ARGUMENT"),
    ErrorKind.CONTEXT_LENGTH: (400, "INVALID_ARGUMENT"),
    ErrorKind.QUOTA: (429, "RESOURCE_EXHAUSTED"),
    ErrorKind.RATE_LIMIT: (429, "RESOURCE_EXHAUSTED"),
    ErrorKind.OVERLOADED: (503, "UNAVAILABLE"),
    ErrorKind.INTERNAL: (500, "INTERNAL"),
}
_FINISH = {
    Finish.STOP: "STOP",
    Finish.STOP_STRING: "STOP",
    Finish.LENGTH: "MAX_TOKENS",
    Finish.ABORT: "OTHER",
}
_PERMANENT = "type.googleapis.com/google.rpc.QuotaFailure"


def whole(request: Request, answer: Answer) -> Response:
    candidates = [
        _candidate(index, list(_parts(reply, request)), _FINISH[reply.finish])
        for index, reply in enumerate(answer.replies)
    ]
    body = {"candidates": candidates, **_tail(answer.usage, answer.model, answer.id)}
    return Response(200, sse.dump(body), dict(JSON_HEADERS))


class GoogleStream:
    """The answer as a stream of partial responses: server-sent events, or one JSON array where those were not asked for."""

    def __init__(self, request: Request, id: str, created: int, model: str):
        self._request = request
        self._id = id
        self._model = model
        self._events = bool(request.wire.get("sse"))
        self._begun = False
        self.content_type = "text/event-stream" if self._events else "application/json"

    def start(self) -> bytes:
        return b"" if self._events else b"["

    def ping(self) -> bytes:
        """Blank lines: Google's clients take any other line that is not data for an error."""
        return b"\n\n" if self._events else b"\n"

    def finish(self, answer: Answer) -> Iterable[bytes]:
        tail = _tail(answer.usage, self._model, self._id)
        for index, reply in enumerate(answer.replies):
            pieces = list(_pieces(reply, self._request)) or [{"text": ""}]
            for place, part in enumerate(pieces):
                last = place == len(pieces) - 1
                finish = _FINISH[reply.finish] if last else None
                yield self._write({"candidates": [_candidate(index, [part], finish)], **tail})
        if not self._events:
            yield b"]"

    def error(self, error: ApiError) -> bytes:
        return self._write(error_body(error)) + (b"" if self._events else b"]")

    def _write(self, value: dict[str, Any]) -> bytes:
        if self._events:
            return sse.event(value)
        separator, self._begun = (b",\r\n" if self._begun else b""), True
        return separator + sse.dump(value)


def error_body(error: ApiError) -> dict[str, Any]:
    code, status = _ERRORS[error.kind]
    message = error.message
    if error.param and error.param not in message:
        message = f"{error.param}: {message}"
    if error.kind is ErrorKind.CONTEXT_LENGTH:
        # Clients recognise this wording.
        message = f"The input token count exceeds the maximum number of tokens allowed. {error.message}"
    body: dict[str, Any] = {"code": code, "message": message, "status": status}
    if error.kind is ErrorKind.QUOTA:
        body["details"] = [{"@type": _PERMANENT, "violations": [{"description": message}]}]
    return {"error": body}


def error_response(error: ApiError) -> Response:
    headers = dict(JSON_HEADERS)
    if error.kind in (ErrorKind.RATE_LIMIT, ErrorKind.OVERLOADED):
        headers["retry-after"] = str(ceil(max(0.0, 1.0 if error.retry_after is None else error.retry_after)))
    return Response(_ERRORS[error.kind][0], sse.dump(error_body(error)), headers)


def models_response(names: Sequence[str]) -> Response:
    return Response(200, sse.dump({"models": [_model(name) for name in names]}), dict(JSON_HEADERS))


def model_response(name: str) -> Response:
    return Response(200, sse.dump(_model(name)), dict(JSON_HEADERS))


def _model(name: str) -> dict[str, Any]:
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    return {"name": f"models/{name}", "displayName": name, "version": "1", "supportedGenerationMethods": methods}


def _candidate(index: int, parts: list[dict[str, Any]], finish: str | None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": index}
    if finish is not None:
        candidate["finishReason"] = finish
    return candidate


def _parts(reply: Reply, request: Request) -> Iterator[dict[str, Any]]:
    signature = {"thoughtSignature": seal(reply.reasoning)} if reply.reasoning else {}
    if reply.reasoning and request.wire.get("thoughts"):
        yield {"text": reply.reasoning, "thought": True}
    if reply.text or not reply.tool_calls:
        yield {"text": reply.text, **signature}
        signature = {}
    for call in reply.tool_calls:
        arguments = {"input": call.arguments} if isinstance(call.arguments, str) else call.arguments
        yield {"functionCall": {"id": call.id, "name": call.name, "args": arguments}, **signature}
        signature = {}


def _pieces(reply: Reply, request: Request) -> Iterator[dict[str, Any]]:
    """The parts, with long text in pieces; a signature stands on the last piece of its part."""
    for part in _parts(reply, request):
        text = part.get("text")
        if not text:
            yield part
            continue
        cut = list(sse.pieces(text))
        for piece in cut[:-1]:
            yield {"text": piece, "thought": True} if part.get("thought") else {"text": piece}
        yield {**part, "text": cut[-1]}


def _tail(usage: Usage, model: str, id: str) -> dict[str, Any]:
    counts = {
        "promptTokenCount": usage.prompt,
        "candidatesTokenCount": usage.sampled - usage.reasoning,
        "totalTokenCount": usage.prompt + usage.sampled,
    }
    if usage.reasoning:
        counts["thoughtsTokenCount"] = usage.reasoning
    if usage.cached:
        counts["cachedContentTokenCount"] = usage.cached
    return {"usageMetadata": counts, "modelVersion": model, "responseId": id}
