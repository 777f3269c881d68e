"""What can go wrong between a client and the service, typed by who can do something about it."""

from __future__ import annotations

from towline.errors import TowlineError


class ClientError(TowlineError):
    """Base of every error of the client."""


class Unreachable(ClientError):
    """The service did not answer for as long as the client was patient."""


class WaitTimeout(ClientError):
    """What was waited for did not happen in time. It may still."""


class BadAnswer(ClientError):
    """Something answered, but not in the words of the contract: another server, or another version of this one."""


class ServiceError(ClientError):
    """The service refused a call."""

    def __init__(self, message: str, *, status: int, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field and not message.startswith(field) else message)
        self.status = status
        self.field = field
        """Path of the field at fault, if one is."""


class InvalidRequest(ServiceError):
    """The call itself is wrong; `field` says where."""


class NotAllowed(ServiceError):
    """The key is missing or unknown, or its role does not cover the call."""


class NotFound(ServiceError):
    """No such task, session or trajectory."""


class Conflict(ServiceError):
    """The call contradicts what is there: another task under the same id, for one."""


class Busy(ServiceError):
    """The service was full, or not ready, for as long as the client was patient."""


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
