"""Which slot of the server a turn goes to.

A slot is a place for one turn at a time, with a key-value cache of its own that stays when the turn is over. A turn goes
to the free slot that shares the longest prefix with it; of equals, to the one that was left longest ago, so that an
unfinished conversation stays cached as long as it can. Turns that find no slot wait in the order in which they came.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

import numpy as np

from towline.arrays import Ids

_NONE: Ids = np.empty(0, np.int32)


class Slots:
    def __init__(self, count: int):
        self._room = asyncio.Semaphore(count)
        self._free: deque[int] = deque(range(count))
        """The one that was left longest ago first."""
        self._held: list[Ids] = [_NONE] * count
        """What each slot's cache holds, as far as is known here."""
        self.waiting = 0

    @property
    def running(self) -> int:
        return len(self._held) - len(self._free)

    def keep(self, slot: int, ids: Ids) -> None:
        self._held[slot] = ids

    def forget(self) -> None:
        """The caches are gone: the weights are others."""
        self._held = [_NONE] * len(self._held)

    @contextlib.asynccontextmanager
    async def taken(self, prompt: Ids) -> AsyncIterator[int]:
        """A slot for one turn."""
        self.waiting += 1
        try:
            await self._room.acquire()
        finally:
            self.waiting -= 1
        slot = max(self._free, key=lambda one: _shared(self._held[one], prompt))
        self._free.remove(slot)
        try:
            yield slot
        finally:
            self._free.append(slot)
            self._room.release()


def _shared(held: Ids, prompt: Ids) -> int:
    """How many leading ids are the same."""
    length = min(len(held), len(prompt))
    differ = np.flatnonzero(held[:length] != prompt[:length])
    return int(differ[0]) if len(differ) else length
