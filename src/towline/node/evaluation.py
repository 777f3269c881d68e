"""What the node lends to an evaluator: clean sandboxes, the task, and a folder for its logs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from towline.evaluators.base import Outcome
from towline.node.flight import Flight
from towline.node.furnish import furnish
from towline.node.preparing import Prepared
from towline.sandboxes.base import Sandbox
from towline.schema import Task, Trajectory, TurnRole


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
        folder = self._flight.logs / "verifier"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextlib.asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        made = await self._prepared.pool.acquire(self._prepared.evaluate)
        try:
            await furnish(made, self._prepared.environment, self._flight.logs / "verifier-setup.log")
            yield made
        finally:
            await made.destroy()

    def used(self) -> Sandbox | None:
        return self._flight.sandbox


def outcome_of(flight: Flight, trajectory: Trajectory) -> Outcome:
    return Outcome(
        exit_code=flight.exit_code,
        end_reason=str(flight.end_reason or ""),
        answer=last_answer(trajectory),
        trajectory=trajectory,
        steps_given=flight.steps_given if flight.task.steps else None,
        judged=tuple(flight.judged),
    )


def last_answer(trajectory: Trajectory) -> str:
    """The last thing said in the main conversation."""
    for turn in reversed(trajectory.turns):
        if turn.role is TurnRole.MAIN and turn.reply.get("text"):
            return str(turn.reply["text"])
    return ""
