"""Samplers: how likely each task is to be the next one, given what is known of its pass rate. Pure functions of data.

A pass rate is known as a Beta distribution: a prior of half a pass and half a failure, and the scored sessions so far,
each version of the policy that lies between halving their weight after `HALF_LIFE` versions. So a task that was solved
long ago becomes uncertain again, and is tried again: no sampler gives up on a task for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from towline.trainers.curriculum.store import TaskRate

HALF_LIFE = 32.0
"""Policy versions after which a session counts half."""
SHARPNESS = 8
"""Exponent of the `variance` sampler's probability. Higher: known good tasks rather than unknown ones."""
FLOOR = 0.005
"""Least weight of a task, relative to the largest possible one."""


@dataclass(frozen=True, slots=True)
class PassEstimate:
    """What is known of a task's pass rate: a Beta distribution."""

    passed: float = 0.5
    failed: float = 0.5

    @property
    def mean(self) -> float:
        return self.passed / (self.passed + self.failed)

    def mixed_group(self, size: int) -> float:
        """The probability that a group of this size has both passes and failures."""
        all_pass = all_fail = 1.0
        for index in range(size):
            total = self.passed + self.failed + index
            all_pass *= (self.passed + index) / total
            all_fail *= (self.failed + index) / total
        return max(0.0, 1.0 - all_pass - all_fail)

    def within(self, low: float, high: float, steps: int = 64) -> float:
        """The probability that the pass rate lies in a band."""
        density = [
            ((index + 0.5) / steps) ** (self.passed - 1) * (1 - (index + 0.5) / steps) ** (self.failed - 1)
            for index in range(steps)
        ]
        inside = sum(value for index, value in enumerate(density) if low <= (index + 0.5) / steps <= high)
        return inside / sum(density) if sum(density) else float(low <= self.mean <= high)


def estimates(rates: Iterable[TaskRate], version: int) -> dict[str, PassEstimate]:
    """The estimates of all tasks with a scored session, as of a policy version."""
    found: dict[str, PassEstimate] = {}
    for one in rates:
        weight = 0.5 ** (max(0, version - one.version) / HALF_LIFE)
        known = found.get(one.task_id, PassEstimate())
        found[one.task_id] = PassEstimate(
            known.passed + weight * one.passed, known.failed + weight * (one.scored - one.passed)
        )
    return found


class SamplerName(StrEnum):
    """The samplers by name."""

    UNIFORM = "uniform"
    """Every task alike."""
    BAND = "band"
    """Tasks whose pass rate probably lies in a band."""
    PASS_RATE = "pass_rate"
    """By p (1 - p): the more, the nearer the pass rate is to one half."""
    VARIANCE = "variance"
    """By the probability that a group's rewards differ: avoids groups without a gradient."""


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """What samplers may need besides the estimates."""

    group: int = 8
    """Sessions per group."""
    low: float = 0.2
    high: float = 0.8
    """The band."""


Weigh = Callable[[PassEstimate, SamplerOptions], float]

SAMPLERS: Mapping[SamplerName, Weigh] = {
    SamplerName.UNIFORM: lambda estimate, options: 1.0,
    SamplerName.BAND: lambda estimate, options: estimate.within(options.low, options.high),
    SamplerName.PASS_RATE: lambda estimate, options: 4 * estimate.mean * (1 - estimate.mean),
    SamplerName.VARIANCE: lambda estimate, options: estimate.mixed_group(options.group) ** SHARPNESS,
}
"""The weight of a task, between 0 and 1. To add a sampler: a name, and its function here."""


def task_weights(
    name: SamplerName, tasks: Sequence[str], known: Mapping[str, PassEstimate], options: SamplerOptions
) -> list[float]:
    """The weights of tasks, none of them 0."""
    weigh = SAMPLERS[name]
    unknown = PassEstimate()
    return [max(FLOOR, weigh(known.get(task, unknown), options)) for task in tasks]
