"""A process that serves for long collects garbage seldom, and as before when it has ended."""

from __future__ import annotations

import gc
import weakref

import pytest

from towline.common.gc_tuning import gc_tuning


class Loop:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.me = self


def test_the_collector_is_put_back_whatever_happens() -> None:
    before = gc.get_threshold()
    frozen = gc.get_freeze_count()
    with gc_tuning():
        assert gc.get_threshold()[0] > before[0]
        assert gc.get_freeze_count() > frozen
        made = weakref.ref(Loop())
        gc.collect()
        assert made() is None, "what is made while serving is collected as ever"
    with pytest.raises(KeyError), gc_tuning():
        raise KeyError
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
