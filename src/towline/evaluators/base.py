"""The evaluator interface: what a session's work is worth, found out where the agent never was.

An evaluator works in two steps. `collect` looks into the agent's sandbox when every process of the agent is dead, and
takes out what is to be judged. `evaluate` judges it in a sandbox that the agent never touched, which gets the verifier's
files only now. An evaluator that cannot come to a score raises `EvaluationError`; it never turns that into a score of 0.
Whether the agent or the infrastructure caused it is found out by the node (`towline.node.judging`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from towline.errors import TowlineError
from towline.sandboxes.base import Sandbox
from towline.schema import Reward, Task, Trajectory


class EvaluationError(TowlineError):
    """The evaluator could not come to a score."""

    failure = "evaluator"


@dataclass(slots=True)
class Carried:
    """What is taken from the agent's sandbox into the evaluation."""

    archives: Mapping[str, bytes] = field(default_factory=dict)
    """Path inside → tar of what was there (`Sandbox.get`)."""
    patch: bytes = b""
    notes: list[str] = field(default_factory=list)
    """What a person should know: files that the verifier relies on and the agent changed, and such."""


@dataclass(slots=True)
class Outcome:
    """How the run of a session ended, as an evaluator may know it."""

    exit_code: int | None
    """`None` if it was cut short."""
    end_reason: str
    answer: str
    """The last thing the agent said: the text of the last reply of the main conversation."""
    trajectory: Trajectory
    steps_given: int | None = None
    """How many of the task's steps the agent was given; `None` for a task that has none."""
    judged: Sequence[Mapping[str, float]] = ()
    """What the steps scored that were judged before the next one began."""


class Bench(Protocol):
    """What the node lends to an evaluation."""

    @property
    def task(self) -> Task: ...

    @property
    def logs(self) -> Path:
        """A folder on the host that is kept with the session: for the verifier's output."""
        ...

    def sandbox(self) -> AbstractAsyncContextManager[Sandbox]:
        """A clean sandbox of the task's environment (files and set-up done, network none), destroyed when the block ends."""
        ...

    def used(self) -> Sandbox | None:
        """The agent's own sandbox: in `evaluate` still there only for evaluators with `shared`."""
        ...


class Evaluator(Protocol):
    """One way to score."""

    kind: str

    @property
    def lowest(self) -> float:
        """The lowest score it gives: that of an agent that makes its own evaluation fail."""
        ...

    @property
    def shared(self) -> bool:
        """Whether the task itself asks to be judged in the agent's own sandbox."""
        ...

    @property
    def needs_sandbox(self) -> bool:
        """Whether `evaluate` asks for a clean sandbox, so that one is warmed in time."""
        ...

    def leaks(self) -> tuple[str, ...]:
        """Paths inside that must not exist while the agent runs (`/tests`, `/solution`)."""
        ...

    async def collect(self, sandbox: Sandbox, task: Task) -> Carried:
        """Take what is to be judged out of the agent's sandbox; its processes are dead."""
        ...

    async def evaluate(self, bench: Bench, outcome: Outcome, carried: Carried) -> Reward: ...


@runtime_checkable
class JudgesSteps(Protocol):
    """An evaluator that scores each step of a task before the next one begins."""

    async def judge_step(self, bench: Bench, index: int) -> tuple[Mapping[str, float], bool]:
        """What a step scored, with the agent's own sandbox as it is at its end, and whether the next one may begin.

        The agent's processes are dead; nothing of the verifier's may be in its sandbox afterwards.
        """
        ...
