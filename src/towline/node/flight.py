"""A session under way: what the node knows of it besides what is recorded, from INIT to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from towline.errors import TowlineError
from towline.evaluators.base import Carried
from towline.node.preparing import Prepared
from towline.sandboxes.base import Sandbox
from towline.schema import EndReason, FailureReason, Session, SessionState, Task, Trajectory

T = TypeVar("T")


class Cancelled(TowlineError):
    """Somebody asked for the session to end."""


class StageTimeout(TowlineError):
    """A stage that is not the harness's own took longer than its budget."""

    failure = "stage_timeout"


@dataclass
class Flight:
    task: Task
    session: Session
    logs: Path
    """The session's folder on the host."""
    changed: Callable[[Session], None]
    """Told of every step."""
    since_opening: bool = False
    """Its waits for a circuit breaker are counted from the breaker's opening."""
    engines: tuple[str, ...] = ()
    """The components (`engine:NAME`) that its turns need."""
    prepared: Prepared | None = None
    sandbox: Sandbox | None = None
    gateway_id: str = ""
    """The session at the gateway; empty until there is one."""
    end_reason: EndReason | None = None
    exit_code: int | None = None
    memory_kills: int = 0
    """Processes that the sandbox's memory limit had ended when it was last asked."""
    sandbox_ended: bool = False
    """The sandbox itself has ended, and not by this node: nothing in it can be judged."""
    carried: Carried = field(default_factory=Carried)
    trajectory: Trajectory | None = None
    steps_given: int = 0
    """Steps of the task that the harness was started on."""
    judged: list[Mapping[str, float]] = field(default_factory=list)
    """What each step scored that was judged before the next."""
    unjudged: int | None = None
    """The step that could not be judged."""
    failures: list[Exception] = field(default_factory=list)
    """Why what was collected, or a step, could not be judged: once for each try."""
    notes: list[str] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

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
        """The result of the work, unless the session is cancelled or the stage's budget runs out first."""
        if self.cancelled.is_set():
            work.close()
            raise Cancelled("cancelled")
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self.cancelled.wait())
        try:
            await asyncio.wait((task, watch), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if watch.done():
                raise Cancelled("cancelled")
            raise StageTimeout(f"{stage} took longer than {seconds:g} seconds")
        finally:
            watch.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
