"""The pacing of one server: builds the gate of each claim, and keeps the figures that say what pacing costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.schema import ConsumerPace, Pacing
from towline.server import paced, tables
from towline.server.bias import Bias
from towline.server.gate import PaceGate
from towline.server.store import Store

STARVED = 30.0
"""Seconds that a consumer waits with nothing on its way to it before its pace gives way by one group."""
_GAP = 5.0
"""Seconds between two calls of a consumer that is still waiting."""


@dataclass(slots=True)
class _Asking:
    since: float
    latest: float
    calls: int = 0
    """Under way at this moment."""


class Pacer:
    def __init__(self, store: Store, lapse: float, *, clock: Callable[[], float] = time.monotonic):
        self.store = store
        self.lapse = lapse
        self.clock = clock
        self.bias = Bias()
        self.active = False
        """Some consumer has declared a pace."""
        self.idle_seconds = 0.0
        """Slot seconds in which the runner had room and sessions waited, and pacing held them."""
        self.withheld_seconds: dict[str, float] = {}
        """Seconds that a consumer waited while finished groups were withheld for older ones."""
        self._asking: dict[str, _Asking] = {}
        self._barren: set[frozenset[str]] = set()
        self._idle = (0, clock())

    async def restore(self) -> None:
        table = tables.consumers
        async with self.store.read() as tx:
            query = select(func.count()).select_from(table).where(table.c.groups_per_update.is_not(None))
            self.active = bool(await tx.scalar(query))

    # Admission

    async def gate(self, tx: AsyncConnection, version: int) -> PaceGate | None:
        """The gate for one claim; `None` if nobody paces."""
        if not self.active:
            return None
        consumers, started = await self._consumers(tx, version)
        return PaceGate(consumers, started, self._starved(), self._barren) if consumers else None

    def submitted(self) -> None:
        """Tasks came that may be started."""
        # A claim that looked before they came keeps its own set.
        self._barren = set()

    async def _consumers(self, tx: AsyncConnection, version: int) -> tuple[list[paced.PacedConsumer], list[str]]:
        """The consumers that pace, and the tasks that were started."""
        rows = await paced.paced_rows(tx, time.time(), self.lapse)
        started = await paced.running(tx) if rows else []
        found = [await paced.paced_consumer(tx, row, started, version) for row in rows]
        return found, [task.task_id for task in started]

    def idle(self, slots: int) -> None:
        """So many slots are empty from now on because of pacing."""
        now = self.clock()
        before, since = self._idle
        self.idle_seconds += before * (now - since)
        self._idle = (slots, now)

    # Consumers that wait

    def asks(self, consumer: str) -> None:
        now = self.clock()
        asking = self._asking.get(consumer)
        if asking is None or (not asking.calls and now - asking.latest > _GAP):
            asking = self._asking[consumer] = _Asking(now, now)
        asking.calls += 1

    def answered(self, consumer: str, results: int) -> None:
        """The call is over."""
        asking = self._asking[consumer]
        asking.calls -= 1
        asking.latest = self.clock()
        if results:
            asking.since = asking.latest

    def withheld(self, consumer: str, seconds: float) -> None:
        self.withheld_seconds[consumer] = self.withheld_seconds.get(consumer, 0.0) + seconds

    def _starved(self) -> set[str]:
        now = self.clock()
        return {
            name
            for name, one in self._asking.items()
            if now - one.since >= STARVED and (one.calls or now - one.latest <= _GAP)
        }

    # For people

    async def status(self, version: int) -> Pacing:
        self.idle(self._idle[0])
        async with self.store.write() as tx:
            found, _ = await self._consumers(tx, version) if self.active else ([], [])
        others = sorted(set(self.bias.consumers) - {one.name for one in found})
        return Pacing(
            idle_slot_seconds=self.idle_seconds,
            consumers=[ConsumerPace(consumer=name, quartiles=self.bias.quartiles(name)) for name in others]
            + [
                ConsumerPace(
                    consumer=one.name,
                    groups_per_update=one.groups_per_update,
                    max_staleness=one.max_staleness,
                    used=one.used,
                    in_hand=one.in_hand,
                    running=one.running,
                    finished=one.finished,
                    admissible=one.admissible,
                    withheld_seconds=self.withheld_seconds.get(one.name, 0.0),
                    quartiles=self.bias.quartiles(one.name),
                )
                for one in found
            ],
        )
