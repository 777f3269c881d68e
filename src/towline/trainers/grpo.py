"""Asynchronous GRPO over a rollout service: the reference trainer.

    submit groups ahead ─▶ lease finished groups ─▶ learn ─▶ checkpoint ─▶ acknowledge ─▶ push weights, version + 1 ─▶ again

Rollouts go on while it learns: `ahead` updates' worth of groups are always under way, sampled by whatever weights the
engine has at the moment; each token says which. The service starts sessions at the pace of the updates, so that no group
is older than `max_staleness` versions; one that is all the same is dropped and counted. With `synchronous` nothing is under
way while it learns, and every token is of the newest version.

Order, so that a kill at any moment loses nothing and uses nothing twice: the results of an update are in the checkpoint
before they are acknowledged; after a restart they are acknowledged again and passed over if they come again, and what
was leased for an update that never came to its checkpoint comes again at once. Groups that are too old are in the
checkpoint as well: dropping one is using it. Task names are counted there, so submitting them again is the same tasks.
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
from towline.crashpoints import crash_point
from towline.errors import TowlineError
from towline.schema import ConsumerPace, FailureTally, Reward, SessionState, Stale, Task, Trajectory, Unit
from towline.trainers.advantages import turn_rewards
from towline.trainers.learner import Learner, Update

log = logging.getLogger("towline.trainers")
_EVIDENCE = 16
"""Fewest sessions that have to end before the share of failed ones can end a run."""
_PATIENCE = 4
"""Fewest groups in a row that have to fail before a run gives up."""


class TooManyFailed(TowlineError):
    """Infrastructure failed a larger share of the run's sessions than it accepts."""


class NothingToLearn(TowlineError):
    """One group after the other failed: something is wrong with the tasks or with the machinery."""

    def __init__(self, groups: int, reasons: Counter[str]):
        told = "; ".join(f"{reason} ({count} sessions)" for reason, count in reasons.most_common(3))
        super().__init__(f"{groups} groups in a row had too few sessions to learn from: {told}")


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    run: str
    """Names the run: its tasks, and itself as a consumer."""
    steps: int = 24
    """Updates in all."""
    groups: int = 8
    """Groups an update learns from."""
    ahead: int = 1
    """Updates' worth of groups that are under way besides those that the next update waits for."""
    synchronous: bool = False
    max_staleness: int | None = 4
    pacing: bool = True
    """Whether the service starts sessions at the pace of the updates, or as fast as it can."""
    lease: float = 600.0
    """Seconds that an update may take before its results are handed out again."""
    max_failed: float = 1.0
    """Largest share of sessions that infrastructure may fail, checked once an update's worth of groups has ended."""
    permute: bool = False
    """A control: rewards are shuffled within each group, so that there is nothing to learn."""
    seed: int = 0


