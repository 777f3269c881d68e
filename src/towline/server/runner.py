"""What the scheduler needs of whoever runs sessions: one node in this process, or many on a cluster.

A runner takes a session and gives back how it ended. It keeps nothing that the server relies on after a crash: what was
under way is asked for once, by `recover`, and ended.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from towline.engines.base import PauseMode
from towline.errors import TowlineError
from towline.schema import BreakerStatus, FailureReason, Session, Task, Trajectory


class NodeLost(TowlineError):
    """The node that ran a session is gone, and the session with it."""

    failure = "node"

    def __init__(self, reason: str, *, sessions: int = 1):
        super().__init__(reason)
        self.sessions = sessions
        """How many sessions the node was running."""


@dataclass(frozen=True, slots=True)
class SessionLog:
    """The end of a log file."""

    data: bytes
    left_out: int
    """Bytes before it."""
    names: list[str]
    """Every log file of the session."""


class NoLog(TowlineError):
    """The session has no log file of that name; `names` are those that it has."""

    def __init__(self, names: list[str]):
        super().__init__("no such log file")
        self.names = names


class Outcome(Protocol):
    """A session at its end."""

    @property
    def session(self) -> Session: ...

    @property
    def trajectory(self) -> Trajectory: ...

    @property
    def usable(self) -> bool:
        """Whether a trainer can learn from it."""
        ...

    @property
    def hopeless(self) -> bool:
        """It failed for a reason that trying again does not change."""
        ...

    @property
    def blameless(self) -> bool:
        """It failed in an outage of an engine or a sandbox runtime: trying again uses up no attempt."""
        ...


class Runner(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def capacity(self) -> int:
        """How many sessions it wants to hold, those that wait inside it included."""
        ...

    @property
    def version(self) -> int:
        """The policy version of the weights in use."""
        ...

    @property
    def trouble(self) -> str:
        """Why no session can run any more until the server is started again; empty while they can."""
        ...

    @property
    def breakers(self) -> Sequence[BreakerStatus]:
        """The circuit breakers of its engines and sandbox runtimes."""
        ...

    def needs(self, component: str) -> bool:
        """Whether no session can do without this component: nothing is started while its breaker is open."""
        ...

    def watch_breakers(self, changed: Callable[[BreakerStatus], None]) -> None:
        """Tell of every change of a circuit breaker."""
        ...

    def watch_engines(self, failed: Callable[[str, FailureReason], None]) -> None:
        """Tell of every turn that an engine failed, by the engine's name."""
        ...

    async def probe(self) -> list[str]:
        """Use the default engine and sandbox once; one line for each that does not work, with what to do about it."""
        ...

    async def check(self, task: Task) -> None:
        """Raise `InvalidTask` for a task that could never run here."""
        ...

    def reaches(self, task: Task) -> list[str]:
        """The fields of a task that use the machine it runs on, beyond a sandbox. Runs nothing of the task's."""
        ...

    def watch(self, changed: Callable[[Session], None]) -> None:
        """Tell of every stage that a session comes to."""
        ...

    def submit(self, task: Task, session: Session) -> Awaitable[Outcome]:
        """Run a session to its end. Raises `NodeLost` if the node is gone; cancelling the call ends the session."""
        ...

    def cancel(self, session_id: str) -> None:
        """End a session early; its outcome comes as usual, with the turns that it finished."""
        ...

    def forget(self, task_id: str) -> None:
        """No more sessions of this task will come."""
        ...

    def recover(self, lost: Collection[str]) -> AsyncIterator[Trajectory]:
        """End everything that an earlier server left; what is there of the sessions named. Called once, before `submit`."""
        ...

    async def discard(self, session_id: str) -> None:
        """The session's trajectory is stored: the runner need not keep its own."""
        ...

    async def erase(self, session_ids: Collection[str]) -> None:
        """The sessions are forgotten: so may be what the runner kept of them, their logs."""
        ...

    async def read_log(self, session_id: str, name: str, most: int) -> SessionLog:
        """The end of one of a session's log files, `most` bytes of it; raises `NoLog` if there is none of that name."""
        ...

    def nodes(self) -> list[dict[str, Any]]:
        """What runs where, for people."""
        ...

    async def pause(self, mode: PauseMode, deadline: float | None) -> None: ...

    async def resume(self, version: int | None) -> None: ...

    async def update_weights(self, folder: Path, version: int) -> None: ...

    async def close(self) -> None:
        """End what is under way, and leave nothing behind."""
        ...


class InvalidTask(TowlineError):
    """A task that could never run; `field` is the path of what is wrong in it."""

    def __init__(self, field: str, reason: str):
        super().__init__(reason)
        self.field = field
