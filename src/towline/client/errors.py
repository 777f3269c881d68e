"""Errors of the client: which type says who can act on it."""

from __future__ import annotations

from towline.errors import TowlineError


class ClientError(TowlineError):
    """Base of every error of the client."""


class Unreachable(ClientError):
    """The service did not respond within the client's patience."""


class WaitTimeout(ClientError):
    """A wait timed out. What was waited for may still happen."""


class BadAnswer(ClientError):
    """The response violates the contract: another server, or another version of this one."""


class ServiceError(ClientError):
    """The service rejected a call."""

    def __init__(self, message: str, *, status: int, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field and not message.startswith(field) else message)
        self.status = status
        self.field = field
        """Path of the field at fault, if there is one."""


class InvalidRequest(ServiceError):
    """The request is invalid; `field` says where."""


class NotAllowed(ServiceError):
    """The API key is missing or unknown, or its role does not cover the call."""


class NotFound(ServiceError):
    """No such task, session or trajectory."""


class Conflict(ServiceError):
    """The call contradicts stored state, such as another task under the same id."""


class Busy(ServiceError):
    """The service was full or down for longer than the client's patience."""


_KINDS: dict[int, type[ServiceError]] = {
    400: InvalidRequest,
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    409: Conflict,
    410: NotFound,
    413: InvalidRequest,
    422: InvalidRequest,
    429: Busy,
    503: Busy,
}


def refusal(status: int, message: str, field: str | None) -> ServiceError:
    return _KINDS.get(status, ServiceError)(message, status=status, field=field)
