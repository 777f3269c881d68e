"""A process that serves for long collects garbage seldom, and as before when it has ended."""

from __future__ import annotations

import gc
import weakref

import pytest

from towline.gateway.heap import serving_for_long


class Loop:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.me = self


def test_the_collector_is_put_back_whatever_happens() -> None:
    before = gc.get_threshold()
    frozen = gc.get_freeze_count()
    with serving_for_long():
        assert gc.get_threshold()[0] > before[0]
        assert gc.get_freeze_count() > frozen
        made = weakref.ref(Loop())
        gc.collect()
        assert made() is None, "what is made while serving is collected as ever"
    with pytest.raises(KeyError), serving_for_long():
        raise KeyError
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
