"""The runner's circuit breakers, as the service shows them: an event whenever one opens or closes.

While a breaker is open that every session needs, nothing is claimed from the queue. The runner closes it by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection

from towline.schema import BreakerStatus
from towline.server.rows import one_line
from towline.server.runner import Runner
from towline.server.signals import Signal
from towline.server.store import Store, add_events

log = logging.getLogger("towline.server")


class Breakers:
    def __init__(self, store: Store, runner: Runner, work: Signal, events: Signal):
        self.store = store
        self.runner = runner
        self._work = work
        self._events = events
        self._changes: asyncio.Queue[BreakerStatus] = asyncio.Queue()
        self._held = ""
        self._known: dict[str, bool] = {}
        runner.watch_breakers(self._changed)

    @property
    def open(self) -> list[BreakerStatus]:
        return [one for one in self.runner.breakers if one.open]

    def holding(self) -> str:
        """Why nothing is claimed from the queue; empty while something is."""
        return "; ".join(_said(one) for one in self.open if self.runner.needs(one.component))

    def degraded(self) -> list[str]:
        """Open breakers that only some sessions wait for."""
        return [_said(one) for one in self.open if not self.runner.needs(one.component)]

    def _changed(self, status: BreakerStatus) -> None:
        # A breaker also tells of probes that found nothing new.
        if self._known.get(status.component, False) == status.open:
            return
        self._known[status.component] = status.open
        held = self.holding()
        if held and not self._held:
            log.error("the queue is held until this works again: %s", held)
        elif self._held and not held:
            log.warning("the queue is no longer held")
        self._held = held
        self._changes.put_nowait(status)
        self._work.give()

    async def run(self) -> None:
        """Write the changes as events."""
        while True:
            status = await self._changes.get()
            await self.store.insist(partial(_write, status=status), what="a circuit breaker")
            self._events.give()


async def _write(tx: AsyncConnection, *, status: BreakerStatus) -> None:
    await add_events(tx, [("breaker", status.model_dump(mode="json"))], time.time())


def _said(status: BreakerStatus) -> str:
    return f"{status.component}: {one_line(status.reason) or 'not usable'}"
