"""Evaluation reports: pass counts by harness and task, pass@k metrics, and the comparison of two reports.

A sample counts if it ended and was scored. Infrastructure failures and samples that the evaluator could not score are
reported separately and never count as samples that did not pass.

- pass@k of a task is the unbiased estimate 1 - C(n-c, k) / C(n, k): the probability that k of its n samples, drawn without
  replacement, include at least one of the c that passed. It is averaged over tasks.
- Its interval is Wilson's, on an effective number of samples: the number whose binomial error equals the standard error of
  the mean over tasks. Samples of one task are correlated, so they count for less than as many samples of different tasks;
  where every task has the same value, each task counts once. A single task has its n // k independent draws.
- The difference between two runs is paired by task. Its interval is a percentile bootstrap over tasks or, for a single
  task, over its samples. The seed is fixed: equal inputs give equal intervals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from towline.common.files import write_atomically
from towline.errors import TowlineError
from towline.runs.ledger import SampleRecord
from towline.schema import Model, SessionState

Z = 1.959963984540054
"""Standard normal quantile of a two-sided 95 % interval."""
LEVEL = 0.95
RESAMPLES = 10_000
_SEED = 20_240_601
_AT_ONCE = 2_000_000
"""Maximum number of draws held in memory."""


@dataclass(frozen=True)
class PassCount:
    """The scored samples of a task (n), and how many of them passed (c)."""

    n: int
    c: int

    def __post_init__(self) -> None:
        if not 0 <= self.c <= self.n:
            raise ValueError(f"{self.c} of {self.n} samples cannot have passed")


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    tasks: int
    """Number of tasks that contribute."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate; needs n >= k."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples; there are {n}")
    if k == 1:
        return c / n
    if n - c < k:
        return 1.0
    # A product of factors close to 1; the binomials themselves would overflow.
    return float(1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1)))


def wilson(p: float, n: float) -> tuple[float, float]:
    """Wilson's interval of a proportion `p` observed in `n` trials; `n` need not be an integer."""
    if n <= 0:
        return 0.0, 1.0
    square = Z * Z
    middle = (p + square / (2 * n)) / (1 + square / n)
    reach = Z / (1 + square / n) * math.sqrt(max(0.0, p * (1 - p) / n + square / (4 * n * n)))
    return max(0.0, min(p, middle - reach)), min(1.0, max(p, middle + reach))


def estimate(tallies: Sequence[PassCount], k: int) -> Estimate | None:
    """pass@k over the tasks that have k samples; `None` if none has."""
    enough = [tally for tally in tallies if tally.n >= k]
    if not enough:
        return None
    values = np.array([pass_at_k(tally.n, tally.c, k) for tally in enough])
    value = float(values.mean())
    low, high = wilson(value, _effective(values, enough, k))
    return Estimate(value, low, high, len(enough))


