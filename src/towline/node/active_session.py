"""An active session: what the node knows of it from its submission to its end, besides what is recorded."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from towline.common.budget import Budget, charged_to
from towline.errors import TowlineError
from towline.evaluators.base import EvalInputs
from towline.node.environment import PreparedTask
from towline.sandboxes.base import Sandbox, SandboxError
from towline.schema import EndReason, FailureReason, Session, SessionState, Task, Trajectory

T = TypeVar("T")


class SessionCancelled(TowlineError):
    """The session was cancelled."""


class StageTimeout(TowlineError):
    """A stage other than RUN exceeded its time limit."""

    failure = "stage_timeout"


@dataclass
class ActiveSession:
    """The state of one session on the node."""

    task: Task
    session: Session
    logs: Path
    """The session's folder on the host."""
    changed: Callable[[Session], None]
    """Called with every change of its state."""
    since_opening: bool = False
    """Whether its waits for a circuit breaker are counted from the breaker's opening."""
    engines: tuple[str, ...] = ()
    """The components (`engine:NAME`) that its turns need."""
    prepared: PreparedTask | None = None
    sandbox: Sandbox | None = None
    gateway_id: str = ""
    """The id of its session at the gateway; empty until there is one."""
    end_reason: EndReason | None = None
    exit_code: int | None = None
    memory_kills: int = 0
    """Number of processes that the sandbox's memory limit had killed at the last check."""
    sandbox_ended: bool = False
    """The sandbox itself has ended, and not by this node: nothing in it can be scored."""
    inputs: EvalInputs = field(default_factory=EvalInputs)
    trajectory: Trajectory | None = None
    steps_given: int = 0
    """Number of the task's steps that were started."""
    step_scores: list[Mapping[str, float]] = field(default_factory=list)
    """Scores of the steps that were evaluated before the next one."""
    unscored_step: int | None = None
    """The step that could not be evaluated."""
    findings: list[tuple[str, str]] = field(default_factory=list)
    """For the suspicion report: a name of `evaluators.suspicion.Cheat`, and what was found."""
    eval_failures: list[Exception] = field(default_factory=list)
    """Why the collection or the evaluation failed, one error per try."""
    notes: list[str] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    cancel_reason: EndReason = EndReason.CANCELLED
    """Its end reason, once `cancelled` is set."""

    def cancel(self, reason: EndReason = EndReason.CANCELLED) -> None:
        """End the session as CANCELLED; the first reason counts."""
        if not self.cancelled.is_set():
            self.cancel_reason = reason
            self.cancelled.set()

    def require_sandbox(self) -> Sandbox:
        if self.sandbox is None:
            raise SandboxError(f"session {self.session.session_id} has no sandbox")
        return self.sandbox

    def advance(self, state: SessionState, *, error: str | None = None, failure: FailureReason | None = None) -> None:
        self.session = self.session.advance(
            state, at=time.time(), end_reason=self.end_reason, error=error, failure=failure
        )
        self.changed(self.session)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.timings[stage] = self.timings.get(stage, 0.0) + time.perf_counter() - began

    async def within(self, work: Coroutine[Any, Any, T], seconds: float | None, stage: str) -> T:
        """The result of the work, unless the session is cancelled or the stage's time limit expires first.

        Time that the work spends in `uncharged` does not count.
        """
        if self.cancelled.is_set():
            work.close()
            raise SessionCancelled("the session was cancelled")
        budget = Budget(math.inf if seconds is None else seconds)
        with charged_to(budget):
            task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self.cancelled.wait())
        used_up = asyncio.ensure_future(budget.used_up())
        try:
            await asyncio.wait((task, watch, used_up), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if watch.done():
                raise SessionCancelled("the session was cancelled")
            raise StageTimeout(f"{stage} timed out after {seconds:g} seconds")
        finally:
            watch.cancel()
            used_up.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
