"""pass@k, its interval, and the difference of two runs, checked against their definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.runs.eval_report import PassCount, difference, estimate, pass_at_k, wilson


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_equals_the_share_of_draws_with_a_pass(case: tuple[int, int, int]) -> None:
    n, c, k = case
    samples = [True] * c + [False] * (n - c)
    draws = list(itertools.combinations(samples, k))
    assert math.isclose(pass_at_k(n, c, k), sum(map(any, draws)) / len(draws), abs_tol=1e-12)


def test_pass_at_k_of_many_samples_stays_in_range() -> None:
    assert pass_at_k(100_000, 1, 1000) == pytest.approx(0.01)
    assert pass_at_k(100_000, 50_000, 1000) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="needs at least 5 samples"):
        pass_at_k(4, 1, 5)


@given(st.floats(0, 1), st.floats(0.1, 1e6))
def test_intervals_contain_their_value_and_stay_in_range(p: float, n: float) -> None:
    low, high = wilson(p, n)
    assert 0 <= low <= p <= high <= 1


def test_wilson_matches_published_values() -> None:
    # Ten of ten, and the textbook 1 of 10.
    assert wilson(1.0, 10) == (pytest.approx(0.7225, abs=1e-4), 1.0)
    assert wilson(0.1, 10) == (pytest.approx(0.0179, abs=1e-4), pytest.approx(0.4042, abs=1e-4))


def test_samples_of_one_task_count_for_less() -> None:
    # The same 32 of 64 passed: once by tasks that all pass or fail, once evenly.
    alike = estimate([PassCount(8, 8)] * 4 + [PassCount(8, 0)] * 4, 1)
    mixed = estimate([PassCount(8, 4)] * 4 + [PassCount(8, 3)] * 2 + [PassCount(8, 5)] * 2, 1)
    assert alike is not None
    assert mixed is not None
    assert alike.value == mixed.value == 0.5
    assert alike.high - alike.low > 2 * (mixed.high - mixed.low)
    # Eight tasks that always pass are eight observations, not sixty-four.
    sure = estimate([PassCount(8, 8)] * 8, 1)
    assert sure is not None
    assert (sure.low, sure.high) == (pytest.approx(wilson(1.0, 8)[0]), 1.0)
    assert estimate([PassCount(3, 1)], 4) is None


def test_interval_coverage_is_about_nominal() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        chances = random.beta(1, 1, 40)
        found = estimate([PassCount(4, int(random.binomial(4, p))) for p in chances], 1)
        assert found is not None
        covered += found.low <= 0.5 <= found.high
    assert 0.91 <= covered / 400 <= 0.985


def test_a_difference_is_paired_by_task() -> None:
    # Hard and easy tasks differ far more than the runs do; pairing sees the runs.
    earlier = [PassCount(8, c) for c in (0, 1, 2, 4, 5, 6, 7, 3, 2, 5)]
    later = [PassCount(8, t.c + 1) for t in earlier]
    found = difference(list(zip(earlier, later, strict=True)), 1)
    assert found is not None
    assert found.value == pytest.approx(1 / 8)
    assert found.low > 0
    assert (found.better, found.worse, found.tasks) == (10, 0, 10)
    same = difference(list(zip(earlier, reversed(earlier), strict=True)), 1)
    assert same is not None
    assert same.low <= 0 <= same.high
    alone = difference([(PassCount(16, 2), PassCount(16, 14))], 4)
    assert alone is not None
    assert alone.low > 0
    assert difference([(PassCount(2, 1), PassCount(8, 1))], 4) is None
    again = difference(list(zip(earlier, later, strict=True)), 1)
    assert again == found, "the same figures give the same interval"
