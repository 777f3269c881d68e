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
        self._free: deque[int] = deque(range(count))
        """The one that was left longest ago first."""
        self._held: list[Ids] = [_NONE] * count
        """What each slot's cache holds, as far as is known here."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def running(self) -> int:
        return len(self._held) - len(self._free)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def keep(self, slot: int, ids: Ids) -> None:
        self._held[slot] = ids

    def forget(self) -> None:
        """The caches are gone: the weights are others."""
        self._held = [_NONE] * len(self._held)

    @contextlib.asynccontextmanager
    async def taken(self, prompt: Ids) -> AsyncIterator[int]:
        """A slot for one turn."""
        await self._turn()
        slot = max(self._free, key=lambda one: _shared(self._held[one], prompt))
        self._free.remove(slot)
        if self._free:
            self._wake()
        try:
            yield slot
        finally:
            self._free.append(slot)
            self._wake()

    async def _turn(self) -> None:
        """Return once a slot is free and nobody waits before."""
        if self._free and not self._waiting:
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._wake()
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(mine)

    def _wake(self) -> None:
        for one in self._waiting:
            if not one.done():
                one.set_result(None)
                return


def _shared(held: Ids, prompt: Ids) -> int:
    """How many leading ids are the same."""
    length = min(len(held), len(prompt))
    differ = np.flatnonzero(held[:length] != prompt[:length])
    return int(differ[0]) if len(differ) else length
