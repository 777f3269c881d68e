"""What a trainer imports: submit tasks, lease results with their tokens, acknowledge them, change the policy.

`Client` blocks and may be shared by threads; `AsyncClient` is the same for asyncio. Every call is safe to repeat, and is
repeated, with growing pauses, while the service is away or full. Nothing here imports the rest of Towline.
"""

from towline.client.asynchronous import AsyncClient
from towline.client.blocking import Client
from towline.client.calls import Fetched
from towline.client.delivered import Delivered, Row
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
