"""What stopping groups early cuts, saves and favours.

A group with `min_samples` is stopped once enough of its sessions are usable, so slow sessions are cut more often than fast
ones. `EarlyStop` reports what is known of that, over the tasks in which a session was cut, and nothing that is not: how long
a cut session would have run is estimated from finished sessions of its task that ran longer than it did, and where no
finished session did, it is not estimated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from towline.schema.base import Count, Model
from towline.schema.trajectory import Trajectory
from towline.schema.vocabulary import EndReason, SessionState


@dataclass(frozen=True, slots=True)
class SessionLength:
    """How long the last attempt at a sample was."""

    finished: bool
    """It ended by itself, or by a limit of its own."""
    cut: bool
    """It was stopped early, or never started."""
    turns: int
    trained_tokens: int
    seconds: float
    """Duration of its run; 0 if it did not start."""
    run_ended: bool = False
    """Its run had ended when it was cut."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> SessionLength:
        report, timings = trajectory.report, trajectory.timings
        return cls(
            finished=trajectory.state is SessionState.DONE,
            cut=trajectory.end_reason is EndReason.EARLY_STOP,
            turns=report.turns,
            trained_tokens=report.trained_tokens,
            seconds=timings.get("run", 0.0),
            run_ended="build" in timings,
        )


class MeanLength(Model):
    """The mean length of some sessions; `None` if there are none."""

    sessions: Count
    turns: float | None = None
    trained_tokens: float | None = None
    seconds: float | None = None
    """Of the run."""

    @classmethod
    def of(cls, lengths: Sequence[SessionLength]) -> Self:
        if not lengths:
            return cls(sessions=0)
        return cls(
            sessions=len(lengths),
            turns=fmean(one.turns for one in lengths),
            trained_tokens=fmean(one.trained_tokens for one in lengths),
            seconds=fmean(one.seconds for one in lengths),
        )


class EarlyStop(Model):
    """The sessions that were cut because their groups were complete without them, and their finished siblings."""

    cut: Count
    not_started: Count
    """Those of them that had not started to run."""
    cut_seconds: float
    """Run time of the cut sessions until they were stopped."""
    saved_seconds: float | None = None
    """Estimate of the run time that was saved; `None` if there is none. For a cut session that had run for t seconds: the
    mean of d - t over the finished sessions of its task with a run of d > t seconds."""
    unestimated: Count = 0
    """Cut sessions without an estimate: no finished session of their task ran longer. `saved_seconds` leaves them out."""
    finished: MeanLength
    """Finished sessions of the tasks in which a session was cut."""
    so_far: MeanLength
    """Cut sessions that had started to run, as far as they got: their full lengths are unknown, and no shorter."""

    @classmethod
    def of(cls, tasks: Iterable[Sequence[SessionLength]]) -> Self | None:
        """The report over tasks, each given by the last attempts at its samples; `None` if none was cut."""
        stopped = [task for task in tasks if any(one.cut for one in task)]
        if not stopped:
            return None
        lengths = [one for task in stopped for one in task]
        cut = [one for one in lengths if one.cut]
        left = [_left(one, task) for task in stopped for one in task if one.cut]
        known = [seconds for seconds in left if seconds is not None]
        return cls(
            cut=len(cut),
            not_started=sum(one.seconds == 0 for one in cut),
            cut_seconds=sum(one.seconds for one in cut),
            saved_seconds=sum(known) if known else None,
            unestimated=len(left) - len(known),
            finished=MeanLength.of([one for one in lengths if one.finished]),
            so_far=MeanLength.of([one for one in cut if one.seconds > 0]),
        )

    @property
    def favours_short(self) -> bool:
        """Whether cut sessions, as far as they got, were longer on average than finished ones: a bias beyond doubt."""
        so_far, finished = self.so_far.seconds, self.finished.seconds
        return so_far is not None and finished is not None and so_far > finished


def _left(cut: SessionLength, task: Sequence[SessionLength]) -> float | None:
    """The run time that a cut session had left, estimated from its siblings; `None` if none of them ran longer."""
    if cut.run_ended:
        return 0.0
    longer = [one.seconds - cut.seconds for one in task if one.finished and one.seconds > cut.seconds]
    return fmean(longer) if longer else None
