"""How long simulated sessions last: a log-normal distribution fitted to measured coding-agent runs.

Source: TraceLab (University of Washington, https://github.com/uw-syfi/TraceLab), a public trace of coding agents (Claude
Code and Codex): 39,202 requests, each from a user's input to the agent's final response, tool calls included. Its table
`session_timing_distribution` gives the response time per request: p50 38.3 s, p90 6.4 min (6.376 in its macros), p99
43.9 min, mean 4.3 min. Only these quantiles are published, so they are fitted here: with the median as published, the p90
gives a standard deviation of the logarithm of 1.80 and the p99 one of 1.82, so the log-normal form fits; we take the mean
of both. The mean of the fit, 196 s, is below the published one, which includes requests of many hours.

A session's time budget cuts the tail: a longer session ends by timeout, as on a node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

P50, P90, P99 = 38.3, 6.376 * 60, 43.9 * 60
"""Published quantiles, in seconds."""


def fitted_sigma() -> float:
    """The standard deviation of the logarithm that the published quantiles give."""
    normal = NormalDist()
    found = [math.log(value / P50) / normal.inv_cdf(share) for value, share in ((P90, 0.9), (P99, 0.99))]
    return sum(found) / len(found)


@dataclass(frozen=True, slots=True)
class LogNormalDurations:
    """Durations of sessions, in seconds."""

    median: float = P50
    sigma: float = fitted_sigma()
    """Standard deviation of the logarithm."""
    limit: float = 1800.0
    """The time budget of a session."""

    def draw(self, seed: int, group: int, samples: int) -> list[float]:
        """The durations of a group: a function of the seed and its number, so that every run draws the same."""
        values = np.random.default_rng((seed, group)).lognormal(math.log(self.median), self.sigma, samples)
        return [min(float(value), self.limit) for value in values]

    @property
    def mean(self) -> float:
        """The mean with the limit applied."""
        normal, mu = NormalDist(), math.log(self.median)
        cut = (math.log(self.limit) - mu) / self.sigma
        below = math.exp(mu + self.sigma**2 / 2) * normal.cdf(cut - self.sigma)
        return below + self.limit * (1 - normal.cdf(cut))
