"""What the node lends to an evaluator: clean sandboxes, the task, and a folder for its logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from towline.errors import TowlineError
from towline.evaluators.base import Outcome
from towline.node.flight import Flight
from towline.node.furnish import furnish
from towline.node.preparing import Prepared
from towline.sandboxes.base import Sandbox, SandboxError, Spec
from towline.schema import EndReason, Task, Trajectory
from towline.tokens.roles import last_answer

log = logging.getLogger("towline.node")


class CleanSandboxError(SandboxError):
    """A clean sandbox for an evaluation cannot be made: never the agent's doing, which is not in it yet."""


class NodeBench:
    """The `Bench` of one evaluation."""

    def __init__(self, flight: Flight, prepared: Prepared):
        self._flight = flight
        self._prepared = prepared

    @property
    def task(self) -> Task:
        return self._flight.task

    @property
    def logs(self) -> Path:
        return self._folder("verifier")

    def _folder(self, name: str) -> Path:
        folder = self._flight.logs / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextlib.asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        made = await self._clean(self._prepared.evaluate, "verifier-setup.log")
        try:
            yield made
        finally:
            await self._end(made)

    async def _end(self, made: Sandbox) -> None:
        """Destroy a sandbox; a score that is known by then stays, whatever becomes of its processes."""
        try:
            await made.destroy()
        except (TowlineError, OSError) as error:
            log.error("a sandbox of session %s was not destroyed: %s", self._flight.session.session_id, error)

    async def _clean(self, spec: Spec, log: str) -> Sandbox:
        try:
            made = await self._prepared.pool.acquire(spec)
        except (TowlineError, OSError) as error:
            raise CleanSandboxError(f"a clean sandbox for the evaluation cannot be made: {error}") from error
        try:
            await furnish(made, self._prepared.environment, self._flight.logs / log)
        except (TowlineError, OSError) as error:
            await self._end(made)
            raise CleanSandboxError(f"a clean sandbox for the evaluation cannot be set up: {error}") from error
        except BaseException:
            await self._end(made)
            raise
        return made

    def used(self) -> Sandbox | None:
        return self._flight.sandbox


class ControlBench(NodeBench):
    """The `Bench` of a control run: a sandbox that no agent touched stands in for the agent's."""

    def __init__(self, flight: Flight, prepared: Prepared):
        super().__init__(flight, prepared)
        self._untouched: Sandbox | None = None

    @property
    def logs(self) -> Path:
        return self._folder("control")

    async def open(self) -> None:
        """Make the sandbox that stands in for the agent's, with what came with each step that the agent was given."""
        self._untouched = made = await self._clean(self._prepared.run, "control-setup.log")
        for step in self.task.steps[: self._flight.steps_given]:
            await furnish(made, step, self._flight.logs / "control-setup.log")

    def used(self) -> Sandbox | None:
        return self._untouched

    async def close(self) -> None:
        made, self._untouched = self._untouched, None
        if made is not None:
            await self._end(made)


def outcome_of(flight: Flight, trajectory: Trajectory) -> Outcome:
    return Outcome(
        exit_code=flight.exit_code,
        end_reason=str(flight.end_reason or ""),
        answer=last_answer(trajectory),
        trajectory=trajectory,
        steps_given=flight.steps_given if flight.task.steps else None,
        judged=tuple(flight.judged),
    )


def outcome_of_nothing(flight: Flight, trajectory: Trajectory) -> Outcome:
    """The outcome of an agent that ended well after one turn in which it said nothing."""
    turns = [turn.model_copy(update={"reply": {"text": ""}, "messages": []}) for turn in trajectory.turns[:1]]
    empty = trajectory.model_copy(update={"turns": turns, "traces": [], "end_reason": EndReason.EXITED})
    return Outcome(
        exit_code=0,
        end_reason=EndReason.EXITED.value,
        answer="",
        trajectory=empty,
        steps_given=flight.steps_given if flight.task.steps else None,
        judged=tuple(flight.judged),
    )
