"""Answers, errors and model lists in the format of Google's generateContent, complete or streamed.

Thoughts are shown if the client asked for them. In either case the first part that is not a thought carries a signature
that holds them, so that a client that keeps only signatures sends them back. The signature is on the first chunk of that
part, because clients that join the chunks of a text keep the fields of the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import Any

from towline.conversation import Answer, Finish, Reply, Request, Usage
from towline.dialects import wire
from towline.dialects.base import Response
from towline.dialects.google.items import TEXT_ARGUMENTS
from towline.dialects.wire import seal
from towline.errors import ApiError, ErrorKind

JSON_HEADERS = {"content-type": "application/json; charset=UTF-8"}
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
_DETAIL = "type.googleapis.com/google.rpc."
_METHODS = ["generateContent", "streamGenerateContent", "countTokens"]
_LEAST_LOGPROB = -9999.0
"""The value for a nearly impossible token; JSON has no infinity."""


def full_response(request: Request, answer: Answer) -> Response:
    """The answer as one `GenerateContentResponse`."""
    candidates = [
        _candidate(index, list(_parts(reply, request)), _ending(request, answer, index))
        for index, reply in enumerate(answer.replies)
    ]
    body = {"candidates": candidates, **_tail(answer.usage, answer.model, answer.id)}
    return wire.json_response(body, headers=JSON_HEADERS)


class GoogleStream:
    """The answer as a stream of partial responses: server-sent events if asked for, else one JSON array."""

    def __init__(self, request: Request, id: str, created: int, model: str):
        self._request = request
        self._id = id
        self._model = model
        self._events = bool(request.wire.get("sse"))
        self._begun = False
        self.content_type = "text/event-stream" if self._events else JSON_HEADERS["content-type"]

    def start(self) -> bytes:
        return b"" if self._events else b"["

    def ping(self) -> bytes:
        """Blank lines: Google's clients treat any other line that is not data as an error."""
        return b"\n\n" if self._events else b"\n"

    def finish(self, answer: Answer) -> Iterable[bytes]:
        tail = _tail(answer.usage, self._model, self._id)
        for index, reply in enumerate(answer.replies):
            pieces = list(_pieces(reply, self._request))
            for place, part in enumerate(pieces, 1):
                ending = _ending(self._request, answer, index) if place == len(pieces) else {}
                yield self._write({"candidates": [_candidate(index, [part], ending)], **tail})
        if not self._events:
            yield b"]"

    def error(self, error: ApiError) -> bytes:
        return self._write(error_body(error)) + (b"" if self._events else b"]")

    def _write(self, value: dict[str, Any]) -> bytes:
        if self._events:
            return wire.event(value)
        separator, self._begun = (b",\r\n" if self._begun else b""), True
        return separator + wire.dump(value)


def error_body(error: ApiError) -> dict[str, Any]:
    code, status = _ERRORS[error.kind]
    message = error.message
    if error.kind is ErrorKind.CONTEXT_LENGTH:
        # Clients recognise this wording.
        message = f"The input token count exceeds the maximum number of tokens allowed. {message}"
    elif error.param and error.param not in message:
        message = f"{error.param}: {message}"
    body: dict[str, Any] = {"code": code, "message": message, "status": status}
    if details := _details(error):
        body["details"] = [details]
    return {"error": body}


def _details(error: ApiError) -> dict[str, Any]:
    """What clients act on: the invalid field, how long to wait, or that retrying does not help."""
    if error.kind is ErrorKind.BAD_REQUEST and error.param:
        violation = {"field": error.param, "description": error.message}
        return {"@type": f"{_DETAIL}BadRequest", "fieldViolations": [violation]}
    if error.kind is ErrorKind.QUOTA:
        # Gemini CLI retries on every quota except a daily one.
        violation = {"subject": "session", "quotaId": "SessionLimitPerDay", "description": error.message}
        return {"@type": f"{_DETAIL}QuotaFailure", "violations": [violation]}
    if error.kind in (ErrorKind.RATE_LIMIT, ErrorKind.OVERLOADED):
        return {"@type": f"{_DETAIL}RetryInfo", "retryDelay": f"{wire.retry_seconds(error):g}s"}
    if error.kind is ErrorKind.UNAUTHORISED:
        return {"@type": f"{_DETAIL}ErrorInfo", "reason": "API_KEY_INVALID", "domain": "googleapis.com"}
    return {}


def error_response(error: ApiError) -> Response:
    headers = dict(JSON_HEADERS)
    if error.kind in (ErrorKind.RATE_LIMIT, ErrorKind.OVERLOADED):
        headers["retry-after"] = str(ceil(wire.retry_seconds(error)))
    return wire.json_response(error_body(error), _ERRORS[error.kind][0], headers)


def models_response(names: Sequence[str]) -> Response:
    return wire.json_response({"models": [_model(name) for name in names]}, headers=JSON_HEADERS)


def model_response(name: str) -> Response:
    return wire.json_response(_model(name), headers=JSON_HEADERS)


def _model(name: str) -> dict[str, Any]:
    return {"name": f"models/{name}", "displayName": name, "version": "1", "supportedGenerationMethods": _METHODS}


def _candidate(index: int, parts: list[dict[str, Any]], ending: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"parts": parts, "role": "model"}, **ending, "index": index}


def _ending(request: Request, answer: Answer, index: int) -> dict[str, Any]:
    """Fields of the last part of a candidate only."""
    ending: dict[str, Any] = {"finishReason": _FINISH[answer.replies[index].finish]}
    if answer.logprobs is None or not request.wire.get("logprobs"):
        return ending
    # The comparison is also false for NaN, which JSON cannot express either.
    tokens = [
        (token.text, token.logprob if token.logprob > _LEAST_LOGPROB else _LEAST_LOGPROB)
        for token in answer.logprobs(index)
    ]
    if tokens:
        ending["avgLogprobs"] = sum(logprob for _, logprob in tokens) / len(tokens)
    chosen = [{"token": text, "logProbability": logprob} for text, logprob in tokens]
    return {**ending, "logprobsResult": {"chosenCandidates": chosen}}


def _parts(reply: Reply, request: Request) -> Iterator[dict[str, Any]]:
    """The parts of a reply; at least one."""
    signature = {"thoughtSignature": seal(reply.reasoning)} if reply.reasoning else {}
    if reply.reasoning and request.wire.get("thoughts"):
        yield {"text": reply.reasoning, "thought": True}
    if reply.text or not reply.tool_calls:
        yield {"text": reply.text, **signature}
        signature = {}
    for call in reply.tool_calls:
        arguments = {TEXT_ARGUMENTS: call.arguments} if isinstance(call.arguments, str) else call.arguments
        yield {"functionCall": {"id": call.id, "name": call.name, "args": arguments}, **signature}
        signature = {}


def _pieces(reply: Reply, request: Request) -> Iterator[dict[str, Any]]:
    """The parts, with long texts split into chunks."""
    for part in _parts(reply, request):
        text = part.get("text")
        if not text:
            yield part
            continue
        signature = part.pop("thoughtSignature", None)
        for place, piece in enumerate(wire.pieces(text)):
            signed = {"thoughtSignature": signature} if signature and not place else {}
            yield {**part, "text": piece, **signed}


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
