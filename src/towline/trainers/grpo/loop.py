"""Asynchronous GRPO over a rollout service: the reference trainer.

    submit groups ahead ─▶ lease finished groups ─▶ learn ─▶ checkpoint ─▶ acknowledge ─▶ push weights, version + 1 ─▶ repeat

Rollouts continue during learning: `ahead` updates' worth of groups are always in flight, sampled with the weights that the
engine has at that moment; each token carries its version. The service starts sessions at the pace of the updates, so that no
group is older than `max_staleness` versions; a group that is older anyway is dropped and counted. With `synchronous` nothing
is in flight during learning, and every token is of the newest version.

Invariant: a kill at any moment loses no result and uses none twice. An update's results are in the checkpoint before they
are acknowledged. After a restart they are acknowledged again, and skipped if they are delivered again; results leased for an
update that never reached its checkpoint are delivered again at once. Dropped groups are in the checkpoint too: dropping one
uses it. Task ids are numbered from a counter in the checkpoint, so submitting them again is a no-op.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from towline.client import Client, Conflict, Delivered
from towline.common.crashpoints import crash_point
from towline.errors import TowlineError
from towline.schema import ConsumerPace, FailureTally, Reward, SessionState, Stale, Task, Trajectory, Unit
from towline.trainers.advantages import turn_rewards
from towline.trainers.curriculum.curriculum import Curriculum
from towline.trainers.grpo.learner import Learner, UpdateReport

log = logging.getLogger("towline.trainers")
_MIN_SESSIONS = 16
"""Sessions that must have ended before the failed share can stop a run."""
_MIN_FAILED_GROUPS = 4
"""Consecutive failed groups before a run gives up."""


class TooManyFailed(TowlineError):
    """Infrastructure failed a larger share of the run's sessions than `max_failed` allows."""


class NothingToLearn(TowlineError):
    """Consecutive groups failed: the tasks or the infrastructure are broken."""

    def __init__(self, groups: int, reasons: Counter[str]):
        listed = "; ".join(f"{reason} ({count} sessions)" for reason, count in reasons.most_common(3))
        super().__init__(f"{groups} groups in a row had too few usable sessions: {listed}")


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    run: str
    """The run's name: prefix of its task ids, and its consumer name."""
    steps: int = 24
    """Total number of updates."""
    groups: int = 8
    """Groups per update."""
    ahead: int = 1
    """Updates' worth of groups kept in flight beyond the next update."""
    synchronous: bool = False
    """Roll out only between updates."""
    max_staleness: int | None = 4
    """Oldest usable group, in policy versions; `None` for no limit."""
    pacing: bool = True
    """Whether the service starts sessions at the pace of the updates, or as fast as it can."""
    lease: float = 600.0
    """Seconds an update may take before its results are delivered again."""
    max_failed: float = 1.0
    """Largest share of sessions that infrastructure may fail, checked after each update's worth of groups."""
    permute: bool = False
    """Control experiment: shuffle rewards within each group, so that there is nothing to learn."""
    seed: int = 0


@dataclass(slots=True)
class TrainingStep:
    """One update, its timings and the run's counters after it."""

    update: UpdateReport
    waited: float
    """Seconds spent waiting for enough groups."""
    learned: float
    """Seconds spent on the update and its checkpoint."""
    pushed: float
    """Seconds spent acknowledging results and pushing weights."""
    sessions: int
    """Sessions used so far in the run."""
    dropped: int
    """Groups dropped as too old so far."""
    incomplete: int
    """Groups with too few usable sessions so far; others replaced them."""
    used: list[str]
    """Ids of the results that this update consumed."""

    def as_json(self) -> dict[str, Any]:
        return {
            **self.update.as_json(),
            "waited": self.waited,
            "learned": self.learned,
            "pushed": self.pushed,
            "sessions_used": self.sessions,
            "dropped_groups": self.dropped,
            "incomplete_groups": self.incomplete,
            "used": self.used,
        }

    def line(self) -> str:
        """One line for a progress display."""
        update = self.update
        return (
            f"reward {update.mean_reward:.2f}  entropy {update.entropy:.3f}  stale {update.staleness:.1f}  "
            f"max |Δlogp| {update.worst_logprob:.0e}  {self.sessions:,} sessions"
            + (f", {self.incomplete} groups failed" if self.incomplete else "")
        )


