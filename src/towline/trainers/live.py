"""What a person sees of a run while it goes on: at a terminal a view drawn anew, elsewhere a line for each update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from towline.trainers.grpo import Step
from towline.trainers.run import Measured, Run

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 32
"""Updates that a curve shows."""


class LiveView:
    """Follows a run from `attach` to the end of the `with` block."""

    def __init__(self, console: Console, steps: int, what: str = "held-out tasks"):
        self._console = console
        self._steps = steps
        self._what = what
        self._rewards: list[float] = []
        self._measured: list[float] = []
        self._last: Step | None = None
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

    def attach(self, run: Run) -> None:
        """Be told what the run does."""
        run.doing, run.stepped, run.measured = self.doing, self.stepped, self.measured
        done = run.trainer.learner.version
        self._progress.update(self._task, completed=done)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def doing(self, what: str) -> None:
        self._progress.update(self._task, description=what)

    def stepped(self, step: Step) -> None:
        self._last = step
        self._rewards.append(step.update.mean_reward)
        self._progress.update(self._task, completed=step.update.version)
        if self._live is None:
            text = f"update {step.update.version:>3} of {self._steps}: {step.line()}"
            self._console.print(text, highlight=False, soft_wrap=True)

    def measured(self, found: Measured) -> None:
        self._measured.append(found.success)
        text = f"after {found.sessions:>5,} sessions: {found.success:.1%} of {found.tasks} {self._what} right"
        self._console.print(text, highlight=False)

    def _drawn(self) -> Group:
        return Group(self._progress, *([self._figures(self._last)] if self._last is not None else []))

    def _figures(self, step: Step) -> Table:
        update = step.update
        table = Table.grid(padding=(0, 2))
        held_out = f"{self._measured[0]:.0%} → {self._measured[-1]:.0%}" if self._measured else "not measured"
        cells = (
            ("reward", f"{curve(self._rewards[-_WIDTH:])} {update.mean_reward:.2f}"),
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


def curve(values: Sequence[float]) -> str:
    """Values as a line of bars, between 0 and 1 or as far as they go beyond."""
    low, high = min((0.0, *values)), max((1.0, *values))
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)