def _effective(values: npt.NDArray[np.float64], tallies: Sequence[PassCount], k: int) -> float:
    tries = float(sum(tally.n // k for tally in tallies))
    count = len(values)
    if count == 1:
        return tries
    error = float(values.var(ddof=1)) / count
    value = float(values.mean())
    binomial = value * (1 - value)
    if error <= 1e-12 or binomial <= 1e-12:
        return float(count)
    return min(tries, max(1.0, binomial / error))


@dataclass(frozen=True)
class Difference:
    """The later run minus the earlier one, over the tasks that both have."""

    value: float
    low: float
    high: float
    tasks: int
    better: int
    worse: int


def difference(pairs: Sequence[tuple[PassCount, PassCount]], k: int) -> Difference | None:
    """The difference in pass@k of (earlier, later) pairs, one per task; `None` if no task has k samples in both."""
    enough = [(earlier, later) for earlier, later in pairs if earlier.n >= k and later.n >= k]
    if not enough:
        return None
    deltas = np.array(
        [pass_at_k(later.n, later.c, k) - pass_at_k(earlier.n, earlier.c, k) for earlier, later in enough]
    )
    means = _resample_samples(*enough[0], k) if len(enough) == 1 else _resample_tasks(deltas)
    tail = (1 - LEVEL) / 2
    low, high = (float(bound) for bound in np.quantile(means, [tail, 1 - tail]))
    value = float(deltas.mean())
    better, worse = int((deltas > 0).sum()), int((deltas < 0).sum())
    return Difference(value, min(low, value), max(high, value), len(enough), better, worse)


def _resample_tasks(deltas: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Bootstrap means over tasks."""
    random = np.random.default_rng(_SEED)
    step = max(1, _AT_ONCE // len(deltas))
    parts = []
    for start in range(0, RESAMPLES, step):
        size = (min(step, RESAMPLES - start), len(deltas))
        parts.append(deltas[random.integers(0, len(deltas), size)].mean(axis=1))
    return np.concatenate(parts)


def _resample_samples(earlier: PassCount, later: PassCount, k: int) -> npt.NDArray[np.float64]:
    """Bootstrap differences of one task, over its samples."""
    random = np.random.default_rng(_SEED)

    def drawn(tally: PassCount) -> npt.NDArray[np.float64]:
        table = np.array([pass_at_k(tally.n, c, k) for c in range(tally.n + 1)])
        return np.asarray(table[random.binomial(tally.n, tally.c / tally.n, RESAMPLES)], np.float64)

    return drawn(later) - drawn(earlier)


FILE = "eval.json"


class EvalReportError(TowlineError):
    """A report that cannot be read or compared."""


class TaskTally(Model):
    """The samples of one task with one harness."""

    n: int = 0
    """Scored samples."""
    passed: int = 0
    unscored: int = 0
    failed: int = 0
    rewards: list[float] = Field(default_factory=list)

    @property
    def tally(self) -> PassCount:
        return PassCount(self.n, self.passed)


class EvalReport(Model):
    """The record of an evaluation, which a later one can be compared with."""

    recipe: dict[str, Any] = Field(default_factory=dict)
    """Engine, model, template and session settings."""
    samples: int
    """Samples requested per task."""
    passing: str
    """The expression by which a sample passes."""
    harnesses: dict[str, dict[str, TaskTally]] = Field(default_factory=dict)
    """By harness and task."""

    def write(self, folder: Path) -> Path:
        path = folder / FILE
        write_atomically(
            path, json.dumps({**self.model_dump(mode="json"), "figures": pass_metrics(self)}, indent=2).encode()
        )
        return path

    @classmethod
    def read(cls, path: Path) -> EvalReport:
        """Read a report from the folder of a run, or from its file."""
        path = path / FILE if path.is_dir() else path
        try:
            fields = json.loads(path.read_bytes())
            if not isinstance(fields, dict):
                raise ValueError("not a JSON object")
            return cls.model_validate({name: value for name, value in fields.items() if name != "figures"})
        except OSError as error:
            raise EvalReportError(
                f"cannot read the evaluation report {path}: {error.strerror}; give the folder of an earlier run"
            ) from error
        except (ValueError, ValidationError) as error:
            raise EvalReportError(f"{path} is not an evaluation report: {error}") from error


def tally_samples(
    samples: Iterable[SampleRecord], passes: Callable[[SampleRecord], bool]
) -> dict[str, dict[str, TaskTally]]:
    """The tally of samples by harness and task."""
    found: dict[str, dict[str, TaskTally]] = {}
    for sample in samples:
        own = found.setdefault(sample.harness, {}).setdefault(sample.task_id, TaskTally())
        if sample.state is not SessionState.DONE:
            own.failed += 1
        elif sample.reward is None:
            own.unscored += 1
        else:
            own.n += 1
            own.passed += passes(sample)
            own.rewards.append(sample.reward)
    return found


def k_values(samples: int) -> list[int]:
    """The values of k to report: 1, the powers of two in between, and the number of samples."""
    powers = [2**i for i in range(1, samples.bit_length()) if 2**i < samples]
    return sorted({1, *powers, samples})


def pass_metrics(evaluation: EvalReport) -> dict[str, Any]:
    """pass@k overall, by harness and by task."""
    over = [one for tasks in evaluation.harnesses.values() for one in tasks.values()]
    return {
        "interval": "95 %, Wilson on the effective number of samples, tasks as clusters",
        "all": _pass_metrics(over, evaluation.samples),
        "harnesses": {
            name: {
                **_pass_metrics(list(tasks.values()), evaluation.samples),
                "tasks": {task: task_metrics(one, evaluation.samples) for task, one in tasks.items()},
            }
            for name, tasks in evaluation.harnesses.items()
        },
    }


def _pass_metrics(tallies: list[TaskTally], samples: int) -> dict[str, Any]:
    estimates = {f"pass@{k}": _plain(estimate([one.tally for one in tallies], k)) for k in k_values(samples)}
    rewards = [reward for one in tallies for reward in one.rewards]
    return {
        **estimates,
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "tasks_counted": sum(one.n > 0 for one in tallies),
        "samples": sum(one.n for one in tallies),
        "unscored": sum(one.unscored for one in tallies),
        "failed": sum(one.failed for one in tallies),
    }


def task_metrics(one: TaskTally, samples: int) -> dict[str, Any]:
    """pass@k of one task."""
    estimates = {k: estimate([one.tally], k) for k in k_values(samples)}
    low, high = wilson(one.passed / one.n, one.n) if one.n else (0.0, 1.0)
    return {
        "n": one.n,
        "passed": one.passed,
        "pass@1": {"value": one.passed / one.n, "low": low, "high": high} if one.n else None,
        **{f"pass@{k}": None if found is None else found.value for k, found in estimates.items() if k > 1},
        "unscored": one.unscored,
        "failed": one.failed,
    }


def _plain(found: Estimate | Difference | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


@dataclass
class EvalComparison:
    """A later evaluation compared with an earlier one."""

    differences: dict[str, dict[str, Difference | None]] = field(default_factory=dict)
    """By harness (and `all`), then by pass@k."""
    settings: list[str] = field(default_factory=list)
    """Settings other than the model that differ, which weaken the comparison."""
    only_earlier: int = 0
    only_later: int = 0
    """Pairs of harness and task that only one report has."""

    def as_json(self) -> dict[str, Any]:
        found = {name: {k: _plain(one) for k, one in by_k.items()} for name, by_k in self.differences.items()}
        interval = "95 %, paired by task, percentile bootstrap over tasks"
        left = {"only_earlier": self.only_earlier, "only_later": self.only_later}
        return {"interval": interval, "differences": found, "settings": self.settings, **left}


def compare(earlier: EvalReport, later: EvalReport) -> EvalComparison:
    """The difference in pass@k, paired by task."""
    made = EvalComparison(settings=_different_settings(earlier, later))
    everything: list[tuple[PassCount, PassCount]] = []
    chosen = k_values(min(earlier.samples, later.samples))
    names = {(harness, task) for harness, tasks in later.harnesses.items() for task in tasks}
    before = {(harness, task) for harness, tasks in earlier.harnesses.items() for task in tasks}
    made.only_earlier, made.only_later = len(before - names), len(names - before)
    for harness, tasks in later.harnesses.items():
        old = earlier.harnesses.get(harness, {})
        pairs = [(old[task].tally, one.tally) for task, one in tasks.items() if task in old]
        everything += pairs
        if pairs:
            made.differences[harness] = {f"pass@{k}": difference(pairs, k) for k in chosen}
    if not everything:
        raise EvalReportError("the two evaluations share no task with the same harness; compare runs of the same tasks")
    made.differences["all"] = {f"pass@{k}": difference(everything, k) for k in chosen}
    return made


def _different_settings(earlier: EvalReport, later: EvalReport) -> list[str]:
    found = []
    if earlier.passing != later.passing:
        found.append(f"passing: {earlier.passing!r} and {later.passing!r}")
    mine, theirs = earlier.recipe.get("session"), later.recipe.get("session")
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        found += [
            f"session.{name}: {mine.get(name)} and {theirs.get(name)}"
            for name in sorted({*mine, *theirs})
            if mine.get(name) != theirs.get(name)
        ]
    return found