@dataclass
class Grpo:
    client: Client
    learner: Learner
    tasks: Callable[[int], Task]
    """Returns the n-th task of the run: the same task for the same n, except for its id."""
    folder: Path
    settings: GrpoSettings
    doing: Callable[[str], None] = lambda status: None
    """Called with a line of status text for display."""
    curriculum: Curriculum | None = None
    """Counts every delivered group, and ends the run when its budget is used up."""
    submitted: int = 0
    consumed: int = 0
    dropped: int = 0
    incomplete: int = 0
    sessions: int = 0
    failures: FailureTally = field(default_factory=FailureTally)
    """Failures among the sessions whose end this process has seen."""
    _pace: dict[str, Any] = field(default_factory=dict)
    """The pacing fields of the run's lease requests."""
    _used: set[str] = field(default_factory=set)
    """Result ids in the last checkpoint."""
    _failed: list[str] = field(default_factory=list)
    """Task ids of the incomplete groups since the last complete one."""

    def run(self) -> None:
        """Run until `settings.steps` updates are done; resumes from the checkpoint if there is one."""
        self.start()
        while self.learner.version < self.settings.steps and not self.exhausted:
            self.step()

    @property
    def exhausted(self) -> str:
        """The limit of the budget that is used up; empty if none is."""
        return self.curriculum.exhausted() if self.curriculum is not None else ""

    def start(self) -> None:
        """Load the checkpoint, acknowledge the results it used, and push its weights to the engine."""
        extra = self.learner.resume(self.folder / "checkpoint")
        if extra is not None:
            self.submitted, self.consumed = extra["submitted"], extra["consumed"]
            self.dropped, self.incomplete = extra["dropped"], extra["incomplete"]
            self.sessions = extra["sessions"]
            self._used = set(extra["used"])
            if self._used:
                self.client.ack(self.settings.run, sorted(self._used))
        self._declare()
        self.client.release(self.settings.run)
        self._push()

    def _declare(self) -> None:
        """Register the run as a paced consumer before its first task, so that no session starts too early."""
        settings = self.settings
        if not settings.pacing or settings.max_staleness is None:
            return
        # The prefix limits pacing to training tasks: held-out measurements are never leased and must not wait.
        pace: dict[str, Any] = {"prefix": f"{settings.run}/", "groups_per_update": settings.groups}
        try:
            self.client.lease(
                settings.run,
                Unit.GROUP,
                max=0,
                wait=0.0,
                max_staleness=settings.max_staleness,
                stale=Stale.FLAG,
                **pace,
            )
        except Conflict as error:
            log.warning(
                "pacing is off and stale groups are dropped: the run's consumer was created without it (%s)", error
            )
            return
        self._pace = pace

    def pacing(self) -> ConsumerPace | None:
        """The service's pacing statistics for this run."""
        consumers = self.client.pacing().consumers
        return next((one for one in consumers if one.consumer == self.settings.run), None)

    def step(self) -> TrainingStep:
        """Run one update: collect groups, learn, checkpoint, acknowledge, push."""
        began = time.perf_counter()
        self._submit()
        groups, used, skipped = self._collect()
        collected = time.perf_counter()
        self.doing("learning")
        update = self.learner.update(self._shuffled(groups) if self.settings.permute else groups)
        self.consumed += len(groups)
        self.sessions += sum(len(group) for group in groups.values())
        self._checkpoint(used)
        learned = time.perf_counter()
        crash_point("trainer.before_ack")
        self.client.ack(self.settings.run, used, unusable=skipped)
        crash_point("trainer.before_push")
        self._push()
        pushed = time.perf_counter()
        seconds = (collected - began, learned - collected, pushed - learned)
        return TrainingStep(update, *seconds, self.sessions, self.dropped, self.incomplete, used)

    def _checkpoint(self, used: Sequence[str]) -> None:
        self._used = set(used)
        self.learner.checkpoint(
            self.folder / "checkpoint",
            {
                "submitted": self.submitted,
                "consumed": self.consumed,
                "dropped": self.dropped,
                "incomplete": self.incomplete,
                "sessions": self.sessions,
                "used": list(used),
            },
        )

    def _submit(self) -> None:
        """Keep enough groups in flight, but none beyond the last update's needs."""
        settings = self.settings
        wanted = settings.groups * (1 if settings.synchronous else 1 + settings.ahead)
        needed = settings.groups * (settings.steps - self.learner.version)
        count = min(wanted, needed) - (self.submitted - self.consumed - self.dropped - self.incomplete)
        if count > 0:
            numbers = range(self.submitted, self.submitted + count)
            self.client.submit([_with_id(self.tasks(n), f"{settings.run}/{n:06d}") for n in numbers])
            self.submitted += count

    def _collect(self) -> tuple[dict[str, list[Trajectory]], list[str], list[str]]:
        """Lease one update's worth of groups.

        Returns the groups by task id, the ids of all consumed results, and those of the results that were skipped
        because their group is stale or incomplete.
        """
        settings = self.settings
        groups: dict[str, list[Trajectory]] = {}
        used: list[str] = []
        skipped: list[str] = []
        while len(groups) < settings.groups:
            self.doing(f"waiting for sessions: {len(groups)} of {settings.groups} groups ready")
            stream = self.client.results(
                settings.run,
                Unit.GROUP,
                limit=settings.groups - len(groups),
                idle=5.0,
                lease=settings.lease,
                max_staleness=settings.max_staleness,
                stale=Stale.FLAG,
                **self._pace,
            )
            for delivered in stream:
                if delivered.result_id in self._used or delivered.result_id in used:
                    # Used before a crash, and acknowledged again on resume.
                    continue
                if not delivered.task_id.startswith(f"{settings.run}/"):
                    # A task of another run, or a held-out measurement.
                    self.client.ack(settings.run, [delivered.result_id])
                    continue
                used.append(delivered.result_id)
                self._tally(delivered)
                if self.curriculum is not None:
                    self.curriculum.observe(delivered, int(delivered.task_id.rpartition("/")[2]))
                if not delivered.sessions:
                    self.incomplete += 1
                    self._failed.append(delivered.task_id)
                    skipped.append(delivered.result_id)
                    continue
                self._failed.clear()
                if any(session.stale for session in delivered.sessions):
                    self.dropped += 1
                    skipped.append(delivered.result_id)
                    continue
                groups[delivered.task_id] = delivered.trajectories
                self.doing(f"waiting for sessions: {len(groups)} of {settings.groups} groups ready")
            if len(self._failed) >= max(_MIN_FAILED_GROUPS, 2 * settings.groups):
                self._give_up(skipped)
            self._check_failures(skipped)
            self._submit()
        return groups, used, skipped

    def _tally(self, delivered: Delivered) -> None:
        """Count a group's sessions; ask the service why any of them are missing."""
        delivered_sessions = len(delivered.sessions)
        self.failures.add_ended(delivered_sessions)
        number = int(delivered.task_id.rpartition("/")[2])
        if delivered_sessions < self.tasks(number).num_samples:
            for session in self.client.task(delivered.task_id).sessions:
                if session.state is SessionState.FAILED:
                    self.failures.add_failed(session.failure, session.error)

    def _check_failures(self, skipped: Sequence[str]) -> None:
        """Stop the run if infrastructure failed too many sessions, once enough have ended to tell."""
        limit = self.settings.max_failed
        if self.failures.sessions >= _MIN_SESSIONS and self.failures.exceeds(limit):
            self._consume(skipped)
            raise TooManyFailed(self.failures.message(limit))

    def _give_up(self, skipped: Sequence[str]) -> NoReturn:
        """Raise with the reasons why groups fail."""
        self._consume(skipped)
        reasons: Counter[str] = Counter()
        for task_id in self._failed[-_MIN_FAILED_GROUPS:]:
            for session in self.client.task(task_id).sessions:
                reasons[session.error or f"a session was {session.state} and has no score"] += 1
        raise NothingToLearn(len(self._failed), reasons)

    def _consume(self, skipped: Sequence[str]) -> None:
        """Checkpoint and acknowledge skipped results, so that a resumed run does not start with them."""
        self._checkpoint(skipped)
        self.client.ack(self.settings.run, skipped, unusable=skipped)

    def _shuffled(self, groups: dict[str, list[Trajectory]]) -> dict[str, list[Trajectory]]:
        random = np.random.default_rng([self.settings.seed, self.learner.version])
        return {name: permuted(group, random) for name, group in groups.items()}

    def _push(self) -> None:
        """Load the current weights into the engine under their version; delete older ones from disk."""
        version = self.learner.version
        target = self.folder / "weights" / f"v{version}"
        self.learner.save_weights(target)
        self.client.update_weights(target.resolve(), version)
        for old in self.folder.glob("weights/v*"):
            if old != target and old.name != f"v{version - 1}":
                shutil.rmtree(old, ignore_errors=True)


