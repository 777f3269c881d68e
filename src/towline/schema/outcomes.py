"""How a session ended: one summary, one definition of *usable*, and the share of infrastructure failures in a run.

`SessionSummary` is an ended session without its tokens. The service's results, the ledger of a run and the scheduler's
bookkeeping are this summary with fields of their own. `unusable_reason` is the only definition of usable. Failed sessions
are in no score and no training row; a run in which too many of them failed says nothing about the policy, so the commands
that run many sessions end with an error above a stated share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import Field

from towline.common.text import one_line
from towline.schema.base import Count, Id, Model
from towline.schema.trajectory import Trajectory
from towline.schema.vocabulary import EndReason, FailureReason, RewardStatus, SessionState


class SessionSummary(Model):
    """A session that has ended, without its tokens."""

    session_id: Id
    task_id: Id
    sample: Count
    attempt: int
    state: SessionState
    end_reason: EndReason | None = None
    failure: FailureReason | None = None
    """Why it is FAILED or LOST."""
    error: str | None = None
    reward: float | None = None
    """`None` while there is no score: never to be read as 0."""
    reward_status: RewardStatus | None = None
    usable: bool
    """Whether a trainer can learn from it: see `unusable_reason`."""
    turns: Count
    trained_tokens: Count
    seconds: float = 0.0
    """Run time of the harness; 0 if it did not start."""
    suspicion: list[str] = Field(default_factory=list)
    """Names of what looks like a cheat (`Reward.suspicion`)."""

    @classmethod
    def of(cls, trajectory: Trajectory, *, sample: int = 0, attempt: int = 1, **fields: Any) -> Self:
        """The summary of a trajectory; `fields` are those of a subclass."""
        reward, report = trajectory.reward, trajectory.report
        return cls(
            session_id=trajectory.session_id,
            task_id=trajectory.group_id,
            sample=sample,
            attempt=attempt,
            state=trajectory.state,
            end_reason=trajectory.end_reason,
            failure=trajectory.failure,
            error=trajectory.error or (reward.error if reward is not None else None),
            reward=reward.score if reward is not None else None,
            reward_status=reward.status if reward is not None else None,
            usable=unusable_reason(trajectory) is None,
            turns=report.turns,
            trained_tokens=report.trained_tokens,
            seconds=trajectory.timings.get("run", 0.0),
            suspicion=list(dict.fromkeys(one.name for one in reward.suspicion)) if reward is not None else [],
            **fields,
        )


def tally_suspicions(sessions: Iterable[SessionSummary]) -> dict[str, int]:
    """How many sessions have each finding of the suspicion report, the most frequent first."""
    counts = Counter(name for session in sessions for name in session.suspicion)
    return dict(counts.most_common())


def unusable_reason(ended: Trajectory | SessionSummary, *, need_score: bool = False) -> str | None:
    """Why a trainer cannot learn from an ended session; `None` if it can.

    A `FailureReason`, `cancelled`, `unscored` (its evaluator gave no score; with `need_score` also if there was none), or
    `untrained` (no trained tokens).
    """
    if isinstance(ended, Trajectory):
        score, status = (ended.reward.score, ended.reward.status) if ended.reward is not None else (None, None)
        trained = ended.report.trained_tokens
    else:
        score, status, trained = ended.reward, ended.reward_status, ended.trained_tokens
    if ended.failure is not None:
        return ended.failure.value
    if ended.state is SessionState.CANCELLED:
        return "cancelled"
    if ended.state is not SessionState.DONE:
        return FailureReason.INTERNAL.value
    if score is None and (status is not None or need_score):
        return "unscored"
    return None if trained else "untrained"


@dataclass
class FailureTally:
    """Failures among the sessions of a run."""

    sessions: int = 0
    """Sessions that ended, failed ones included; cancelled ones are not counted."""
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """The latest error for each reason."""

    def add_ended(self, count: int = 1) -> None:
        """Count sessions that ended without a failure."""
        self.sessions += count

    def add_failed(self, reason: FailureReason | None, error: str | None) -> None:
        name = (reason or FailureReason.INTERNAL).value
        self.sessions += 1
        self.reasons[name] += 1
        self.examples[name] = one_line(error or "no error was recorded")

    @property
    def failed(self) -> int:
        return self.reasons.total()

    @property
    def share(self) -> float:
        """Failed sessions among all that ended; 0 before the first has ended."""
        return self.failed / self.sessions if self.sessions else 0.0

    def as_json(self) -> dict[str, int]:
        """Failures by reason, most frequent first."""
        return dict(self.reasons.most_common())

    def exceeds(self, most: float) -> bool:
        return self.share > most

    def message(self, most: float) -> str:
        """Why a run in which failures exceed `most` ends with an error."""
        counts = ", ".join(f"{reason} {count}" for reason, count in self.reasons.most_common())
        example = self.examples[self.reasons.most_common(1)[0][0]] if self.reasons else ""
        return (
            f"infrastructure failed {self.failed} of {self.sessions} sessions ({self.share:.0%}), more than the accepted "
            f"{most:.0%} (--max-failed): {counts}. Most frequent error: {example}"
        )
