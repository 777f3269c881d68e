"""Grace periods: stops the remaining samples of groups when their deadlines are due.

Deadlines are columns of tasks (`grace_until`), so the next server honours those of an earlier one. Nothing is polled: the
loop sleeps until the next deadline, or until a grace period begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.server.events import Signal
from towline.server.scheduling.end_sessions import Effects, EndSessions
from towline.server.store import tables
from towline.server.store.database import Store

log = logging.getLogger("towline.server")
_LONGEST_SLEEP = 60.0
"""The clock of the machine may be set."""
_PAUSE = 5.0
"""Seconds before another try after an unexpected error."""


class GracePeriods:
    """Stops groups at the end of their grace periods."""

    def __init__(self, store: Store, began: Signal, apply: Callable[[Effects], None]):
        """`began` is notified when a grace period begins; `apply` acts on what a committed transaction requires."""
        self.store = store
        self._began = began
        self._apply = apply

    async def stop_due(self) -> float | None:
        """Stop every group whose deadline has passed; returns the next deadline."""
        while True:
            effects, following = await self.store.write_with_retry(self._stop_due, what="the end of a grace period")
            self._apply(effects)
            if following is None or following > self.store.clock.now():
                return following

    async def _stop_due(self, tx: AsyncConnection) -> tuple[Effects, float | None]:
        effects = await EndSessions(self.store, tx, self.store.clock.now()).stop_due()
        following = await tx.scalar(select(func.min(tables.tasks.c.grace_until)))
        # A damaged row may hold a value of another type.
        return effects, following if isinstance(following, float) else None

    async def run(self) -> None:
        while True:
            count = self._began.count
            try:
                following = await self.stop_due()
            except Exception:
                log.exception("groups could not be stopped at the end of their grace periods; trying again")
                await asyncio.sleep(_PAUSE)
                continue
            left = None if following is None else min(_LONGEST_SLEEP, max(0.0, following - self.store.clock.now()))
            await self._began.wait(count, left)
