"""Sessions from the queue to a runner, and their ends into the store.

A session's end is written in this order: its trajectory as a segment, then, in one transaction, everything that follows
from it. Ends that come together share a transaction. A session whose end cannot be written because the database is away
waits for it; nothing is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.crashpoints import crash_point
from towline.errors import TowlineError
from towline.schema import FailureReason, SchemaError, Session, SessionState, Task, Trajectory
from towline.schema.files import load_json
from towline.server import outcomes, queueing, tables
from towline.server.breakers import Breakers
from towline.server.ending import Effects, Ender
from towline.server.metrics import Metrics
from towline.server.outages import Outage
from towline.server.pacer import Pacer
from towline.server.policy import PolicyDesk
from towline.server.rows import Ending, lost_ending
from towline.server.rules import suspect, suspects_at_once
from towline.server.runner import NodeLost, Outcome, Runner
from towline.server.segments import Piece, Segments
from towline.server.signals import Signal
from towline.server.stages import Stages
from towline.server.store import Store, chunks, passing
from towline.server.tables import Phase

log = logging.getLogger("towline.server")
_TOGETHER = 64
"""Most ends in one transaction, and most sessions claimed at once."""
_REMEMBERED = 256
_PATIENCE = 60.0
"""Seconds that a stop waits for sessions that were told to end, and for a database that is away."""


@dataclass(slots=True)
class Signals:
    """What the parts of the server tell each other."""

    work: Signal
    """There may be something to start."""
    results: Signal
    events: Signal
    callbacks: Signal


@dataclass(slots=True)
class _End:
    """A session's end on its way into the store."""

    ending: Ending
    trajectory: Trajectory | None
    written: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


Gate = Callable[[], str]
"""Why no session is started now; empty if there is no reason."""


