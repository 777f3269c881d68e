"""A fake runner for benchmarks and tests of the server: sessions end at once with a small, valid trajectory.

A task's `harness_options` control its sessions: `seconds` (duration), `fail` (how many attempts fail), `reason` (their
`FailureReason`), `lose` (how many attempts are lost with their node), `hopeless` (failures are not retried), `empty` (no
trained tokens), `hang` (until cancelled; a number limits it to that many attempts), `outage` (brings the engine down). A
list gives one value per sample. While the breaker `engine:policy` is open, sessions fail without blame.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import Metric

from towline.cluster.ended import EndedTrajectories
from towline.cluster.runner import (
    InvalidTask,
    LogNotFound,
    NodeLost,
    NodeNotFound,
    SessionLog,
    SessionOutcome,
    Stored,
    StoreRequest,
)
from towline.cluster.segments import Segments
from towline.engines.base import PauseMode
from towline.errors import EngineError
from towline.schema import (
    POLICY,
    BreakerStatus,
    EndReason,
    FailureReason,
    FidelityReport,
    Reward,
    SandboxKind,
    Session,
    SessionState,
    Task,
    Trace,
    Trajectory,
    Turn,
)

_PROMPT, _SAMPLED = 24, 16
"""Prompt and sampled tokens of a session."""
ENGINE = "engine:policy"
_OPTIONS = {"seconds", "fail", "reason", "lose", "hopeless", "empty", "hang", "outage"}


class FakeRunner:
    name = "fake"

    def __init__(self, capacity: int = 64):
        self.capacity = capacity
        self.changed: Callable[[Session], None] | None = None
        self.version = 0
        self.trouble = ""
        self.paused = False
        self.started: list[str] = []
        """Session ids in the order of submission."""
        self.prefetched: list[str] = []
        """Task ids."""
        self.most = 0
        """Highest number of concurrent sessions."""
        self.forgotten: list[str] = []
        self.erased: set[str] = set()
        self.closed = False
        self.breakers: list[BreakerStatus] = []
        self.error = "the fake failed"
        """The error of failing sessions."""
        self.hold = False
        """Whether new sessions wait for `release`."""
        self._gate = asyncio.Event()
        self.problems: list[str] = []
        """The problems that `probe` reports."""
        self.logs: dict[str, dict[str, bytes]] = {}
        """Log files by session and name."""
        self._on_breaker: Callable[[BreakerStatus], None] = lambda status: None
        self._engine_failed: Callable[[str, FailureReason], None] = lambda engine, reason: None
        self._active: dict[str, asyncio.Event] = {}
        self._began: dict[str, float] = {}
        self._reasons: dict[str, EndReason] = {}
        """End reasons of cancelled sessions."""
        self._ended_trajectories = EndedTrajectories()

    # Circuit breakers

    def trip(self, component: str, reason: str = "") -> None:
        """Open a breaker, or close it if no reason is given."""
        before = next((one for one in self.breakers if one.component == component), None)
        opened = (before.opened if before else 0) + bool(reason)
        status = BreakerStatus(component=component, open=bool(reason), reason=reason, since=time.time(), opened=opened)
        self.breakers = [one for one in self.breakers if one.component != component] + [status]
        self._on_breaker(status)

    def needs(self, component: str) -> bool:
        return component in (ENGINE, "sandbox:bubblewrap")

    def watch_engines(self, failed: Callable[[str, FailureReason], None]) -> None:
        self._engine_failed = failed

    def watch_breakers(self, changed: Callable[[BreakerStatus], None]) -> None:
        self._on_breaker = changed

    @property
    def _outage(self) -> bool:
        return any(one.open and one.component == ENGINE for one in self.breakers)

    def release(self) -> None:
        """Let the sessions that `hold` blocks finish."""
        self._gate.set()
        self._gate = asyncio.Event()

    async def probe(self) -> list[str]:
        return self.problems

    # Sessions

    async def check(self, task: Task) -> None:
        if task.harness != "fake":
            raise InvalidTask("harness", f"unknown harness {task.harness!r}; available: fake")
        unknown = set(task.harness_options) - _OPTIONS
        if unknown:
            raise InvalidTask("harness_options", f"harness fake has no option {min(unknown)!r}")

    async def prefetch(self, tasks: Sequence[Task], seconds: float) -> list[str]:
        self.prefetched += [task.task_id for task in tasks]
        return []

    @property
    def default_sandbox(self) -> SandboxKind:
        return SandboxKind.BUBBLEWRAP

    @property
    def room(self) -> int:
        return self.capacity - len(self._active)

    def watch_room(self, changed: Callable[[], None]) -> None:
        """Its capacity is constant."""

    def report_demand(self, waiting: int) -> None:
        """Its capacity is constant."""

    async def use_store(self, segments: Segments, epoch: int) -> None:
        self._ended_trajectories.segments = segments

    async def metrics(self) -> Iterable[Metric]:
        return ()

    def watch_sessions(self, changed: Callable[[Session], None]) -> None:
        self.changed = changed

    def submit(self, task: Task, session: Session) -> Awaitable[SessionOutcome]:
        self._active[session.session_id] = asyncio.Event()
        self.started.append(session.session_id)
        self.most = max(self.most, len(self._active))
        return self._run(task, session)

    async def _run(self, task: Task, session: Session) -> SessionOutcome:
        options = {name: _of(value, session.sample) for name, value in task.harness_options.items()}
        cancelled = self._active[session.session_id]
        version = self.version  # of its first token, which determines its staleness
        try:
            for state in (SessionState.INIT, SessionState.READY, SessionState.RUNNING):
                session = session.advance(state, at=time.time())
                if self.changed is not None:
                    self.changed(session)
            self._began[session.session_id] = time.monotonic()
            hang = options.get("hang", 0)
            hangs = hang is True or session.attempt <= hang
            await self._work(task, 3600.0 if hangs else float(options.get("seconds", 0.0)), cancelled)
            if cancelled.is_set():
                reason = self._reasons.pop(session.session_id, EndReason.CANCELLED)
                return self._ended(version, session, SessionState.CANCELLED, reason)
            if session.attempt <= int(options.get("lose", 0)):
                raise NodeLost("the fake node is gone")
            failure = FailureReason(options.get("reason", "internal"))
            if options.get("outage"):
                self.trip(ENGINE, "down")
                asyncio.get_running_loop().call_soon(self.trip, ENGINE)
            if self._outage:
                ended = self._ended(version, session, SessionState.FAILED, None, failure=FailureReason.ENGINE)
                ended.blameless = True
                return ended
            if session.attempt <= int(options.get("fail", 0)):
                ended = self._ended(version, session, SessionState.FAILED, None, failure=failure)
                ended.hopeless = bool(options.get("hopeless"))
                return ended
            session = session.advance(SessionState.BUILDING, at=time.time())
            return self._ended(version, session, SessionState.DONE, EndReason.EXITED, empty=bool(options.get("empty")))
        finally:
            self._active.pop(session.session_id, None)

    async def _work(self, task: Task, seconds: float, cancelled: asyncio.Event) -> None:
        """Wait for the session's duration, or until it is cancelled."""
        if seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await cancelled.wait()
        elif self.hold:
            await self._gate.wait()
        else:
            await asyncio.sleep(0)

    def _ended(
        self,
        version: int,
        session: Session,
        state: SessionState,
        end: EndReason | None,
        *,
        failure: FailureReason | None = None,
        empty: bool = False,
    ) -> SessionOutcome:
        error = self.error if state is SessionState.FAILED else "nothing was sampled" if empty else None
        session = session.advance(state, at=time.time(), end_reason=end, error=error, failure=failure)
        full = state is SessionState.DONE and not empty
        trajectory = fake_trajectory(session, version=version, full=full, error=error)
        if session.session_id in self._began:
            ran = time.monotonic() - self._began.pop(session.session_id)
            trajectory = trajectory.model_copy(update={"timings": {"run": ran}})
        if failure in (FailureReason.ENGINE, FailureReason.STALL):
            self._engine_failed(POLICY, failure)
        if failure is FailureReason.ENGINE:
            trajectory = trajectory.model_copy(update={"metadata": {"notes": ["the engine answered: 500"]}})
        self._ended_trajectories.add(trajectory)
        return SessionOutcome.of(session, trajectory, lost=self.trouble if state is SessionState.FAILED else "")

    def cancel(self, session_id: str, reason: EndReason = EndReason.CANCELLED) -> None:
        if session_id in self._active:
            self._reasons.setdefault(session_id, reason)
            self._active[session_id].set()

    def forget(self, task_id: str) -> None:
        self.forgotten.append(task_id)

    async def adopt(self, session_ids: Collection[str]) -> Mapping[str, Awaitable[SessionOutcome]]:
        return {}

    async def recover(self, lost: Collection[str]) -> AsyncIterator[SessionOutcome]:
        for _ in ():
            yield _

    async def store(self, requests: Sequence[StoreRequest]) -> list[Stored]:
        return await self._ended_trajectories.store(requests)

    async def discard(self, session_id: str) -> None:
        self._ended_trajectories.discard(session_id)

    async def erase(self, session_ids: Collection[str]) -> None:
        self.erased.update(session_ids)

    async def read_log(self, session_id: str, name: str, most: int) -> SessionLog:
        logs = self.logs.get(session_id, {})
        if name not in logs:
            raise LogNotFound(sorted(logs))
        data = logs[name]
        return SessionLog(data[-most:], max(0, len(data) - most), sorted(logs))

    def drain(self, name: str, drained: bool) -> None:
        raise NodeNotFound("the fake node cannot be drained")

    async def nodes(self) -> list[dict[str, Any]]:
        sessions = [{"session_id": name, "turns": 1} for name in self._active]
        return [{"name": self.name, "capacity": self.capacity, "active": len(self._active), "sessions": sessions}]

    async def pause(self, mode: PauseMode, deadline: float | None) -> None:
        self.paused = True

    async def resume(self, version: int | None) -> None:
        self.paused = False
        self.version = self.version if version is None else version

    async def announce(self, version: int | None) -> int:
        self.version = self.version if version is None else version
        return self.version

    async def update_weights(self, folder: Path, version: int) -> None:
        if not await asyncio.to_thread((folder / "weights").exists):
            raise EngineError(f"{folder} holds no weights")
        self.version = version

    async def close(self) -> None:
        for cancelled in self._active.values():
            cancelled.set()
        self.closed = True


