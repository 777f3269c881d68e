"""OpenAI's errors and its list of models: the same in chat completions and in responses.

Status, type and code are what OpenAI's own clients act on: they retry 429 and 5xx unless `x-should-retry` says no, and
harnesses compact their history when they read `context_length_exceeded`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

from towline.dialects.base import Response
from towline.dialects.sse import dump
from towline.errors import ApiError, ErrorKind

JSON_HEADERS = {"content-type": "application/json"}
_DEFAULT_WAIT = 1.0
"""Seconds that a client waits where the error does not say."""

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
"""Status, type and code of each kind."""


def error_body(error: ApiError) -> dict[str, Any]:
    """What stands under `error`, in a response and in a stream."""
    _, kind, code = _SHAPES[error.kind]
    param = error.param
    if error.kind is ErrorKind.NOT_FOUND and param == "model":
        code = "model_not_found"
    if error.kind is ErrorKind.CONTEXT_LENGTH and param is None:
        param = "messages"
    return {"message": error.message, "type": kind, "param": param, "code": code}


def error_response(error: ApiError) -> Response:
    headers = dict(JSON_HEADERS)
    if error.kind is ErrorKind.QUOTA:
        headers["x-should-retry"] = "false"
    elif error.kind in (ErrorKind.RATE_LIMIT, ErrorKind.OVERLOADED):
        wait = _DEFAULT_WAIT if error.retry_after is None else max(0.0, error.retry_after)
        headers["retry-after"] = str(ceil(wait))
        headers["retry-after-ms"] = str(ceil(wait * 1000))
    return Response(_SHAPES[error.kind][0], dump({"error": error_body(error)}), headers)


def model_response(name: str, created: int) -> Response:
    return Response(200, dump(_model(name, created)), dict(JSON_HEADERS))


def models_response(names: Sequence[str], created: int) -> Response:
    body = {"object": "list", "data": [_model(name, created) for name in names]}
    return Response(200, dump(body), dict(JSON_HEADERS))


def _model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "towline"}
