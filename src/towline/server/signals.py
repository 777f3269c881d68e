"""Telling those who wait that something happened, without remembering who they are."""

from __future__ import annotations

import asyncio


class Signal:
    """Wakes everybody who waits at the moment it is given; whoever comes later waits for the next."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None
        self.count = 0
        """How often it was given."""

    def give(self) -> None:
        self.count += 1
        future, self._future = self._future, None
        if future is not None and not future.done():
            future.set_result(None)

    async def wait(self, since: int, seconds: float | None = None) -> None:
        """Until it was given after `count` was `since`, or the seconds are over."""
        if self.count != since:
            return
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
        await asyncio.wait((self._future,), timeout=seconds)
