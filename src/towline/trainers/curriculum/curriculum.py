"""The curriculum of a run: the n-th task to train on, chosen by a sampler from what the groups so far have shown.

The choice depends on the seed, the number and the store, and is stored before it is used: after a kill the same numbers
give the same tasks, and groups that are delivered again are counted once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from towline.client import Delivered
from towline.errors import ConfigError
from towline.schema import Task
from towline.trainers.curriculum.budget import RunBudget
from towline.trainers.curriculum.samplers import SamplerName, SamplerOptions, estimates, task_weights
from towline.trainers.curriculum.store import CurriculumStore, GroupOutcome, Spending


@dataclass
class Curriculum:
    tasks: Sequence[Task]
    store: CurriculumStore
    sampler: SamplerName = SamplerName.VARIANCE
    options: SamplerOptions = field(default_factory=SamplerOptions)
    budget: RunBudget = field(default_factory=RunBudget)
    seed: int = 0
    pass_at: float = 1.0
    """The reward from which on a session counts as passed."""
    version: int = 0
    """The newest policy version seen."""
    _by_id: dict[str, Task] = field(default_factory=dict)
    _weights: list[float] | None = None
    """The weights of the tasks as of the last group that was counted."""
    _since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("a curriculum needs at least one task")
        self._by_id = {task.task_id: task for task in self.tasks}
        self.version = max((one.version for one in self.store.rates()), default=0)

    def task(self, number: int) -> Task:
        """The task for a number: the same one whenever it is asked for."""
        chosen = self.store.choice(number)
        if chosen is None:
            chosen = self.store.choose(number, self._draw(number))
        if chosen not in self._by_id:
            raise ConfigError(
                f"the stored choice {number} is task {chosen!r}, which is not among the tasks of this run"
            )
        return self._by_id[chosen]

    def _draw(self, number: int) -> str:
        names = list(self._by_id)
        if self._weights is None:
            known = estimates(self.store.rates(), self.version)
            self._weights = task_weights(self.sampler, names, known, self.options)
        return random.Random(f"{self.seed}/{number}").choices(names, self._weights)[0]

    def observe(self, delivered: Delivered, number: int) -> None:
        """Count a delivered group of the task with this number."""
        task = self.task(number)
        trajectories = delivered.trajectories
        versions = [int(turn.versions.max()) for one in trajectories for turn in one.turns if len(turn.versions)]
        outcome = GroupOutcome(
            result_id=delivered.result_id,
            task_id=task.task_id,
            version=max(versions, default=delivered.version),
            rewards=list(delivered.rewards.values()),
            sessions=len(delivered.sessions),
            prompt_tokens=sum(turn.prompt_length for one in trajectories for turn in one.turns),
            sampled_tokens=sum(len(turn.sampled) for one in trajectories for turn in one.turns),
            seconds=sum(one.timings.get("run", 0.0) for one in trajectories),
        )
        self.add([outcome])

    def add(self, outcomes: Sequence[GroupOutcome]) -> None:
        """Count groups, and the time since the last call."""
        now = time.monotonic()
        self.store.add(outcomes, self.pass_at)
        self.store.add_seconds(now - self._since)
        self._since, self._weights = now, None
        self.version = max([self.version, *(one.version for one in outcomes)])

    def spending(self) -> Spending:
        return self.store.spending()

    def exhausted(self) -> str:
        """The limit of the budget that is used up; empty if none is."""
        return self.budget.exhausted(self.spending())
