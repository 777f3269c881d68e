"""Progress written to the store while sessions run: stages in batches, circuit breakers as events.

Stages are written a few times per second rather than one by one; the end of a session has its own transaction. While a
breaker is open that every session needs, nothing is claimed from the queue. The runner closes it by itself.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection

from towline.cluster.runner import Runner
from towline.schema import BreakerStatus, Session, SessionState
from towline.server.events import Signal
from towline.server.scheduling import queue
from towline.server.scheduling.ending import log_text
from towline.server.store.database import Store
from towline.server.store.tables import SERVICE, NewEvent, add_events

_WRITE_SECONDS = 0.1
"""Between two batches of stages."""


class StageWriter:
    """Writes the stages that sessions reach, in batches."""

    def __init__(self, store: Store, happened: Signal):
        self.store = store
        self.happened = happened
        self._steps: dict[str, list[Session]] = {}
        """Stages that are not written yet, by session."""
        self.reached: dict[str, Session] = {}
        """Active sessions as they were when they reached their last stage."""
        self._writing = asyncio.Lock()
        self._any = asyncio.Event()
        """Set while there may be unwritten stages."""

    def changed(self, session: Session) -> None:
        """Record that a session reached a stage."""
        if not session.state.terminal and session.state is not SessionState.QUEUED:
            self._steps.setdefault(session.session_id, []).append(session)
            self.reached[session.session_id] = session
            self._any.set()

    def last(self, session_id: str) -> SessionState:
        return self.reached[session_id].state if session_id in self.reached else SessionState.QUEUED

    async def take(self, session_id: str) -> list[NewEvent]:
        """Remove and return the events of the session's unwritten stages; the end of the session writes them."""
        # Stages that are being written at this moment come before the end.
        async with self._writing:
            steps = self._steps.pop(session_id, [])
        return [queue.step_event(step) for step in steps]

    def forget(self, session_id: str) -> None:
        self._steps.pop(session_id, None)
        self.reached.pop(session_id, None)

    async def run(self) -> None:
        while True:
            await self._any.wait()
            await asyncio.sleep(_WRITE_SECONDS)
            self._any.clear()
            if not self._steps:
                continue
            async with self._writing:
                steps = [step for session in self._steps.values() for step in session]
                self._steps.clear()
                if steps:
                    await self.store.write_with_retry(partial(self._write, steps=steps), what="session stages")
            self.happened.notify()

    async def _write(self, tx: AsyncConnection, *, steps: list[Session]) -> None:
        await queue.write_steps(tx, steps, self.store.epoch, self.store.clock.now())


log = logging.getLogger("towline.server")


class BreakerMonitor:
    """Watches the runner's circuit breakers: holds the queue, and writes an event whenever one opens or closes."""

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
        """Why the queue is held; empty if it is not."""
        return "; ".join(_describe(one) for one in self.open if self.runner.needs(one.component))

    def degraded(self) -> list[str]:
        """Open breakers that only some sessions need."""
        return [_describe(one) for one in self.open if not self.runner.needs(one.component)]

    def _changed(self, status: BreakerStatus) -> None:
        # A breaker also reports probes that changed nothing.
        if self._known.get(status.component, False) == status.open:
            return
        self._known[status.component] = status.open
        held = self.holding()
        if held and not self._held:
            log.error("the queue is held until this works again: %s", held)
        elif self._held and not held:
            log.warning("the queue is released")
        self._held = held
        self._changes.put_nowait(status)
        self._work.notify()

    async def run(self) -> None:
        """Write changes of breakers as events."""
        while True:
            status = await self._changes.get()
            await self.store.write_with_retry(
                partial(_write_breaker, status=status, at=self.store.clock.now()), what="a circuit breaker"
            )
            self._events.notify()


async def _write_breaker(tx: AsyncConnection, *, status: BreakerStatus, at: float) -> None:
    await add_events(tx, [(SERVICE, "breaker", status.model_dump(mode="json"))], at)


def _describe(status: BreakerStatus) -> str:
    return f"{status.component}: {log_text(status.reason) or 'down'}"
