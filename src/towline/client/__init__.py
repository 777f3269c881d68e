"""The client of the service: submit tasks, lease results with their tokens, acknowledge them, update the policy.

`Client` blocks and can be shared by threads; `AsyncClient` is the same for asyncio. Every call is idempotent, and is
retried with growing pauses while the service is down or full. Only `common`, `errors` and
`schema` of Towline are imported here.
"""

from towline.client.async_client import AsyncClient
from towline.client.calls import Fetched
from towline.client.errors import (
    BadAnswer,
    Busy,
    ClientError,
    Conflict,
    InvalidRequest,
    NotAllowed,
    NotFound,
    ServiceError,
    Unreachable,
    WaitTimeout,
)
from towline.client.results import Delivered, Row
from towline.client.sync_client import Client

__all__ = [
    "AsyncClient",
    "BadAnswer",
    "Busy",
    "Client",
    "ClientError",
    "Conflict",
    "Delivered",
    "Fetched",
    "InvalidRequest",
    "NotAllowed",
    "NotFound",
    "Row",
    "ServiceError",
    "Unreachable",
    "WaitTimeout",
]
