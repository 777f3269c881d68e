"""`EndWriter`: writes how sessions ended: first the runner stores the trajectory, then one transaction names it.

Ends that arrive together share a transaction. While the database or the trajectory storage is down, ends wait; none is
dropped. A node that does not answer delays the ends of its own sessions only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection

from towline.cluster.runner import NodeLost, Runner, Stored, StoreRequest
from towline.cluster.segments import SegmentSlice
from towline.common.crashpoints import crash_point
from towline.schema import FailureReason, SessionState
from towline.server.scheduling import queue
from towline.server.scheduling.end_sessions import Effects, EndSessions
from towline.server.scheduling.ending import SessionEnd
from towline.server.store.database import Outage, Store, is_transient
from towline.server.store.tables import chunks

log = logging.getLogger("towline.server")
_BATCH = 64
"""Maximum number of ends in one transaction."""


@dataclass(slots=True)
class _PendingEnd:
    """The end of a session that is not written yet."""

    ending: SessionEnd
    written: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class EndWriter:
    """Writes ends in batches. `apply` acts on what a committed transaction requires."""

    def __init__(self, store: Store, runner: Runner, apply: Callable[[Effects], None], *, quarantine_deaths: int):
        self.store = store
        self.runner = runner
        self._apply = apply
        self._quarantine_deaths = quarantine_deaths
        self._unwritable = Outage("the trajectory storage")
        self._ends: asyncio.Queue[_PendingEnd] = asyncio.Queue()

    async def write(self, ending: SessionEnd, request: StoreRequest | None) -> None:
        """Store the trajectory, if there is one, and write the end; returns when both are durable."""
        if request is not None:
            await self._store(ending, request)
        end = _PendingEnd(ending)
        await self._ends.put(end)
        await end.written

    async def run(self) -> None:
        while True:
            batch = [await self._ends.get()]
            while len(batch) < _BATCH and not self._ends.empty():
                batch.append(self._ends.get_nowait())
            try:
                await self._write([end.ending for end in batch])
            except Exception:
                log.exception("the ends of %d sessions could not be written together; writing one by one", len(batch))
                await self._one_by_one(batch)
            for end in batch:
                if not end.written.done():
                    end.written.set_result(None)

    async def _one_by_one(self, batch: list[_PendingEnd]) -> None:
        for end in batch:
            try:
                await self._write([end.ending])
            except Exception as error:
                # The session stays active in the store; the next server ends it as LOST and retries it.
                end.written.set_exception(error)

    # Recovery

    async def write_lost(self, endings: list[SessionEnd], request: StoreRequest | None = None) -> None:
        """Write the ends of lost sessions. One with damaged rows is ended separately and does not stop the start."""
        for ending in endings:
            if request is not None:
                await self._store(ending, request)
        for some in chunks(endings):
            await self._write_tolerantly(list(some))

    async def _write_tolerantly(self, endings: list[SessionEnd]) -> None:
        try:
            await self._write(endings)
        except Exception as error:
            if is_transient(error):
                raise
            if len(endings) > 1:
                for ending in endings:
                    await self._write_tolerantly([ending])
                return
            session_id = endings[0].session_id
            log.error("damaged: rows of session %s: %s: %s", session_id, type(error).__name__, error)
            await self.store.write_with_retry(
                partial(queue.set_aside, session_ids=[session_id]), what="a damaged session"
            )

    # Trajectories

    async def _store(self, ending: SessionEnd, request: StoreRequest) -> None:
        piece = await self._stored(request)
        if isinstance(piece, SegmentSlice):
            ending.piece = piece
        elif isinstance(piece, NodeLost):
            # It had ended before its node died, so it is not a suspect of the death.
            ending.state, ending.failure, ending.error = SessionState.LOST, FailureReason.NODE, str(piece)
            ending.usable, ending.reward, ending.reward_status = False, None, None
        else:
            ending.state, ending.usable = SessionState.FAILED, False
            ending.failure = FailureReason.STORAGE
            ending.error = f"its trajectory cannot be stored: {piece}"

    async def _stored(self, request: StoreRequest) -> Stored:
        pause = 0.1
        while True:
            try:
                (piece,) = await self.runner.store([request])
            except OSError as error:
                self._unwritable.failed(str(error))
            else:
                self._unwritable.recovered()
                return piece
            await asyncio.sleep(pause)
            pause = min(10.0, pause * 2)

    # Rows

    async def _write(self, endings: list[SessionEnd]) -> None:
        async def write(tx: AsyncConnection) -> Effects:
            transaction = EndSessions(self.store, tx, self.store.clock.now(), quarantine_deaths=self._quarantine_deaths)
            effects = await transaction.conclude(endings)
            crash_point("server.before_commit")
            return effects

        effects = await self.store.write_with_retry(write, what="the end of a session")
        crash_point("server.after_commit")
        for late in effects.fenced:
            log.warning("session %s had already ended; its late result is discarded", late.session_id)
        self._apply(effects)
