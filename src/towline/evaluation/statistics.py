"""The figures of an evaluation: pass@k, an interval around it, and the difference between two runs.

- pass@k of a task is the unbiased estimate 1 - C(n-c, k) / C(n, k): the chance that k of its n samples, drawn without
  putting back, hold at least one of the c that passed. Over tasks it is averaged.
- Its interval is Wilson's, on an effective number of samples: the one whose binomial error equals the standard error of
  the mean over tasks. Samples of one task are alike, so that they count for less than as many samples of different tasks;
  where every task has the same figure, each counts once. With one task there is nothing to compare it with, and its n // k
  independent tries count.
- The difference between two runs is paired by task; its interval is a percentile bootstrap over tasks, with one task over
  its samples. The seed is fixed: the same figures give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Z = 1.959963984540054
"""Of 95 %."""
LEVEL = 0.95
RESAMPLES = 10_000
_SEED = 20_240_601
_AT_ONCE = 2_000_000
"""Draws that are held in memory."""


@dataclass(frozen=True)
class Tally:
    """A task's samples: how many counted, and how many passed."""

    n: int
    c: int

    def __post_init__(self) -> None:
        if not 0 <= self.c <= self.n:
            raise ValueError(f"{self.c} of {self.n} passed")


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float
    tasks: int
    """How many tasks it is made from."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate; needs n >= k."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples, and there are {n}")
    if k == 1:
        return c / n
    if n - c < k:
        return 1.0
    # A product of factors close to 1, where the binomials themselves would overflow.
    return float(1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1)))


def wilson(p: float, n: float) -> tuple[float, float]:
    """Wilson's interval of a proportion `p` seen in `n` tries, which need not be whole."""
    if n <= 0:
        return 0.0, 1.0
    square = Z * Z
    middle = (p + square / (2 * n)) / (1 + square / n)
    reach = Z / (1 + square / n) * math.sqrt(max(0.0, p * (1 - p) / n + square / (4 * n * n)))
    return max(0.0, min(p, middle - reach)), min(1.0, max(p, middle + reach))


def estimate(tallies: Sequence[Tally], k: int) -> Estimate | None:
    """pass@k over the tasks that have k samples; `None` if none has."""
    enough = [tally for tally in tallies if tally.n >= k]
    if not enough:
        return None
    values = np.array([pass_at_k(tally.n, tally.c, k) for tally in enough])
    value = float(values.mean())
    low, high = wilson(value, _effective(values, enough, k))
    return Estimate(value, low, high, len(enough))


def _effective(values: npt.NDArray[np.float64], tallies: Sequence[Tally], k: int) -> float:
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
    """The later run minus the earlier one, over the tasks of both."""

    value: float
    low: float
    high: float
    tasks: int
    better: int
    worse: int

    @property
    def beyond_chance(self) -> bool:
        return self.low > 0 or self.high < 0


def difference(pairs: Sequence[tuple[Tally, Tally]], k: int) -> Difference | None:
    """Of pass@k; `pairs` are (earlier, later) of one task each. `None` if no task has k samples in both."""
    enough = [(earlier, later) for earlier, later in pairs if earlier.n >= k and later.n >= k]
    if not enough:
        return None
    deltas = np.array(
        [pass_at_k(later.n, later.c, k) - pass_at_k(earlier.n, earlier.c, k) for earlier, later in enough]
    )
    means = _over_samples(*enough[0], k) if len(enough) == 1 else _over_tasks(deltas)
    tail = (1 - LEVEL) / 2
    low, high = (float(bound) for bound in np.quantile(means, [tail, 1 - tail]))
    value = float(deltas.mean())
    better, worse = int((deltas > 0).sum()), int((deltas < 0).sum())
    return Difference(value, min(low, value), max(high, value), len(enough), better, worse)


def _over_tasks(deltas: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Means of tasks drawn again and again."""
    random = np.random.default_rng(_SEED)
    step = max(1, _AT_ONCE // len(deltas))
    parts = []
    for start in range(0, RESAMPLES, step):
        size = (min(step, RESAMPLES - start), len(deltas))
        parts.append(deltas[random.integers(0, len(deltas), size)].mean(axis=1))
    return np.concatenate(parts)


def _over_samples(earlier: Tally, later: Tally, k: int) -> npt.NDArray[np.float64]:
    """Differences of one task whose samples are drawn again and again."""
    random = np.random.default_rng(_SEED)

    def drawn(tally: Tally) -> npt.NDArray[np.float64]:
        table = np.array([pass_at_k(tally.n, c, k) for c in range(tally.n + 1)])
        return np.asarray(table[random.binomial(tally.n, tally.c / tally.n, RESAMPLES)], np.float64)

    return drawn(later) - drawn(earlier)
