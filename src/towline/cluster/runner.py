"""`Runner`: what the server needs to run sessions, in this process or on many node hosts.

A runner takes a session and returns how it ended: a summary, never the text of an agent. The trajectory stays with the
runner until the server asks to `store` it as a segment; then only its place travels. The server does not rely on anything
that a runner keeps over a crash: at the start it takes over what still runs (`adopt`) and ends everything else (`recover`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import Metric

from towline.cluster.segments import Segments, SegmentSlice
from towline.engines.base import PauseMode
from towline.errors import TowlineError
from towline.schema import (
    BreakerStatus,
    EndReason,
    FailureReason,
    SandboxKind,
    SchemaError,
    Session,
    SessionState,
    SessionSummary,
    Task,
    Trajectory,
)

_NOTES, _NOTE_CHARS = 20, 1000
"""Maximum number of notes of a session in its outcome, and their maximum length."""


class NodeLost(TowlineError):
    """The node that ran a session died, and the session with it."""

    failure = "node"

    def __init__(self, reason: str, *, sessions: int = 1):
        super().__init__(reason)
        self.sessions = sessions
        """How many sessions the node was running."""


class InvalidTask(TowlineError):
    """A task that can never run; `field` is the path of the invalid value."""

    def __init__(self, field: str, reason: str):
        super().__init__(reason)
        self.field = field


class NodeNotFound(TowlineError):
    """There is no node of that name."""


class LogNotFound(TowlineError):
    """The session has no log file of that name; `names` are the existing ones."""

    def __init__(self, names: list[str]):
        super().__init__("no such log file")
        self.names = names


@dataclass(frozen=True, slots=True)
class SessionLog:
    """The last bytes of a log file."""

    data: bytes
    left_out: int
    """Bytes before `data`."""
    names: list[str]
    """Names of all log files of the session."""


@dataclass(slots=True)
class SessionOutcome:
    """An ended session, without its tokens and text."""

    session: Session
    summary: SessionSummary
    lowest_version: int | None = None
    """Oldest policy version among its trained tokens."""
    sampled_tokens: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds per stage."""
    notes: list[str] = field(default_factory=list)
    hopeless: bool = False
    """A retry would fail in the same way."""
    blameless: bool = False
    """It failed in an outage of an engine or a sandbox runtime: the attempt does not count."""
    lost: str = ""
    """Why its node could not record it, although the harness did nothing wrong; empty if it could."""

    @classmethod
    def of(
        cls,
        session: Session,
        trajectory: Trajectory,
        *,
        hopeless: bool = False,
        blameless: bool = False,
        lost: str = "",
    ) -> SessionOutcome:
        versions = [trace.lowest_version for trace in trajectory.traces]
        notes = trajectory.metadata.get("notes")
        return cls(
            session,
            SessionSummary.of(trajectory, sample=session.sample, attempt=session.attempt),
            lowest_version=min((version for version in versions if version is not None), default=None),
            sampled_tokens=sum(len(turn.sampled) for turn in trajectory.turns),
            timings=dict(trajectory.timings),
            notes=[str(note)[:_NOTE_CHARS] for note in notes[:_NOTES]] if isinstance(notes, list) else [],
            hopeless=hopeless,
            blameless=blameless,
            lost=lost,
        )


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """The trajectory of one ended session, to be stored; with `state`, as that of a session that did not end by itself."""

    session_id: str
    state: SessionState | None = None
    failure: FailureReason | None = None
    error: str | None = None

    def applied_to(self, trajectory: Trajectory) -> Trajectory:
        if self.state is None:
            return trajectory
        changes = {"state": self.state, "failure": self.failure, "error": trajectory.error or self.error}
        changes |= {"end_reason": trajectory.end_reason or EndReason.ERROR}
        return Trajectory.model_validate(trajectory.__dict__ | changes)


Stored = SegmentSlice | SchemaError | NodeLost
"""Where a trajectory is, why it cannot be stored, or that its node died with it."""


