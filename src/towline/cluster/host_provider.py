"""`HostProvider`: where node hosts come from. Child processes and Ray are providers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from towline.cluster.remote_node import HostAddress


class HostProvider(Protocol):
    """Starts node hosts and watches them."""

    async def start(self, up: Callable[[HostAddress], None], down: Callable[[str, str], None]) -> None:
        """Call `up` for every host that listens, now or later, and `down` with the reason when one has died."""
        ...

    def replace(self, name: str, reason: str) -> None:
        """End a host that does not respond or cannot work; a new one may come up under the same name."""
        ...

    def report_demand(self, waiting: int) -> None:
        """Tell how many sessions wait for room, for providers that can start more hosts."""
        ...

    async def close(self) -> None:
        """End the hosts that end with the server."""
        ...
