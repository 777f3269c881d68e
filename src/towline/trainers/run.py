"""A whole training run: the learning rate's fall, the measurements on held-out tasks, and the figures of every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from towline.schema import ConsumerPace, Task, Trajectory
from towline.trainers.grpo import Grpo, Step, mean_reward, play
from towline.trainers.metrics import Metrics

RISE = 3
"""Updates in which the learning rate rises: the first steps of an adaptive optimiser are as long as its rate, whatever the
gradient, and at the full one they can take all the format out of a small model at once."""
FLOOR = 0.1
"""What is left of the learning rate at the end; it falls in a line."""


def share_of_rate(done: int, steps: int) -> float:
    """What of the learning rate the next update gets."""
    return max(FLOOR, 1 - done / steps) * min(1.0, (done + 1) / RISE)


@dataclass(frozen=True, slots=True)
class Measured:
    """Success on the held-out tasks under the weights of one step."""

    step: int
    sessions: int
    """Sessions that had been learned from."""
    success: float
    tasks: int
    """How many there were."""

    def as_json(self) -> dict[str, float]:
        return {"step": self.step, "sessions_used": self.sessions, "success": self.success, "tasks": self.tasks}


@dataclass
class Run:
    trainer: Grpo
    metrics: Metrics
    rate: float
    """The learning rate at the start."""
    held_out: Sequence[Task] = ()
    measure_at: frozenset[int] = frozenset()
    """Steps after which to measure, besides the start and the end."""
    doing: Callable[[str], None] = lambda what: None
    stepped: Callable[[Step], None] = lambda step: None
    measured: Callable[[Measured], None] = lambda measured: None
    measurements: list[Measured] = field(default_factory=list)
    played: list[Trajectory] = field(default_factory=list)
    """The sessions of the last measurement."""
    last: Step | None = None
    pacing: ConsumerPace | None = None
    """At the end of the run."""

    def run(self) -> None:
        """All steps that are left to do."""
        trainer = self.trainer
        steps = trainer.settings.steps
        trainer.doing = self.doing
        trainer.start()
        # A run that resumes measures the weights of its checkpoint again; what it wrote of them stays as it is.
        self._measure(write=not self.metrics.measured(trainer.learner.version))
        while trainer.learner.version < steps:
            for group in trainer.learner.optimiser.param_groups:
                group["lr"] = self.rate * share_of_rate(trainer.learner.version, steps)
            self.last = trainer.step()
            version = trainer.learner.version
            self.metrics.write(version, self.last.as_json())
            self.stepped(self.last)
            if version == steps or version in self.measure_at:
                self._measure()
        self.pacing = trainer.pacing()

    def _measure(self, *, write: bool = True) -> None:
        if not self.held_out:
            return
        trainer = self.trainer
        version = trainer.learner.version
        self.doing(f"measuring on {len(self.held_out)} held-out tasks")
        self.played = play(trainer.client, self.held_out, f"{trainer.settings.run}-success-v{version}")
        value = mean_reward(self.played)
        found = Measured(version, trainer.sessions, value, len(self.held_out))
        self.measurements.append(found)
        if write:
            self.metrics.write(version, {"sessions_used": found.sessions, "success": value})
        self.measured(found)

    def as_json(self) -> dict[str, Any]:
        return {
            "success": [one.as_json() for one in self.measurements],
            "last": self.last.as_json() if self.last is not None else None,
            "pacing": self.pacing.model_dump(mode="json") if self.pacing is not None else None,
        }
