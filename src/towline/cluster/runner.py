"""`Runner`: what the server needs to run sessions, on one node in this process or on many machines.

A runner takes a session and returns how it ended. The server does not rely on anything that a runner keeps over a crash:
`recover` is called once at the start, and ends what was still running.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from towline.engines.base import PauseMode
from towline.errors import TowlineError
from towline.schema import BreakerStatus, EndReason, FailureReason, Session, Task, Trajectory


class NodeLost(TowlineError):
    """The node that ran a session died, and the session with it."""

    failure = "node"

    def __init__(self, reason: str, *, sessions: int = 1):
        super().__init__(reason)
        self.sessions = sessions
        """How many sessions the node was running."""


@dataclass(frozen=True, slots=True)
class SessionLog:
    """The last bytes of a log file."""

    data: bytes
    left_out: int
    """Bytes before `data`."""
    names: list[str]
    """Names of all log files of the session."""


class LogNotFound(TowlineError):
    """The session has no log file of that name; `names` are the existing ones."""

    def __init__(self, names: list[str]):
        super().__init__("no such log file")
        self.names = names


class SessionOutcome(Protocol):
    """An ended session, as a runner returns it."""

    @property
    def session(self) -> Session: ...

    @property
    def trajectory(self) -> Trajectory: ...

    @property
    def hopeless(self) -> bool:
        """A retry would fail in the same way."""
        ...

    @property
    def blameless(self) -> bool:
        """It failed in an outage of an engine or a sandbox runtime: the attempt does not count."""
        ...


class Runner(Protocol):
    """Runs sessions on one or many nodes."""

    @property
    def name(self) -> str: ...

    @property
    def capacity(self) -> int:
        """How many sessions it accepts at once, including those that wait inside it."""
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

    async def probe(self) -> list[str]:
        """Use the default engine and sandbox once; returns one line per problem, with what to do about it."""
        ...

    async def check(self, task: Task) -> None:
        """Raise `InvalidTask` for a task that can never run here."""
        ...

    def host_access(self, task: Task) -> list[str]:
        """The fields of a task that reach outside the sandbox, to the machine it runs on. Runs no code of the task."""
        ...

    def watch_sessions(self, changed: Callable[[Session], None]) -> None:
        """Call `changed` for every stage that a session reaches."""
        ...

    def submit(self, task: Task, session: Session) -> Awaitable[SessionOutcome]:
        """Run a session to its end. Raises `NodeLost` if its node dies; cancelling the call ends the session."""
        ...

    def cancel(self, session_id: str, reason: EndReason = EndReason.CANCELLED) -> None:
        """Cancel a session; its outcome is returned as usual, with its finished turns and this end reason."""
        ...

    def forget(self, task_id: str) -> None:
        """Free what is cached for a task: no more of its sessions will be submitted."""
        ...

    def recover(self, lost: Collection[str]) -> AsyncIterator[Trajectory]:
        """End what an earlier server left running; yields trajectories of lost sessions. Called once, before `submit`."""
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

    def nodes(self) -> list[dict[str, Any]]:
        """Status of each node, for display."""
        ...

    async def pause(self, mode: PauseMode, deadline: float | None) -> None: ...

    async def resume(self, version: int | None) -> None: ...

    async def update_weights(self, folder: Path, version: int) -> None: ...

    async def close(self) -> None:
        """End running sessions and clean up."""
        ...


class InvalidTask(TowlineError):
    """A task that can never run; `field` is the path of the invalid value."""

    def __init__(self, field: str, reason: str):
        super().__init__(reason)
        self.field = field
