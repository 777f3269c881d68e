"""What a client of the service is told: a status, the reason, and the field at fault."""

from __future__ import annotations

from towline.errors import TowlineError


class ServiceError(TowlineError):
    """A call that is refused. Its text is for the caller."""

    status = 400

    def __init__(self, message: str, *, field: str | None = None, retry_after: float | None = None):
        super().__init__(message)
        self.field = field
        self.retry_after = retry_after


class Invalid(ServiceError):
    status = 422


class Unauthorised(ServiceError):
    status = 401


class Forbidden(ServiceError):
    status = 403


class NotFound(ServiceError):
    status = 404


class Conflict(ServiceError):
    status = 409


class TooLarge(ServiceError):
    status = 413


class Full(ServiceError):
    """The queue has no room; trying again later helps."""

    status = 429


class Unavailable(ServiceError):
    """The database or the engine is away; trying again later helps."""

    status = 503


class StoreError(TowlineError):
    """The store cannot be opened or does not hold what it should; the operator decides."""


class Damaged(StoreError):
    """A segment that is not what its row says."""