@dataclass(slots=True)
class Step:
    """One update with what it took to get there."""

    update: Update
    waited: float
    """Seconds until enough groups had come."""
    learned: float
    """Seconds that the update took."""
    pushed: float
    sessions: int
    """Sessions that the run has used so far."""
    dropped: int
    """Groups that were too old, so far."""
    incomplete: int
    """Groups with too few sessions that can be learned from, so far; others took their place."""
    used: list[str]
    """Ids of the results that this update is done with."""

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
        """What a progress bar shows."""
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
    """The n-th task of the run; the same n, the same task, but for its id."""
    folder: Path
    settings: GrpoSettings
    doing: Callable[[str], None] = lambda what: None
    """Told what it is at, for a person to read."""
    submitted: int = 0
    consumed: int = 0
    dropped: int = 0
    incomplete: int = 0
    sessions: int = 0
    failures: FailureTally = field(default_factory=FailureTally)
    """Of the sessions that this process has seen the end of."""
    _pace: dict[str, Any] = field(default_factory=dict)
    """What the run declares as a consumer besides its name."""
    _used: set[str] = field(default_factory=set)
    _failed: list[str] = field(default_factory=list)
    """Tasks whose groups are incomplete, since the last that was not."""

    def run(self) -> None:
        """Learn until the settings' steps are done, from the checkpoint if there is one."""
        self.start()
        while self.learner.version < self.settings.steps:
            self.step()

    def start(self) -> None:
        """Take up the checkpoint, acknowledge what it had used, and give the engine its weights."""
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
        """Make the run known as a consumer before its first task, so that no session starts too early."""
        settings = self.settings
        if not settings.pacing or settings.max_staleness is None:
            return
        # Its own tasks only: the service does not hold up measurements, which nobody leases.
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
            log.warning("no pacing, old groups are dropped: this run was begun by an older Towline (%s)", error)
            return
        self._pace = pace

    def pacing(self) -> ConsumerPace | None:
        """What pacing did to the run so far, and how durations and training go together."""
        found = self.client.pacing().consumers
        return next((one for one in found if one.consumer == self.settings.run), None)

    def step(self) -> Step:
        """One update."""
        began = time.perf_counter()
        self._submit()
        groups, used, passed = self._collect()
        came = time.perf_counter()
        self.doing("learning")
        update = self.learner.update(self._shuffled(groups) if self.settings.permute else groups)
        self.consumed += len(groups)
        self.sessions += sum(len(group) for group in groups.values())
        self._checkpoint(used)
        learned = time.perf_counter()
        crash_point("trainer.before_ack")
        self.client.ack(self.settings.run, used, unusable=passed)
        crash_point("trainer.before_push")
        self._push()
        pushed = time.perf_counter()
        seconds = (came - began, learned - came, pushed - learned)
        return Step(update, *seconds, self.sessions, self.dropped, self.incomplete, used)

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
        """Keep enough groups under way, but none that no update will need."""
        settings = self.settings
        wanted = settings.groups * (1 if settings.synchronous else 1 + settings.ahead)
        needed = settings.groups * (settings.steps - self.learner.version)
        count = min(wanted, needed) - (self.submitted - self.consumed - self.dropped - self.incomplete)
        if count > 0:
            numbers = range(self.submitted, self.submitted + count)
            self.client.submit([self._named(self.tasks(n), f"{settings.run}/{n:06d}") for n in numbers])
            self.submitted += count

    @staticmethod
    def _named(task: Task, task_id: str) -> Task:
        return task.model_copy(update={"task_id": task_id})

    def _collect(self) -> tuple[dict[str, list[Trajectory]], list[str], list[str]]:
        """Enough groups for an update, by task, the ids of all results that are done with, and those among them that are
        not learned from: old ones, and incomplete ones."""
        settings = self.settings
        groups: dict[str, list[Trajectory]] = {}
        used: list[str] = []
        passed: list[str] = []
        while len(groups) < settings.groups:
            self.doing(f"waiting for sessions: {len(groups)} of {settings.groups} groups are there")
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
                    # From before a crash: learned from, and acknowledged when that was taken up.
                    continue
                if not delivered.task_id.startswith(f"{settings.run}/"):
                    # Somebody else's task, or an evaluation's.
                    self.client.ack(settings.run, [delivered.result_id])
                    continue
                used.append(delivered.result_id)
                self._tally(delivered)
                if not delivered.sessions:
                    self.incomplete += 1
                    self._failed.append(delivered.task_id)
                    passed.append(delivered.result_id)
                    continue
                self._failed.clear()
                if any(session.stale for session in delivered.sessions):
                    self.dropped += 1
                    passed.append(delivered.result_id)
                    continue
                groups[delivered.task_id] = delivered.trajectories
                self.doing(f"waiting for sessions: {len(groups)} of {settings.groups} groups are there")
            if len(self._failed) >= max(_PATIENCE, 2 * settings.groups):
                self._give_up(passed)
            self._check_failures(passed)
            self._submit()
        return groups, used, passed

    def _tally(self, delivered: Delivered) -> None:
        """Count a group's sessions; those that it lacks are asked for."""
        found = len(delivered.sessions)
        self.failures.add_ended(found)
        number = int(delivered.task_id.rpartition("/")[2])
        if found < self.tasks(number).num_samples:
            for session in self.client.task(delivered.task_id).sessions:
                if session.state is SessionState.FAILED:
                    self.failures.add_failed(session.failure, session.error)

    def _check_failures(self, passed: Sequence[str]) -> None:
        """End the run if infrastructure failed too many sessions. Few sessions are no evidence."""
        most = self.settings.max_failed
        if self.failures.sessions >= _EVIDENCE and self.failures.exceeds(most):
            self._checkpoint(passed)
            self.client.ack(self.settings.run, passed, unusable=passed)
            raise TooManyFailed(self.failures.message(most))

    def _give_up(self, passed: Sequence[str]) -> NoReturn:
        """Say why groups fail. Those are done with, so that a run that is taken up again does not begin with them."""
        self._checkpoint(passed)
        self.client.ack(self.settings.run, passed, unusable=passed)
        reasons: Counter[str] = Counter()
        for task_id in self._failed[-_PATIENCE:]:
            for session in self.client.task(task_id).sessions:
                reasons[session.error or f"a session was {session.state} and has no score"] += 1
        raise NothingToLearn(len(self._failed), reasons)

    def _shuffled(self, groups: dict[str, list[Trajectory]]) -> dict[str, list[Trajectory]]:
        chance = np.random.default_rng([self.settings.seed, self.learner.version])
        return {name: permuted(group, chance) for name, group in groups.items()}

    def _push(self) -> None:
        """Give the engine the weights as they are, under their version; old ones on disk go."""
        version = self.learner.version
        place = self.folder / "weights" / f"v{version}"
        self.learner.save_weights(place)
        self.client.update_weights(place.resolve(), version)
        for old in self.folder.glob("weights/v*"):
            if old != place and old.name != f"v{version - 1}":
                shutil.rmtree(old, ignore_errors=True)


def permuted(group: Sequence[Trajectory], chance: np.random.Generator) -> list[Trajectory]:
    """The group with its rewards dealt out anew, those of turns to the turns of the same place."""
    scored = [place for place, one in enumerate(group) if one.reward is not None and one.reward.score is not None]
    dealt: list[Trajectory] = list(group)
    for place, other in zip(scored, chance.permutation(scored), strict=True):
        reward = group[int(other)].reward
        if reward is not None:
            values = [value for _, value in turn_rewards(group[int(other)])]
            own = sorted(group[place].turns, key=lambda turn: turn.index)
            per_turn = {turn.id: value for turn, value in zip(own, values, strict=False)}
            new = Reward(value=reward.value, per_turn=per_turn, evaluator=reward.evaluator)
            dealt[place] = group[place].with_reward(new)
    return dealt


def play(client: Client, tasks: Sequence[Task], name: str, *, patience: float | None = None) -> list[Trajectory]:
    """The tasks' sessions under the weights as they are now.

    The tasks are submitted under `name`, so asking again, after a crash say, gives what is already known of them. They are
    waited for, not leased: no consumer is the worse for it.
    """
    accepted = client.submit([Grpo._named(task, f"{name}/{n:04d}") for n, task in enumerate(tasks)])
    ended = [client.wait(one.task_id, patience) for one in accepted]
    return client.trajectories([session.session_id for status in ended for session in status.sessions])


def mean_reward(trajectories: Sequence[Trajectory]) -> float:
    """Over the sessions that have a score; failures of the machinery do not count."""
    scores = [one.reward.score for one in trajectories if one.reward is not None and one.reward.score is not None]
    return sum(scores) / len(scores) if scores else 0.0
