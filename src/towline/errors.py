"""Errors that reach a person or a client, typed by what went wrong.

`ApiError` is what a harness sees: a dialect writes it in its provider's own shape. Everything else is for the operator.
"""

from __future__ import annotations

from enum import StrEnum


class TowlineError(Exception):
    """Base of every error that Towline raises on purpose."""

    failure = "internal"
    """The `FailureReason` of a session that fails on it."""


class ErrorKind(StrEnum):
    """What went wrong with a call, in neutral words; each dialect maps it to its own status and code."""

    BAD_REQUEST = "bad_request"
    UNAUTHORISED = "unauthorised"
    NOT_FOUND = "not_found"
    METHOD = "method_not_allowed"
    TOO_LARGE = "too_large"
    CONTEXT_LENGTH = "context_length"
    """The prompt does not fit the context, or the session's context limit."""
    QUOTA = "quota"
    """A limit of the session is used up (turns, sampled tokens, wall clock). Retrying does not help."""
    RATE_LIMIT = "rate_limit"
    OVERLOADED = "overloaded"
    """The engine is away or full. Retrying helps."""
    INTERNAL = "internal"


STATUS: dict[ErrorKind, int] = {
    ErrorKind.BAD_REQUEST: 400,
    ErrorKind.UNAUTHORISED: 401,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.METHOD: 405,
    ErrorKind.TOO_LARGE: 413,
    ErrorKind.CONTEXT_LENGTH: 400,
    ErrorKind.QUOTA: 429,
    ErrorKind.RATE_LIMIT: 429,
    ErrorKind.OVERLOADED: 503,
    ErrorKind.INTERNAL: 500,
}
"""Statuses where a dialect has none of its own."""


class ApiError(TowlineError):
    """A call that cannot be answered, with the reason for the client."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        capability: str = "",
    ):
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        """The field at fault, in the client's own path notation (`messages[3].content`)."""
        self.retry_after = retry_after
        self.capability = capability
        """What the model cannot do, in one word, if that is what is wrong and clients have a word for it."""


class BadRequest(ApiError):
    """The body is not what the dialect allows."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(ErrorKind.BAD_REQUEST, message, param=param)


class ConfigError(TowlineError):
    """A setting, file or folder that cannot be used, with what to do about it."""

    failure = "config"


class EngineError(TowlineError):
    """The engine failed or broke its contract."""

    failure = "engine"


class FidelityError(TowlineError):
    """The exactness invariant does not hold. Never caught and never downgraded to a warning."""
