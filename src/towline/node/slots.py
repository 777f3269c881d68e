"""Worker slots of a stage: so many sessions at a time, the most urgent of those that wait first."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator


class Slots:
    """Like a semaphore whose queue is ordered by priority, then by arrival."""

    def __init__(self, count: int):
        self.count = count
        self.taken = 0
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @property
    def waiting(self) -> int:
        return sum(not future.done() for _, _, future in self._queue)

    @contextlib.asynccontextmanager
    async def take(self, priority: int = 0) -> AsyncIterator[None]:
        """Hold a slot for the length of the block; a higher priority comes earlier."""
        await self.acquire(priority)
        try:
            yield
        finally:
            self.release()

    async def acquire(self, priority: int = 0) -> None:
        if self.taken < self.count and not self.waiting:
            self.taken += 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (-priority, next(self._order), future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                # The slot was handed over in the same moment: somebody else gets it.
                self.release()
            raise

    def release(self) -> None:
        """Give the slot to the first who waits, or back."""
        while self._queue:
            _, _, future = heapq.heappop(self._queue)
            if not future.done():
                future.set_result(None)
                return
        self.taken -= 1
