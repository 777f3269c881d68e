"""A time budget that can be put on hold, for example while an engine is paused."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable


class Budget:
    """A budget of seconds that runs from its creation, except while it is on hold. Holds nest."""

    def __init__(
        self,
        seconds: float = math.inf,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self.seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._began = clock()
        self._holds = 0
        self._held_since = 0.0
        self._held = 0.0
        self._running = asyncio.Event()
        self._running.set()

    @property
    def on_hold(self) -> bool:
        return self._holds > 0

    @property
    def held_seconds(self) -> float:
        """Time on hold, which is not charged."""
        return self._held + (self._clock() - self._held_since if self.on_hold else 0.0)

    @property
    def spent(self) -> float:
        return self._clock() - self._began - self.held_seconds

    @property
    def left(self) -> float:
        return self.seconds - self.spent

    def hold(self, held: bool = True) -> None:
        """Put the budget on hold, or with `False` release one hold."""
        if held:
            if not self.on_hold:
                self._held_since = self._clock()
                self._running.clear()
            self._holds += 1
            return
        if not self.on_hold:
            raise ValueError("the budget is not on hold")
        self._holds -= 1
        if not self.on_hold:
            self._held += self._clock() - self._held_since
            self._running.set()

    async def used_up(self) -> None:
        """Wait until the budget is used up."""
        while True:
            await self._running.wait()
            left = self.left
            if left <= 0:
                return
            # After a hold in the meantime some time is left.
            await self._sleep(min(left, _LONGEST))


_LONGEST = 3600.0
"""Longest single sleep of the event loop."""