class Scheduler:
    def __init__(
        self,
        store: Store,
        segments: Segments,
        runner: Runner,
        policy: PolicyDesk,
        pacer: Pacer,
        signals: Signals,
        metrics: Metrics,
        *,
        quarantine_deaths: int,
    ):
        self.quarantine_deaths = quarantine_deaths
        self.store = store
        self.segments = segments
        self.runner = runner
        self.policy = policy
        self.pacer = pacer
        self.signals = signals
        self.metrics = metrics
        self.stages = Stages(store, signals.events)
        self.breakers = Breakers(store, runner, signals.work, signals.events)
        self.gates: list[Gate] = [self._unfit, self._paused, self.breakers.holding]
        """Looked at whenever there is room for a session. Whoever opens one gives `signals.work`."""
        self.waiting = 0
        """Sessions that wait, as far as is known; counted anew now and then."""
        self.flights: dict[str, asyncio.Task[None]] = {}
        self.broken = ""
        """Why it no longer works, if it does not."""
        self._stop: set[str] = set()
        """Sessions under way that are to end."""
        self._held_back = False
        """Pacing kept sessions in the queue at the last claim."""
        self._interrupted = False
        self._closing = False
        self._suspects: set[str] = set()
        """Those under way."""
        self._suspecting = quarantine_deaths > 0
        """Whether suspects may wait or be under way."""
        self._unwritable = Outage("the place of the trajectories is")
        self._ends: asyncio.Queue[_End] = asyncio.Queue()
        self._tasks: OrderedDict[str, Task] = OrderedDict()
        self._loops: list[asyncio.Task[None]] = []

    # Life

    async def recover(self) -> int:
        """End what an earlier server left: its sessions are archived as LOST and tried again. How many there were."""
        table = tables.sessions
        async with self.store.read() as tx:
            query = select(table).where(table.c.phase == Phase.ACTIVE, table.c.epoch < self.store.epoch)
            rows = list(await tx.execute(query))
            # A server that died while it did this has ended some of them already.
            lost = or_(table.c.phase == Phase.ACTIVE, table.c.state == SessionState.LOST)
            epochs = Counter(row.epoch for row in rows)
            if any(suspect(row.deaths + 1, self.quarantine_deaths) for row in rows):
                counted = select(table.c.epoch, func.count().label("lost")).where(table.c.epoch.in_(epochs), lost)
                epochs = Counter({row.epoch: row.lost for row in await tx.execute(counted.group_by(table.c.epoch))})
        limit = self.quarantine_deaths
        endings = {row.session_id: lost_ending(row, company=epochs[row.epoch], limit=limit) for row in rows}
        async for trajectory in self.runner.recover(set(endings)):
            ending = endings.pop(trajectory.session_id)
            ending.turns = trajectory.report.turns
            await self._end_lost([_End(ending, outcomes.ended_as(trajectory, ending))])
            await self.runner.discard(ending.session_id)
        for some in chunks(list(endings.values())):
            await self._end_lost([_End(ending, None) for ending in some])
        self.waiting = await queueing.waiting(self.store)
        return len(rows)

    async def _end_lost(self, batch: list[_End]) -> None:
        """Write the ends of lost sessions. One whose rows do not allow it ends by itself, and stops nothing."""
        try:
            await self._keep(batch)
        except Exception as error:
            if passing(error):
                raise
            if len(batch) > 1:
                for end in batch:
                    await self._end_lost([end])
                return
            ending = batch[0].ending
            log.error("damaged: the rows of session %s: %s: %s", ending.session_id, type(error).__name__, error)
            await self.store.insist(
                partial(queueing.set_aside, session_ids=[ending.session_id]), what="a damaged session"
            )

    def start(self) -> None:
        works = (self._claiming(), self._ending(), self.stages.run(), self.breakers.run())
        self._loops = [asyncio.create_task(work) for work in works]
        for loop in self._loops:
            loop.add_done_callback(self._broke)

    def _broke(self, loop: asyncio.Task[None]) -> None:
        if not loop.cancelled() and (error := loop.exception()) is not None:
            self.broken = f"{type(error).__name__}: {error}"
            log.critical("the scheduler broke; start the server again", exc_info=error)

    async def close(self, seconds: float) -> None:
        """Give sessions so long to end by themselves; then keep their turns and leave them to the next server."""
        self._closing = True
        self.signals.work.give()
        # What is being claimed at this moment becomes a flight like the others.
        await asyncio.wait(self._loops[:1], timeout=_PATIENCE)
        await self._land(seconds)
        self._interrupted = True
        for session_id in list(self.flights):
            self.runner.cancel(session_id)
        await self._land(_PATIENCE)
        if self.flights:
            log.error("%d sessions could not be written at the end; the next server finds them lost", len(self.flights))
        left = [*self._loops, *self.flights.values()]
        for work in left:
            work.cancel()
        if left:
            await asyncio.wait(left, timeout=_PATIENCE)

    async def _land(self, seconds: float) -> None:
        if self.flights:
            await asyncio.wait(list(self.flights.values()), timeout=seconds)

    # Starting sessions

    async def _claiming(self) -> None:
        while not self._closing:
            count = self.signals.work.count
            room = self.runner.capacity - len(self.flights)
            claimed: list[queueing.Claimed] = []
            self._held_back = False
            if room > 0 and not self.held:
                claimed = await self.store.insist(partial(self._claim, room=room), what="claim")
            for one in claimed:
                self._launch(one)
            left = min(room - len(claimed), self.waiting - len(claimed))
            self.pacer.idle(max(0, left) if self._held_back else 0)
            # Whoever was to be stopped and is no flight has ended by himself.
            self._stop &= self.flights.keys()
            if claimed:
                self.waiting = max(0, self.waiting - len(claimed))
                self.signals.events.give()
            else:
                await self.signals.work.wait(count, 5.0)

    @property
    def held(self) -> str:
        """Why no session is started, whatever waits; empty if there is no reason."""
        return next((reason for gate in self.gates if (reason := gate())), "")

    def _unfit(self) -> str:
        if self.runner.trouble and not self.broken:
            self.broken = self.runner.trouble
            log.critical("no more sessions are started; start the server again: %s", self.broken)
        return self.broken

    def _paused(self) -> str:
        return "sampling is paused" if self.policy.now.paused else ""

    async def _claim(self, tx: AsyncConnection, *, room: int) -> list[queueing.Claimed]:
        suspects = await self._suspects_only(tx) if self._suspecting else None
        count = min(room, _TOGETHER) if suspects is None else min(room, suspects)
        if count <= 0:
            return []
        version = self.policy.now.version
        gate = await self.pacer.gate(tx, version)
        claimed = await queueing.claim(
            tx,
            count,
            epoch=self.store.epoch,
            node=self.runner.name,
            at=time.time(),
            version=version,
            gate=gate,
            deaths=0 if suspects is None else self.quarantine_deaths,
        )
        self._held_back = gate is not None and gate.holds
        if claimed:
            crash_point("server.before_claim")
        return claimed

    async def _suspects_only(self, tx: AsyncConnection) -> int | None:
        """How many suspects of killing nodes may be started now, and nothing else; `None` if there are none."""
        companies = await queueing.suspects(tx, self.quarantine_deaths)
        self._suspecting = bool(companies or self._suspects)
        if not self._suspecting:
            return None
        if not companies or self.flights.keys() - self._suspects:
            return 0
        return suspects_at_once(min(companies)) - len(self._suspects)

    def _launch(self, claimed: queueing.Claimed) -> None:
        crash_point("server.after_claim")
        session = claimed.session
        if suspect(claimed.deaths, self.quarantine_deaths):
            self._suspects.add(session.session_id)
        flight = asyncio.create_task(self._fly(session, claimed))
        self.flights[session.session_id] = flight
        flight.add_done_callback(lambda done: self._landed(session.session_id, done))

    def _task(self, task_id: str, body: bytes) -> Task:
        task = self._tasks.get(task_id)
        if task is None:
            task = self._tasks[task_id] = Task.model_validate(load_json(body))
            if len(self._tasks) > _REMEMBERED:
                self._tasks.popitem(last=False)
        return task

    def _landed(self, session_id: str, done: asyncio.Task[None]) -> None:
        self.flights.pop(session_id, None)
        self._stop.discard(session_id)
        self._suspects.discard(session_id)
        self.stages.forget(session_id)
        self.signals.work.give()
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("the end of session %s could not be written", session_id, exc_info=error)

    def stop(self, session_ids: list[str]) -> None:
        """End sessions that are under way, or are about to be."""
        for session_id in session_ids:
            self._stop.add(session_id)
            self.runner.cancel(session_id)

    # Ending sessions

    async def _fly(self, session: Session, claimed: queueing.Claimed) -> None:
        outcome: Outcome | None = None
        ending = Ending(
            session.session_id, session.task_id, session.sample, session.attempt, self.store.epoch, SessionState.FAILED
        )
        ending.deaths, ending.company = claimed.deaths, claimed.company
        try:
            running = self.runner.submit(self._task(session.task_id, claimed.body), session)
            if session.session_id in self._stop or self._interrupted:
                self.runner.cancel(session.session_id)
            outcome = await running
        except NodeLost as error:
            limit = self.quarantine_deaths
            ending.died(str(error) or "its node is gone", company=error.sessions, limit=limit)
            self._suspecting = limit > 0
        except TowlineError as error:
            ending.error, ending.failure = str(error) or repr(error), outcomes.failure_of(error)
        except Exception as error:
            log.exception("session %s failed", session.session_id)
            ending.error, ending.failure = str(error) or repr(error), FailureReason.INTERNAL
        trajectory = None if outcome is None else self._told(ending, outcome)
        ending.stage = self.stages.last(session.session_id)
        ending.steps = await self.stages.take(session.session_id)
        end = _End(ending, trajectory)
        await self._ends.put(end)
        await end.written
        if outcome is not None:
            await self.runner.discard(session.session_id)

    def _told(self, ending: Ending, outcome: Outcome) -> Trajectory:
        """Fill in the ending; the trajectory to keep."""
        self.metrics.session(outcome.trajectory)
        state = outcome.session.state
        if self._interrupted and state is SessionState.CANCELLED and ending.session_id not in self._stop:
            return outcomes.fill(ending, outcome, lost="the server was told to stop")
        if state is SessionState.FAILED and self.runner.trouble:
            return outcomes.fill(ending, outcome, lost=self.runner.trouble, why=FailureReason.STORAGE)
        return outcomes.fill(ending, outcome)

    async def _ending(self) -> None:
        while True:
            batch = [await self._ends.get()]
            while len(batch) < _TOGETHER and not self._ends.empty():
                batch.append(self._ends.get_nowait())
            try:
                await self._keep(batch)
            except Exception:
                log.exception("%d sessions' ends could not be written together; one by one", len(batch))
                await self._one_by_one(batch)
            for end in batch:
                if not end.written.done():
                    end.written.set_result(None)

    async def _one_by_one(self, batch: list[_End]) -> None:
        for end in batch:
            try:
                await self._keep([end])
            except Exception as error:
                # The session stays as it is; the next server finds it and tries again.
                end.written.set_exception(error)

    async def _keep(self, batch: list[_End]) -> None:
        """The trajectories first, then the rows that name them."""
        full = [end for end in batch if end.trajectory is not None]
        if full:
            pieces = await self._write_segment([end.trajectory for end in full if end.trajectory is not None])
            for end, piece in zip(full, pieces, strict=True):
                if isinstance(piece, Piece):
                    end.ending.piece = piece
                else:
                    end.ending.state, end.ending.usable = SessionState.FAILED, False
                    end.ending.failure = FailureReason.STORAGE
                    end.ending.error = f"its trajectory cannot be written: {piece}"
        await self._write_ends([end.ending for end in batch])

    async def _write_segment(self, trajectories: list[Trajectory]) -> list[Piece | SchemaError]:
        pause = 0.1
        while True:
            try:
                pieces = await self.segments.write(trajectories)
            except OSError as error:
                self._unwritable.met(str(error))
            else:
                self._unwritable.over()
                return pieces
            await asyncio.sleep(pause)
            pause = min(10.0, pause * 2)

    async def _write_ends(self, endings: list[Ending]) -> None:
        async def write(tx: AsyncConnection) -> Effects:
            ender = Ender(self.store, tx, time.time(), quarantine_deaths=self.quarantine_deaths)
            effects = await ender.conclude(endings)
            crash_point("server.before_commit")
            return effects

        effects = await self.store.insist(write, what="the end of a session")
        crash_point("server.after_commit")
        for late in effects.fenced:
            log.warning("session %s had ended before; what came of it now is not used", late.session_id)
        self.apply(effects)

    def apply(self, effects: Effects) -> None:
        """What a committed transaction asks for."""
        self.waiting = max(0, self.waiting + effects.waiting)
        for ending in effects.ended:
            self.metrics.ended(ending)
            _log_failure(ending)
        for task_id in effects.over:
            self._tasks.pop(task_id, None)
            self.runner.forget(task_id)
        self.stop(effects.stop)
        if effects.published:
            self.signals.results.give()
        if effects.callbacks:
            self.signals.callbacks.give()
        self.signals.events.give()
        if effects.waiting > 0:
            self.signals.work.give()


def _log_failure(ending: Ending) -> None:
    """One line for every session that failed; those that a dead server left are counted at its start."""
    if ending.state is SessionState.FAILED:
        quarantined = ending.failure is FailureReason.QUARANTINED
        log.log(logging.ERROR if quarantined else logging.WARNING, "%s", ending.line(), extra=ending.fields())
    elif ending.state is SessionState.LOST:
        log.info("%s", ending.line(), extra=ending.fields())
