"""A whole training run: learning-rate schedule, held-out measurements, metrics of every step, and its live display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from towline.schema import ConsumerPace, Task, Trajectory
from towline.trainers.grpo.loop import Grpo, TrainingStep, mean_reward, play
from towline.trainers.grpo.metrics import MetricsLog

WARMUP_UPDATES = 3
"""Updates of learning-rate warm-up. An adaptive optimiser's first steps are as long as its rate whatever the gradient; at
the full rate they can destroy a small model's output format at once."""
FINAL_RATE_SHARE = 0.1
"""Share of the learning rate left at the end of its linear decay."""


def rate_factor(done: int, steps: int) -> float:
    """The next update's share of the learning rate."""
    return max(FINAL_RATE_SHARE, 1 - done / steps) * min(1.0, (done + 1) / WARMUP_UPDATES)


@dataclass(frozen=True, slots=True)
class HeldOutMeasurement:
    """Success on the held-out tasks under the weights of one step."""

    step: int
    sessions: int
    """Sessions used for training up to this step."""
    success: float
    """Mean reward."""
    tasks: int
    """Number of held-out tasks."""

    def as_json(self) -> dict[str, float]:
        return {"step": self.step, "sessions_used": self.sessions, "success": self.success, "tasks": self.tasks}


@dataclass
class TrainingRun:
    trainer: Grpo
    metrics: MetricsLog
    rate: float
    """Peak learning rate."""
    held_out: Sequence[Task] = ()
    measure_at: frozenset[int] = frozenset()
    """Steps after which to measure, besides the start and the end."""
    on_status: Callable[[str], None] = lambda status: None
    on_step: Callable[[TrainingStep], None] = lambda step: None
    on_measurement: Callable[[HeldOutMeasurement], None] = lambda measurement: None
    measurements: list[HeldOutMeasurement] = field(default_factory=list)
    held_out_trajectories: list[Trajectory] = field(default_factory=list)
    """Trajectories of the last measurement."""
    last: TrainingStep | None = None
    """The last update of this process."""
    pacing: ConsumerPace | None = None
    """Pacing statistics at the end of the run."""

    def run(self) -> None:
        """Run all remaining steps."""
        trainer = self.trainer
        steps = trainer.settings.steps
        trainer.doing = self.on_status
        trainer.start()
        # A resumed run measures its checkpoint's weights again, but leaves what it already wrote about them.
        self._measure(write=not self.metrics.measured(trainer.learner.version))
        while trainer.learner.version < steps and not trainer.exhausted:
            for group in trainer.learner.optimiser.param_groups:
                group["lr"] = self.rate * rate_factor(trainer.learner.version, steps)
            self.last = trainer.step()
            version = trainer.learner.version
            self.metrics.write(version, self.last.as_json())
            self.on_step(self.last)
            if version == steps or version in self.measure_at or trainer.exhausted:
                self._measure()
        self.pacing = trainer.pacing()

    def _measure(self, *, write: bool = True) -> None:
        if not self.held_out:
            return
        trainer = self.trainer
        version = trainer.learner.version
        self.on_status(f"measuring on {len(self.held_out)} held-out tasks")
        name = f"{trainer.settings.run}-success-v{version}"
        self.held_out_trajectories = play(trainer.client, self.held_out, name)
        success = mean_reward(self.held_out_trajectories)
        measurement = HeldOutMeasurement(version, trainer.sessions, success, len(self.held_out))
        self.measurements.append(measurement)
        if write:
            self.metrics.write(version, {"sessions_used": trainer.sessions, "success": success})
        self.on_measurement(measurement)

    def as_json(self) -> dict[str, Any]:
        return {
            "success": [one.as_json() for one in self.measurements],
            "last": self.last.as_json() if self.last is not None else None,
            "pacing": self.pacing.model_dump(mode="json") if self.pacing is not None else None,
        }


_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 32
"""Updates that a sparkline shows."""


class LiveView:
    """Follows a run from `attach` to the end of the `with` block."""

    def __init__(self, console: Console, steps: int, what: str = "held-out tasks"):
        self._console = console
        self._steps = steps
        self._what = what
        self._rewards: list[float] = []
        self._measured: list[float] = []
        self._last: TrainingStep | None = None
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("starting", total=steps)
        self._live = (
            Live(console=console, get_renderable=self._drawn, refresh_per_second=4, transient=True)
            if console.is_terminal
            else None
        )

    def attach(self, run: TrainingRun) -> None:
        """Subscribe to the run's events."""
        run.on_status, run.on_step, run.on_measurement = self.on_status, self.on_step, self.on_measurement
        done = run.trainer.learner.version
        self._progress.update(self._task, completed=done)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def on_status(self, status: str) -> None:
        self._progress.update(self._task, description=status)

    def on_step(self, step: TrainingStep) -> None:
        self._last = step
        self._rewards.append(step.update.mean_reward)
        self._progress.update(self._task, completed=step.update.version)
        if self._live is None:
            text = f"update {step.update.version:>3} of {self._steps}: {step.line()}"
            self._console.print(text, highlight=False, soft_wrap=True)

    def on_measurement(self, measurement: HeldOutMeasurement) -> None:
        self._measured.append(measurement.success)
        text = (
            f"after {measurement.sessions:>5,} sessions: {measurement.success:.1%} of {measurement.tasks} "
            f"{self._what} right"
        )
        self._console.print(text, highlight=False)

    def _drawn(self) -> Group:
        return Group(self._progress, *([self._figures(self._last)] if self._last is not None else []))

    def _figures(self, step: TrainingStep) -> Table:
        update = step.update
        table = Table.grid(padding=(0, 2))
        held_out = f"{self._measured[0]:.0%} → {self._measured[-1]:.0%}" if self._measured else "not measured"
        cells = (
            ("reward", f"{sparkline(self._rewards[-_WIDTH:])} {update.mean_reward:.2f}"),
            ("held out", held_out),
            ("entropy", f"{update.entropy:.3f}"),
            ("staleness", f"{update.staleness:.1f} versions, {step.dropped} groups dropped"),
            ("mismatch KL", f"{update.mismatch_kl:.1e}"),
            ("max |Δlogp|", f"{update.worst_logprob:.1e}"),
            ("sessions", f"{step.sessions:,}" + (f", {step.incomplete} groups failed" if step.incomplete else "")),
            ("seconds", f"waited {step.waited:.1f}, learned {step.learned:.1f}, pushed {step.pushed:.1f}"),
        )
        for (left, value), (right, other) in zip(cells[::2], cells[1::2], strict=True):
            table.add_row(Text(left, "dim"), Text(value), Text(right, "dim"), Text(other))
        return table


def sparkline(values: Sequence[float]) -> str:
    """Values as a line of bars, scaled to [0, 1] or to a wider range if they exceed it."""
    low, high = min((0.0, *values)), max((1.0, *values))
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)
