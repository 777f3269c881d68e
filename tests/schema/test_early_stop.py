"""What stopping early cut, saved and favours: exact where it is known, `None` where it is not."""

from __future__ import annotations

import pytest

from towline.schema import EarlyStop, SessionLength


def done(seconds: float, turns: int = 1, tokens: int = 10) -> SessionLength:
    return SessionLength(finished=True, cut=False, turns=turns, trained_tokens=tokens, seconds=seconds)


def cut(seconds: float, turns: int = 1, tokens: int = 10, *, run_ended: bool = False) -> SessionLength:
    return SessionLength(
        finished=False, cut=True, turns=turns, trained_tokens=tokens, seconds=seconds, run_ended=run_ended
    )


def test_nothing_is_reported_without_a_cut() -> None:
    failed = SessionLength(finished=False, cut=False, turns=0, trained_tokens=0, seconds=1.0)
    assert EarlyStop.of([]) is None
    assert EarlyStop.of([[done(1.0), done(2.0)], [failed]]) is None


def test_what_is_saved_is_estimated_from_longer_siblings_only() -> None:
    # 2 s: siblings of 4 and 8 s ran longer, so 4 s are left on average. 0 s: the mean of all. 9 s: nothing is known.
    task = [done(1.0), done(4.0), done(8.0), cut(2.0), cut(0.0, 0, 0), cut(9.0)]
    found = EarlyStop.of([task])
    assert found is not None
    assert (found.cut, found.not_started, found.unestimated) == (3, 1, 1)
    assert found.cut_seconds == 11.0
    assert found.saved_seconds == pytest.approx(4.0 + 13.0 / 3)
    # The siblings of another task say nothing about this one.
    alone = EarlyStop.of([[done(1.0), cut(9.0)], [done(100.0)]])
    assert alone is not None
    assert (alone.saved_seconds, alone.unestimated, alone.finished.sessions) == (None, 1, 1)


def test_a_session_that_was_cut_after_its_run_saves_nothing_of_it() -> None:
    found = EarlyStop.of([[done(8.0), cut(2.0, run_ended=True)]])
    assert found is not None
    assert (found.saved_seconds, found.unestimated) == (0.0, 0)


def test_a_bias_towards_short_sessions_is_seen() -> None:
    biased = EarlyStop.of([[done(1.0, 2, 20), done(3.0, 4, 40), cut(5.0, 9, 90), cut(0.0, 0, 0)]])
    assert biased is not None
    assert biased.favours_short
    finished, so_far = biased.finished, biased.so_far
    assert (finished.sessions, finished.turns, finished.trained_tokens, finished.seconds) == (2, 3, 30, 2)
    assert (so_far.sessions, so_far.turns, so_far.trained_tokens, so_far.seconds) == (1, 9, 90, 5)
    unclear = EarlyStop.of([[done(3.0), cut(1.0)]])
    assert unclear is not None
    assert not unclear.favours_short
    unstarted = EarlyStop.of([[done(3.0), cut(0.0)]])
    assert unstarted is not None
    assert not unstarted.favours_short
    assert unstarted.so_far.seconds is None
