"""A budget of seconds that stands still while an engine is on hold."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable


class Budget:
    """Charges time from its making on, except while it is held. Holds nest."""

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
        """Time that was not charged."""
        return self._held + (self._clock() - self._held_since if self.on_hold else 0.0)

    @property
    def spent(self) -> float:
        return self._clock() - self._began - self.held_seconds

    @property
    def left(self) -> float:
        return self.seconds - self.spent

    def hold(self, held: bool = True) -> None:
        """Stop the clock, or with `False` take back one hold."""
        if held:
            if not self.on_hold:
                self._held_since = self._clock()
                self._running.clear()
            self._holds += 1
            return
        if not self.on_hold:
            raise ValueError("the budget is not held")
        self._holds -= 1
        if not self.on_hold:
            self._held += self._clock() - self._held_since
            self._running.set()

    async def used_up(self) -> None:
        """Return when nothing is left."""
        while True:
            await self._running.wait()
            left = self.left
            if left <= 0:
                return
            # A hold in the meantime shows when the time is over: then something is left.
            await self._sleep(min(left, _LONGEST))


_LONGEST = 3600.0
"""An event loop cannot sleep for ever."""
