"""Errors of the API: a `RequestError` goes to the caller with status and field."""

from __future__ import annotations

from towline.errors import TowlineError


class RequestError(TowlineError):
    """A rejected request. Its text is for the caller."""

    status = 400

    def __init__(self, message: str, *, field: str | None = None, retry_after: float | None = None):
        super().__init__(message)
        self.field = field
        """Path of the field at fault, if there is one."""
        self.retry_after = retry_after
        """Seconds after which a retry can help."""


class InvalidInput(RequestError):
    """A value that is not allowed."""

    status = 422


class Unauthorized(RequestError):
    """The API key is missing or unknown."""

    status = 401


class Forbidden(RequestError):
    """The role of the key does not cover the request."""

    status = 403


class ResourceNotFound(RequestError):
    """No such task, session, trajectory, log or key."""

    status = 404


class ResourceConflict(RequestError):
    """The request contradicts stored state."""

    status = 409


class BodyTooLarge(RequestError):
    """The body has more bytes than its path takes."""

    status = 413


class TooManyGuesses(RequestError):
    """The client's address sent too many unknown keys; waiting helps."""

    status = 429


class TooManyRequests(RequestError):
    """The tenant sends more requests than it may; waiting helps."""

    status = 429


class QueueFull(RequestError):
    """The queue has no room; retrying later helps."""

    status = 429


class Unavailable(RequestError):
    """The database or the engine is down; retrying later helps."""

    status = 503