def _of(value: Any, sample: int) -> Any:
    return value[sample % len(value)] if isinstance(value, list) else value


def fake_trajectory(session: Session, *, version: int, full: bool, error: str | None = None) -> Trajectory:
    """A trajectory of one trained turn, or an empty one. Validated once per kind: copies differ only in ids."""
    if not full:
        return Trajectory(
            session_id=session.session_id,
            group_id=session.task_id,
            state=session.state,
            end_reason=session.end_reason,
            failure=session.failure,
            error=error,
            created=session.created,
        )
    made = _full(session.sample % 2, version)
    names = {"rollout_id": session.session_id, "group_id": session.task_id}
    traces = [trace.model_copy(update=names) for trace in made.traces]
    changes = {"session_id": session.session_id, "group_id": session.task_id, "created": session.created}
    return made.model_copy(update=changes | {"traces": traces})


@cache
def _full(sample: int, version: int) -> Trajectory:
    prompt, sampled = np.arange(_PROMPT, dtype=np.int32), np.arange(_SAMPLED, dtype=np.int32) + sample
    logprobs, versions = np.full(_SAMPLED, -0.5, np.float32), np.full(_SAMPLED, version, np.int32)
    before = np.zeros(_PROMPT, np.int32)
    turn = Turn(
        id="turn-0",
        index=0,
        prompt_length=_PROMPT,
        suffix=prompt,
        sampled=sampled,
        logprobs=logprobs,
        versions=versions,
        finish="stop",
    )
    trace = Trace(
        trace_id="trace-0",
        rollout_id="session",
        group_id="task",
        token_ids=np.concatenate([prompt, sampled]),
        loss_mask=np.concatenate([before, np.ones(_SAMPLED)]).astype(np.uint8),
        logprobs=np.concatenate([before.astype(np.float32), logprobs]),
        policy_versions=np.concatenate([before - 1, versions]),
        turn_ids=np.concatenate([before - 1, np.zeros(_SAMPLED, np.int32)]),
        finish_reason="stop",
    )
    trajectory = Trajectory(
        session_id="session",
        group_id="task",
        turns=[turn],
        traces=[trace],
        state=SessionState.DONE,
        end_reason=EndReason.EXITED,
        report=FidelityReport(turns=1, chains=1, trained_tokens=_SAMPLED),
        timings={"run": 0.0},
    )
    return trajectory.with_reward(Reward(value=float(sample), evaluator="fake"))
