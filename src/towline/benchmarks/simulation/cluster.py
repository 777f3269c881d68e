"""A simulated cluster behind the `Runner` protocol: nodes that offer slots, and sessions that only take time.

Sessions are placed by the real `Placement`. A session is in INIT for a fixed time, runs for its drawn duration and ends with
a small, valid trajectory. Storing trajectories is the work of nodes: here one is stored, which stands for all.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from towline.benchmarks.fake_runner import FakeRunner, fake_trajectory
from towline.cluster.placement import NodeOffer, Placement
from towline.cluster.runner import SessionOutcome, Stored, StoreRequest
from towline.cluster.segments import Segments
from towline.common.clock import Clock
from towline.common.mappings import BoundedDict
from towline.schema import EndReason, SchemaError, Session, SessionState, Task

_HOMES = 100_000
"""Tasks whose first node is remembered."""


@dataclass(frozen=True, slots=True)
class SimulatedSession:
    """When one session occupied a slot, in virtual seconds."""

    group: int
    queued: float
    """Seconds from its submission to its start on a node."""
    started: float
    ended: float


class SimulatedRunner(FakeRunner):
    """A cluster of equal nodes. The number of a task is its `task_id`; its durations are in `harness_options`."""

    name = "simulated"

    def __init__(self, nodes: int, slots: int, *, init: float, report: float, clock: Clock):
        super().__init__(nodes * slots)
        self.clock = clock
        self.init = init
        """Seconds in INIT."""
        self.report = report
        """Seconds between two reports of the nodes."""
        self.placement = Placement()
        for number in range(nodes):
            self.placement.update(NodeOffer(f"node-{number:05}", slots))
        self.sessions: list[SimulatedSession] = []
        """The sessions that have ended."""
        self._stored: Stored = SchemaError("use_store comes first")
        self._homes: BoundedDict[str, str] = BoundedDict(_HOMES)
        """The node of each task's first session: its environment is prepared there."""

    @property
    def room(self) -> int:
        return self.placement.room

    async def use_store(self, segments: Segments, epoch: int) -> None:
        await super().use_store(segments, epoch)
        only = Session(session_id="simulated", task_id="simulated")
        (self._stored,) = await segments.write([fake_trajectory(only, version=0, full=True)])

    async def store(self, requests: Sequence[StoreRequest]) -> list[Stored]:
        return [self._stored] * len(requests)

    def submit(self, task: Task, session: Session) -> Awaitable[SessionOutcome]:
        home = self._homes.get(session.task_id, "")
        node = self.placement.place(session.session_id, prefer=home)
        assert node is not None, "the scheduler claims no more than there is room for"
        if not home:
            self._homes[session.task_id] = node
        self._active[session.session_id] = asyncio.Event()
        return self._run(task, session)

    async def _run(self, task: Task, session: Session) -> SessionOutcome:
        version, queued, began = self.version, self.clock.now() - session.created, self.clock.monotonic()
        cancelled = self._active[session.session_id]
        try:
            session = self._reach(session, SessionState.INIT)
            await self._work(task, self.init, cancelled)
            self.placement.started(session.session_id)
            session = self._reach(self._reach(session, SessionState.READY), SessionState.RUNNING)
            if not cancelled.is_set():
                end = self.clock.monotonic() + task.harness_options["seconds"][session.sample]
                if self.report:
                    end = math.ceil(end / self.report) * self.report
                await self._work(task, end - self.clock.monotonic(), cancelled)
        finally:
            self._active.pop(session.session_id, None)
            self.placement.ended(session.session_id)
        if cancelled.is_set():
            return self._ended(version, session, SessionState.CANCELLED, EndReason.CANCELLED)
        self.sessions.append(SimulatedSession(int(session.task_id), queued, began, self.clock.monotonic()))
        session = self._reach(session, SessionState.BUILDING)
        return self._ended(version, session, SessionState.DONE, EndReason.EXITED)

    def _reach(self, session: Session, state: SessionState) -> Session:
        session = session.advance(state, at=self.clock.now())
        if self.changed is not None:
            self.changed(session)
        return session