def _with_id(task: Task, task_id: str) -> Task:
    return task.model_copy(update={"task_id": task_id})


def permuted(group: Sequence[Trajectory], chance: np.random.Generator) -> list[Trajectory]:
    """The group with its rewards permuted among its sessions; per-turn rewards go to the turns of the same position."""
    scored = [index for index, one in enumerate(group) if one.reward is not None and one.reward.score is not None]
    permuted: list[Trajectory] = list(group)
    for index, other in zip(scored, chance.permutation(scored), strict=True):
        reward = group[int(other)].reward
        if reward is not None:
            values = [value for _, value in turn_rewards(group[int(other)])]
            turns = sorted(group[index].turns, key=lambda turn: turn.index)
            per_turn = {turn.id: value for turn, value in zip(turns, values, strict=False)}
            new = Reward(value=reward.value, per_turn=per_turn, evaluator=reward.evaluator)
            permuted[index] = group[index].with_reward(new)
    return permuted


def play(client: Client, tasks: Sequence[Task], name: str, *, patience: float | None = None) -> list[Trajectory]:
    """Run the tasks under the current weights and return their trajectories.

    Task ids start with `name`, so calling it again, for example after a crash, returns the sessions that already exist.
    The tasks are waited for, not leased, so no consumer is affected.
    """
    accepted = client.submit([_with_id(task, f"{name}/{n:04d}") for n, task in enumerate(tasks)])
    ended = [client.wait(one.task_id, patience) for one in accepted]
    return client.trajectories([session.session_id for status in ended for session in status.sessions])


def mean_reward(trajectories: Sequence[Trajectory]) -> float:
    """Mean over the sessions that have a score; infrastructure failures do not count."""
    scores = [one.reward.score for one in trajectories if one.reward is not None and one.reward.score is not None]
    return sum(scores) / len(scores) if scores else 0.0
