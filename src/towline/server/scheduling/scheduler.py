"""The scheduler: claims sessions from the queue, hands them to the runner, and passes their ends to the `EndWriter`.

After a crash it takes over the sessions that still run on living nodes, and ends all others of the earlier server as LOST.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Row, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.cluster.runner import NodeLost, Runner, SessionOutcome, StoreRequest
from towline.common.crashpoints import crash_point
from towline.common.mappings import BoundedDict
from towline.errors import TowlineError
from towline.schema import EndReason, FailureReason, SessionState, Task
from towline.schema.files import load_json
from towline.server.events import Signals
from towline.server.metrics import ServerMetrics
from towline.server.pacing.pacer import Pacer
from towline.server.policy import PolicyController
from towline.server.scheduling import queue
from towline.server.scheduling.end_sessions import Effects
from towline.server.scheduling.end_writer import EndWriter
from towline.server.scheduling.ending import (
    SessionEnd,
    ended_otherwise,
    failure_of,
    fill_session_end,
    lost_session_end,
)
from towline.server.scheduling.fairness import FairShare, Weight
from towline.server.scheduling.progress import BreakerMonitor, StageWriter
from towline.server.scheduling.rules import is_suspect, suspects_at_once
from towline.server.store import names, tables
from towline.server.store.database import Store
from towline.server.store.tables import Phase

log = logging.getLogger("towline.server")
_BATCH = 64
"""Maximum number of sessions claimed at once."""
_CACHED_TASKS = 256
"""Parsed tasks kept in memory."""
_STOP_TIMEOUT = 60.0
"""Seconds that a shutdown waits for cancelled sessions, and for a database that is down."""


HoldReason = Callable[[], str]
"""Returns why no session may start now; empty if there is no reason."""


class SessionScheduler:
    """Runs waiting sessions while nothing holds the queue, and writes how they ended."""

    def __init__(
        self,
        store: Store,
        runner: Runner,
        policy: PolicyController,
        pacer: Pacer,
        signals: Signals,
        metrics: ServerMetrics,
        *,
        quarantine_deaths: int,
        weight: Weight = lambda tenant: 1.0,
    ):
        """`weight`: the weight of each tenant in the sharing of slots."""
        self.quarantine_deaths = quarantine_deaths
        self.store = store
        self.runner = runner
        self.policy = policy
        self.pacer = pacer
        self.signals = signals
        self.metrics = metrics
        self.stages = StageWriter(store, signals.events)
        self.breakers = BreakerMonitor(store, runner, signals.work, signals.events)
        self.hold_reasons: list[HoldReason] = [self._broken_reason, self._paused_reason, self.breakers.holding]
        """Checked whenever there is room for a session. When one clears, `signals.work` is notified."""
        self.waiting_of: Counter[str] = Counter()
        """Waiting sessions of each tenant, approximately; recounted periodically."""
        self.share = FairShare(weight, store.clock.monotonic)
        self.active: dict[str, asyncio.Task[None]] = {}
        """Sessions at the runner, or whose end is being written."""
        self.owners: dict[str, str] = {}
        """The tenants of the active sessions."""
        self._ending: set[str] = set()
        """Active sessions that the runner has ended, and whose ends are being written."""
        self.broken = ""
        """Why the scheduler stopped working; empty while it works."""
        self._to_stop: set[str] = set()
        """Active sessions that were asked to end."""
        self._held_back = False
        """Whether pacing kept sessions in the queue at the last claim."""
        self._interrupted = False
        self._closing = False
        self._suspects: set[str] = set()
        """Active suspects of killing nodes."""
        self._suspecting = quarantine_deaths > 0
        """Whether suspects may be waiting or active."""
        self._ends = EndWriter(store, runner, self.apply, quarantine_deaths=quarantine_deaths)
        self._tasks: BoundedDict[str, Task] = BoundedDict(_CACHED_TASKS)
        """By stored id."""
        self._loops: list[asyncio.Task[None]] = []

    # Start and stop

    async def recover(self) -> int:
        """End the sessions that an earlier server left as LOST, and retry them; returns how many there were."""
        table = tables.sessions
        async with self.store.read() as tx:
            query = select(table).where(table.c.phase == Phase.ACTIVE, table.c.epoch < self.store.epoch)
            rows = list(await tx.execute(query))
            # A server that died during recovery has already ended some of them.
            lost = or_(table.c.phase == Phase.ACTIVE, table.c.state == SessionState.LOST)
            epochs = Counter(row.epoch for row in rows)
            if any(is_suspect(row.deaths + 1, self.quarantine_deaths) for row in rows):
                counted = select(table.c.epoch, func.count().label("lost")).where(table.c.epoch.in_(epochs), lost)
                epochs = Counter({row.epoch: row.lost for row in await tx.execute(counted.group_by(table.c.epoch))})
        limit = self.quarantine_deaths
        adopted = await self._adopt(rows)
        endings = {
            row.session_id: lost_session_end(row, company=epochs[row.epoch], limit=limit)
            for row in rows
            if row.session_id not in adopted
        }
        async for outcome in self.runner.recover(set(endings)):
            ending = endings.pop(outcome.session.session_id)
            ending.turns = outcome.summary.turns
            await self._ends.write_lost([ending], ended_otherwise(ending))
            await self.runner.discard(ending.session_id)
        await self._ends.write_lost(list(endings.values()))
        self.waiting_of = await queue.count_waiting(self.store)
        return len(rows) - len(adopted)

    async def _adopt(self, rows: Sequence[Row[Any]]) -> set[str]:
        """Take over the sessions that still run on the nodes of an earlier server; returns their ids."""
        running = await self.runner.adopt({row.session_id for row in rows})
        if not running:
            return set()
        claimed = await self.store.write_with_retry(
            partial(queue.take_over, session_ids=sorted(running), epoch=self.store.epoch), what="running sessions"
        )
        for one in claimed:
            self._track(one, running[one.session.session_id])
        log.warning("%d sessions of an earlier server still run, and continue", len(claimed))
        return {one.session.session_id for one in claimed}

    def start(self) -> None:
        loops = (self._claim_loop(), self._ends.run(), self.stages.run(), self.breakers.run())
        self._loops = [asyncio.create_task(loop) for loop in loops]
        for loop in self._loops:
            loop.add_done_callback(self._loop_failed)

    def _loop_failed(self, loop: asyncio.Task[None]) -> None:
        if not loop.cancelled() and (error := loop.exception()) is not None:
            self.broken = f"{type(error).__name__}: {error}"
            log.critical("the scheduler failed; restart the server", exc_info=error)

    async def close(self, seconds: float) -> None:
        """Let sessions end by themselves for `seconds`; then save their turns and leave the sessions to the next server."""
        self._closing = True
        self.signals.work.notify()
        # Sessions that are being claimed at this moment become active too.
        await asyncio.wait(self._loops[:1], timeout=_STOP_TIMEOUT)
        await self._wait_for_sessions(seconds)
        self._interrupted = True
        for session_id in list(self.active):
            self.runner.cancel(session_id)
        await self._wait_for_sessions(_STOP_TIMEOUT)
        if self.active:
            log.error("the ends of %d sessions could not be written; the next server marks them LOST", len(self.active))
        remaining = [*self._loops, *self.active.values()]
        for task in remaining:
            task.cancel()
        if remaining:
            await asyncio.wait(remaining, timeout=_STOP_TIMEOUT)

    async def _wait_for_sessions(self, seconds: float) -> None:
        if self.active:
            await asyncio.wait(list(self.active.values()), timeout=seconds)

    # Starting sessions

    async def _claim_loop(self) -> None:
        while not self._closing:
            count = self.signals.work.count
            if not await self.claim():
                await self.signals.work.wait(count, 5.0)

    async def claim(self) -> int:
        """Start waiting sessions as far as there is room and nothing holds the queue; returns how many."""
        # Sessions whose ends are not written yet count: they must not pile up while the storage is down.
        room = self.runner.room - len(self._ending)
        claimed: list[queue.ClaimedSession] = []
        self._held_back = False
        if room > 0 and not self.held:
            claimed = await self.store.write_with_retry(partial(self._claim, room=room), what="claim")
        for one in claimed:
            self._start_session(one)
        left = min(room - len(claimed), self.waiting - len(claimed))
        self.pacer.set_idle(max(0, left) if self._held_back else 0)
        # Sessions that are no longer active have ended by themselves.
        self._to_stop &= self.active.keys()
        if claimed:
            self.waiting_of -= Counter(one.session.tenant for one in claimed)
            self.signals.events.notify()
        self.runner.report_demand(self.waiting)
        return len(claimed)

    @property
    def waiting(self) -> int:
        """Waiting sessions of all tenants, approximately."""
        return max(0, self.waiting_of.total())

    @property
    def held(self) -> str:
        """Why no session is started; empty if there is no reason."""
        return next((reason for hold in self.hold_reasons if (reason := hold())), "")

    def _broken_reason(self) -> str:
        if self.runner.trouble and not self.broken:
            self.broken = self.runner.trouble
            log.critical("no more sessions are started; restart the server: %s", self.broken)
        return self.broken

    def _paused_reason(self) -> str:
        return "sampling is paused" if self.policy.now.paused else ""

    async def _claim(self, tx: AsyncConnection, *, room: int) -> list[queue.ClaimedSession]:
        suspects = await self._suspects_only(tx) if self._suspecting else None
        count = min(room, _BATCH) if suspects is None else min(room, suspects)
        if count <= 0:
            return []
        version = self.policy.now.version
        gate = await self.pacer.gate(tx, version)
        claimed = await queue.claim(
            tx,
            count,
            epoch=self.store.epoch,
            node=self.runner.name,
            at=self.store.clock.now(),
            version=version,
            share=self.share,
            gate=gate,
            deaths=0 if suspects is None else self.quarantine_deaths,
        )
        if gate is not None:
            self.pacer.claimed(gate, all_sessions=suspects is None)
        self._held_back = gate is not None and gate.holds
        if claimed:
            crash_point("server.before_claim")
        return claimed

    async def _suspects_only(self, tx: AsyncConnection) -> int | None:
        """How many suspects may start now, while nothing else may; `None` if there are no suspects."""
        companies = await queue.suspects(tx, self.quarantine_deaths)
        self._suspecting = bool(companies or self._suspects)
        if not self._suspecting:
            return None
        if not companies or self.active.keys() - self._suspects:
            return 0
        return suspects_at_once(min(companies)) - len(self._suspects)

    def _start_session(self, claimed: queue.ClaimedSession) -> None:
        crash_point("server.after_claim")
        session = claimed.session
        if is_suspect(claimed.deaths, self.quarantine_deaths):
            self._suspects.add(session.session_id)
        try:
            task = self._task(claimed.key, claimed.body)
            running = self.runner.submit(task, session)
        except TowlineError as error:
            running = _failed(error)
        if session.session_id in self._to_stop or self._interrupted:
            self.runner.cancel(session.session_id)
        self._track(claimed, running)

    def _track(self, claimed: queue.ClaimedSession, running: Awaitable[SessionOutcome]) -> None:
        session_id = claimed.session.session_id
        active = asyncio.create_task(self._run_session(claimed, running))
        self.active[session_id] = active
        self.owners[session_id] = claimed.session.tenant
        self.share.started(claimed.session.tenant)
        active.add_done_callback(lambda done: self._session_ended(session_id, done))

    def _task(self, key: str, body: bytes) -> Task:
        if key not in self._tasks:
            self._tasks[key] = Task.model_validate(load_json(body))
        return self._tasks[key]

    def _session_ended(self, session_id: str, done: asyncio.Task[None]) -> None:
        self.active.pop(session_id, None)
        if session_id in self.owners:
            self.share.ended(self.owners.pop(session_id))
        self._ending.discard(session_id)
        self._to_stop.discard(session_id)
        self._suspects.discard(session_id)
        self.stages.forget(session_id)
        self.signals.work.notify()
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("the end of session %s could not be written", session_id, exc_info=error)

    def stop(self, session_ids: list[str], reason: EndReason) -> None:
        """Stop sessions that are active, or about to be."""
        for session_id in session_ids:
            self._to_stop.add(session_id)
            self.runner.cancel(session_id, reason)

    # Ending sessions

    async def _run_session(self, claimed: queue.ClaimedSession, running: Awaitable[SessionOutcome]) -> None:
        outcome: SessionOutcome | None = None
        session = claimed.session
        identity = {name: getattr(session, name) for name in ("session_id", "task_id", "tenant", "sample", "attempt")}
        ending = SessionEnd(**identity, epoch=self.store.epoch, deaths=claimed.deaths, company=claimed.company)
        try:
            outcome = await running
        except NodeLost as error:
            ending.died(str(error) or "its node died", company=error.sessions, limit=self.quarantine_deaths)
        except TowlineError as error:
            ending.error, ending.failure = str(error) or repr(error), failure_of(error)
        except Exception as error:
            log.exception("session %s failed", session.session_id)
            ending.error, ending.failure = str(error) or repr(error), FailureReason.INTERNAL
        self._ending.add(session.session_id)
        store = None if outcome is None else self._fill_end(ending, outcome)
        ending.stage = self.stages.last(session.session_id)
        ending.steps = await self.stages.take(session.session_id)
        await self._ends.write(ending, store)
        self._ending.discard(session.session_id)
        self._suspecting = self._suspecting or (ending.deaths > claimed.deaths and self.quarantine_deaths > 0)
        if outcome is not None:
            await self.runner.discard(session.session_id)

    def _fill_end(self, ending: SessionEnd, outcome: SessionOutcome) -> StoreRequest:
        """Fill in the end; returns the trajectory to store."""
        self.metrics.session(outcome)
        state = outcome.session.state
        if self._interrupted and state is SessionState.CANCELLED and ending.session_id not in self._to_stop:
            return fill_session_end(ending, outcome, lost="the server was shut down")
        if outcome.lost:
            return fill_session_end(ending, outcome, lost=outcome.lost, why=FailureReason.STORAGE)
        return fill_session_end(ending, outcome)

    def apply(self, effects: Effects) -> None:
        """Act on what a committed transaction requires."""
        self.waiting_of.update(effects.waiting)
        self.pacer.retried([ending.key for ending in effects.ended if ending.retried])
        for ending in effects.ended:
            self.metrics.ended(ending)
            _log_failure(ending)
        for key in effects.finished_tasks:
            self._tasks.pop(key, None)
            self.runner.forget(names.plain(key))
        self.stop(effects.stop, effects.stop_reason)
        for ending in effects.lengths:
            self.metrics.ended_in_group(ending)
        if effects.deadlines:
            self.signals.deadlines.notify()
        if effects.published:
            self.signals.results.notify()
        if effects.callbacks:
            self.signals.callbacks.notify()
        self.signals.events.notify()
        if effects.waiting.total() > 0:
            self.signals.work.notify()


async def _failed(error: TowlineError) -> SessionOutcome:
    raise error


def _log_failure(ending: SessionEnd) -> None:
    """One line per failed session; those that a dead server left are counted at the start."""
    if ending.state is SessionState.FAILED:
        quarantined = ending.failure is FailureReason.QUARANTINED
        log.log(logging.ERROR if quarantined else logging.WARNING, "%s", ending.log_line(), extra=ending.log_fields())
    elif ending.state is SessionState.LOST:
        log.info("%s", ending.log_line(), extra=ending.log_fields())
