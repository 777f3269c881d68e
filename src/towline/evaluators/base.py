"""The evaluator interface: scores a session's work in a sandbox that the agent never touched.

An evaluator works in two steps. `collect` reads the agent's sandbox once every process of the agent is dead, and takes out
what is scored. `evaluate` scores it in a clean sandbox, which gets the verifier's files only then. An evaluator that cannot
determine a score raises `EvaluationError`; it never turns that into a score of 0. Whether the agent or the infrastructure
caused the failure is decided by the node (`towline.node.evaluation`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from towline.evaluators.hostile.failures import AgentCaused, EvaluationError
from towline.sandboxes.base import Sandbox
from towline.schema import Reward, Task, Trajectory

__all__ = [
    "AgentCaused",
    "EvalContext",
    "EvalInputs",
    "EvaluationError",
    "Evaluator",
    "EvaluatorOptions",
    "RunOutcome",
    "Seconds",
    "StepEvaluator",
]


@dataclass(slots=True)
class EvalInputs:
    """What the evaluation gets from the agent's sandbox."""

    archives: Mapping[str, bytes] = field(default_factory=dict)
    """By path inside the sandbox, a tar archive of its contents (`Sandbox.get`)."""
    patch: bytes = b""
    notes: list[str] = field(default_factory=list)
    """For the session's notes: what was left out, and files of the verifier's that the agent changed."""
    findings: list[tuple[str, str]] = field(default_factory=list)
    """For the suspicion report: a name of `suspicion.Cheat`, and what was found."""
    loaded: list[str] = field(default_factory=list)
    """Paths that an interpreter or a test runner may load by their name."""
    native: tuple[str, ...] = ()
    """Names of modules that the clean sandbox has in the same folders; known once the inputs are placed."""


@dataclass(slots=True)
class RunOutcome:
    """How the run of a session ended, as far as an evaluator may know."""

    exit_code: int | None
    """`None` if it was cut short."""
    end_reason: str
    answer: str
    """The text of the last reply of the main conversation."""
    trajectory: Trajectory
    steps_given: int | None = None
    """How many of the task's steps were started; `None` for a task without steps."""
    judged: Sequence[Mapping[str, float]] = ()
    """Scores of the steps that were evaluated before the next one began."""


class EvalContext(Protocol):
    """What the node provides to an evaluation."""

    @property
    def task(self) -> Task: ...

    @property
    def logs(self) -> Path:
        """A folder on the host, kept with the session, for the verifier's output."""
        ...

    @property
    def findings(self) -> list[tuple[str, str]]:
        """For the suspicion report, besides those of `EvalInputs`."""
        ...

    def sandbox(self) -> AbstractAsyncContextManager[Sandbox]:
        """A clean sandbox with the task's environment set up and no network; destroyed when the block ends."""
        ...

    def agent_sandbox(self) -> Sandbox | None:
        """The agent's own sandbox; in `evaluate` it exists only for evaluators with `shared`."""
        ...


class Evaluator(Protocol):
    """One way to score."""

    kind: str

    @property
    def lowest(self) -> float:
        """The lowest score it gives; the score of an agent that makes its own evaluation fail."""
        ...

    @property
    def shared(self) -> bool:
        """Whether the task asks to be evaluated in the agent's own sandbox."""
        ...

    @property
    def needs_sandbox(self) -> bool:
        """Whether `evaluate` uses a clean sandbox, so that one is warmed in time."""
        ...

    def leaks(self) -> tuple[str, ...]:
        """Paths that must not exist in the sandbox while the agent runs (`/tests`, `/solution`)."""
        ...

    async def collect(self, sandbox: Sandbox, task: Task) -> EvalInputs:
        """Take what is scored out of the agent's sandbox; its processes are dead."""
        ...

    async def evaluate(self, context: EvalContext, outcome: RunOutcome, inputs: EvalInputs) -> Reward: ...


@runtime_checkable
class StepEvaluator(Protocol):
    """An evaluator that scores each step of a task before the next step begins."""

    async def evaluate_step(self, context: EvalContext, index: int) -> tuple[Mapping[str, float], bool]:
        """The scores of a step, from the agent's own sandbox as the step left it, and whether the next step may begin.

        The agent's processes are dead; no file of the verifier may remain in its sandbox afterwards.
        """
        ...


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class EvaluatorOptions(BaseModel):
    """The options that every evaluator shares. Unknown options are refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    kind: str
    oracle: bool = False
    """The session runs the task's own solution, whose files may therefore be in the agent's sandbox."""
    lowest: FiniteFloat = 0.0
    """The lowest score this evaluator gives; the score of an agent that makes its own evaluation fail."""