class Runner(Protocol):
    """Runs sessions on one or many nodes."""

    @property
    def name(self) -> str: ...

    @property
    def capacity(self) -> int:
        """How many sessions it accepts at once, including those that wait inside it."""
        ...

    @property
    def room(self) -> int:
        """How many more sessions it accepts now."""
        ...

    @property
    def version(self) -> int:
        """The current policy version: what newly sampled tokens are stamped with."""
        ...

    @property
    def trouble(self) -> str:
        """Why no session can run until the server is restarted; empty while they can."""
        ...

    @property
    def breakers(self) -> Sequence[BreakerStatus]:
        """The circuit breakers of its engines and sandbox runtimes."""
        ...

    def needs(self, component: str) -> bool:
        """Whether every session needs this component: no session starts while its breaker is open."""
        ...

    def watch_breakers(self, changed: Callable[[BreakerStatus], None]) -> None:
        """Call `changed` whenever a circuit breaker changes."""
        ...

    def watch_engines(self, failed: Callable[[str, FailureReason], None]) -> None:
        """Call `failed` with the name of the engine and the reason for every turn that fails in it."""
        ...

    def watch_sessions(self, changed: Callable[[Session], None]) -> None:
        """Call `changed` for every stage that a session reaches."""
        ...

    def watch_room(self, changed: Callable[[], None]) -> None:
        """Call `changed` when the runner can accept more sessions, other than by the end of one."""
        ...

    async def use_store(self, segments: Segments, epoch: int) -> None:
        """Store trajectories as segments of this server's run. Called once, before anything else.

        A node that has worked for a later epoch refuses this one: two servers never drive one node.
        """
        ...

    async def probe(self) -> list[str]:
        """Use the default engine and sandbox once; returns one line per problem, with what to do about it."""
        ...

    # Tasks

    async def check(self, task: Task) -> None:
        """Raise `InvalidTask` for a task that can never run here."""
        ...

    @property
    def default_sandbox(self) -> SandboxKind:
        """The sandbox of tasks that set none."""
        ...

    async def prefetch(self, tasks: Sequence[Task], seconds: float) -> list[str]:
        """Prepare what the sessions of tasks need, for at most `seconds`; returns one line per task that fails."""
        ...

    def forget(self, task_id: str) -> None:
        """Free what is cached for a task: no more of its sessions will be submitted."""
        ...

    # Sessions

    def submit(self, task: Task, session: Session) -> Awaitable[SessionOutcome]:
        """Run a session to its end. Raises `NodeLost` if its node dies; cancelling the call ends the session."""
        ...

    def cancel(self, session_id: str, reason: EndReason = EndReason.CANCELLED) -> None:
        """Cancel a session; its outcome is returned as usual, with its finished turns and this end reason."""
        ...

    async def adopt(self, session_ids: Collection[str]) -> Mapping[str, Awaitable[SessionOutcome]]:
        """The sessions of an earlier server that still run, or have ended and are not stored, as `submit` returns them."""
        ...

    def recover(self, lost: Collection[str]) -> AsyncIterator[SessionOutcome]:
        """End what an earlier server left and was not adopted; yields lost sessions that left turns. Called once."""
        ...

    # Results

    async def store(self, requests: Sequence[StoreRequest]) -> list[Stored]:
        """Store the trajectories of ended sessions, durable on return.

        Raises `OSError` while the location is down: the same requests may then be made again.
        """
        ...

    async def discard(self, session_id: str) -> None:
        """Delete the runner's copy of a trajectory: the server has stored it."""
        ...

    async def erase(self, session_ids: Collection[str]) -> None:
        """Delete the logs of sessions that the server has removed."""
        ...

    async def read_log(self, session_id: str, name: str, most: int) -> SessionLog:
        """The last `most` bytes of one of a session's log files; raises `LogNotFound` if there is none of that name."""
        ...

    # Status and policy

    async def nodes(self) -> list[dict[str, Any]]:
        """Status of each node, for display."""
        ...

    def drain(self, name: str, drained: bool) -> None:
        """Stop or resume giving sessions to a node; raises `NodeNotFound`."""
        ...

    async def metrics(self) -> Iterable[Metric]:
        """Prometheus metrics of its engines."""
        ...

    async def pause(self, mode: PauseMode, deadline: float | None) -> None: ...

    async def resume(self, version: int | None) -> None: ...

    async def announce(self, version: int | None) -> int:
        """Note that a trainer has replaced the weights of the engines by its own means; returns the version.

        With `None`, the version is the one that the engines themselves report. Nothing is paused.
        """
        ...

    async def update_weights(self, folder: Path, version: int) -> None: ...

    def report_demand(self, waiting: int) -> None:
        """Tell how many sessions wait in the queue: a runner that can grow may do so. Called often."""
        ...

    async def close(self) -> None:
        """End running sessions and clean up."""
        ...
