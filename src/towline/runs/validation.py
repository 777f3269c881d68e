"""Whether a task is fit for training: the gate between generated tasks and a trainer.

A task is accepted only if its oracle scores 1, doing nothing scores 0, every known cheat scores no more than doing nothing,
results repeat, and its pass rate, where a band is asked for, lies inside. Every refusal has a name; all that apply are
given, because each has another cure. What the infrastructure caused is never held against a task's reward, but a task whose
environment cannot be set up is refused as that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from towline.node.finished import FinishedSession
from towline.schema import EndReason, FailureReason, SessionState

_LEAK = "the environment gives the answer away"
_QUOTED = 500


class RefusalName(StrEnum):
    """Why a task is refused."""

    UNREADABLE = "unreadable"
    """It cannot be loaded, or names something that does not exist."""
    DUPLICATE = "duplicate"
    """Another task has the same instruction, environment and evaluator, or the same id."""
    NOT_SCORED = "not_scored"
    """It has no evaluator."""
    NO_ORACLE = "no_oracle"
    """It has no reference solution."""
    BROKEN_ENVIRONMENT = "broken_environment"
    """Its sandbox cannot be made or set up."""
    LEAKED_ANSWER = "leaked_answer"
    """The leak audit finds the answer in the agent's sandbox."""
    BROKEN_VERIFIER = "broken_verifier"
    """Its verifier gives no score."""
    UNSOLVABLE = "unsolvable"
    """Its own solution does not score 1."""
    TOO_SLOW = "too_slow"
    """Its own solution does not end within the task's time."""
    FREE_REWARD = "free_reward"
    """Doing nothing scores above 0."""
    CHEATABLE = "cheatable"
    """A known cheat scores."""
    FLAKY = "flaky"
    """The same run gives different scores."""
    TOO_EASY = "too_easy"
    """Its pass rate is above the band."""
    TOO_HARD = "too_hard"
    """Its pass rate is below the band."""
    UNKNOWN_PASS_RATE = "unknown_pass_rate"
    """A band is asked for, and no sample of the task was scored."""


@dataclass(frozen=True, slots=True)
class TaskRefusal:
    """One reason to refuse a task."""

    name: RefusalName
    detail: str


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """How one session of a probe ended."""

    probe: str
    """`oracle`, `nothing` or the name of a cheat."""
    score: float | None
    """`None` if it was not scored."""
    error: str = ""
    failure: FailureReason | None = None
    timed_out: bool = False
    session_id: str = ""

    @classmethod
    def of(cls, probe: str, finished: FinishedSession) -> ProbeResult:
        reward = finished.trajectory.reward
        failed = finished.session.state is not SessionState.DONE
        return cls(
            probe=probe,
            score=reward.score if reward is not None and not failed else None,
            error=(finished.trajectory.error or (reward.error if reward else "") or "") if failed else "",
            failure=finished.trajectory.failure,
            timed_out=finished.session.end_reason is EndReason.TIMEOUT,
            session_id=finished.session.session_id,
        )


@dataclass(frozen=True, slots=True)
class PassBand:
    """The pass rates of tasks that are neither too easy nor too hard; both ends belong to it."""

    low: float
    high: float


@dataclass(slots=True)
class TaskVerdict:
    """What is known of a task's fitness."""

    task_id: str
    place: str
    results: list[ProbeResult] = field(default_factory=list)
    refusals: list[TaskRefusal] = field(default_factory=list)
    pass_rate: float | None = None

    @property
    def accepted(self) -> bool:
        return not self.refusals

    def refuse(self, name: RefusalName, detail: str) -> None:
        self.refusals.append(TaskRefusal(name, detail[:_QUOTED]))

    def as_json(self) -> dict[str, Any]:
        return {
            "task_id": self.task_id,
            "place": self.place,
            "accepted": self.accepted,
            "refusals": [{"name": one.name.value, "detail": one.detail} for one in self.refusals],
            "probes": [
                {"probe": one.probe, "score": one.score, "error": one.error, "session_id": one.session_id}
                for one in self.results
            ],
            "pass_rate": self.pass_rate,
        }


def judge_probes(verdict: TaskVerdict, *, oracle: str = "oracle", nothing: str = "nothing") -> None:
    """Add the refusals that follow from the results of the probes, once each."""
    before = list(verdict.refusals)
    verdict.refusals.clear()
    _judge(verdict, oracle, nothing)
    verdict.refusals[:0] = [one for one in before if one not in verdict.refusals]


def _judge(verdict: TaskVerdict, oracle: str, nothing: str) -> None:
    by_probe: dict[str, list[ProbeResult]] = {}
    for result in verdict.results:
        by_probe.setdefault(result.probe, []).append(result)
    _judge_failures(verdict)
    for name, results in by_probe.items():
        scores = sorted({one.score for one in results if one.score is not None})
        unscored = sum(one.score is None for one in results)
        if len(scores) > 1 or (scores and unscored):
            shown = ", ".join("none" if one.score is None else f"{one.score:g}" for one in results)
            verdict.refuse(RefusalName.FLAKY, f"{name} scores {shown} in {len(results)} runs")
    solved = [one for one in by_probe.get(oracle, []) if one.score is not None]
    if any(one.timed_out for one in solved):
        verdict.refuse(RefusalName.TOO_SLOW, "the reference solution does not end within the task's time")
    elif solved and max(one.score or 0.0 for one in solved) < 1:
        verdict.refuse(RefusalName.UNSOLVABLE, f"the reference solution scores {solved[0].score:g}, not 1")
    idle = [one.score for one in by_probe.get(nothing, []) if one.score is not None]
    if idle and max(idle) > 0:
        verdict.refuse(RefusalName.FREE_REWARD, f"doing nothing scores {max(idle):g}")
    floor = max([0.0, *idle])
    for name, results in by_probe.items():
        gained = max((one.score for one in results if one.score is not None), default=0.0)
        if name not in (oracle, nothing) and gained > floor:
            verdict.refuse(RefusalName.CHEATABLE, f"the cheat {name} scores {gained:g}")


def _judge_failures(verdict: TaskVerdict) -> None:
    """One refusal for each kind of failure, with the first error of that kind."""
    named: set[RefusalName] = set()
    for result in verdict.results:
        if not result.error and result.failure is None:
            continue
        if _LEAK in result.error:
            name = RefusalName.LEAKED_ANSWER
        elif result.failure is FailureReason.EVALUATOR:
            name = RefusalName.BROKEN_VERIFIER
        else:
            name = RefusalName.BROKEN_ENVIRONMENT
        if name not in named:
            named.add(name)
            verdict.refuse(name, result.error or f"the session failed: {result.failure}")


def judge_pass_rate(verdict: TaskVerdict, band: PassBand, rewards: Sequence[float] | None) -> None:
    """Add the refusal of a pass rate outside the band; a sample passes with a reward of 1."""
    if rewards is not None and rewards:
        verdict.pass_rate = sum(reward >= 1 for reward in rewards) / len(rewards)
    if verdict.pass_rate is None:
        verdict.refuse(RefusalName.UNKNOWN_PASS_RATE, "no sample of it was scored")
    elif verdict.pass_rate > band.high:
        verdict.refuse(RefusalName.TOO_EASY, f"its pass rate {verdict.pass_rate:.3g} is above {band.high:g}")
    elif verdict.pass_rate < band.low:
        verdict.refuse(RefusalName.TOO_HARD, f"its pass rate {verdict.pass_rate:.3g} is below {band.low:g}")
