"""The budget of a run and the pulse of a turn, on a clock that the test turns."""

from __future__ import annotations

import asyncio

import pytest

from towline.common.budget import Budget
from towline.engines.stalls import EngineStalled, PauseGate, PauseState, StallDetector


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


def test_time_on_hold_is_not_charged_and_holds_nest() -> None:
    clock = Clock()
    budget = Budget(10.0, clock=clock)
    clock.now += 4
    assert budget.left == 6.0
    budget.hold()
    clock.now += 100
    budget.hold()
    clock.now += 100
    budget.hold(False)
    clock.now += 100
    assert budget.on_hold
    assert budget.left == 6.0
    budget.hold(False)
    clock.now += 5
    assert budget.left == 1.0
    assert budget.held_seconds == 300.0
    with pytest.raises(ValueError, match="not on hold"):
        budget.hold(False)


async def test_a_budget_is_used_up_by_charged_time_only() -> None:
    clock = Clock()
    budget = Budget(10.0, clock=clock, sleep=clock.sleep)
    budget.hold()
    over = asyncio.ensure_future(budget.used_up())
    for _ in range(5):
        clock.now += 50
        await asyncio.sleep(0)
    assert not over.done()
    budget.hold(False)
    await asyncio.wait_for(over, 20)
    assert budget.left == 0.0
    assert clock.now == 360.0


def test_two_engines_on_hold_at_the_same_time_are_held_once() -> None:
    clock = Clock()
    budget = Budget(10.0, clock=clock)
    one, other = PauseGate(), PauseState()
    stops = [one.pauses.subscribe(budget.hold), other.subscribe(budget.hold)]
    one.clear()
    one.clear()
    clock.now += 10
    other.add("unusable")
    other.add("paused")
    clock.now += 10
    one.set()
    clock.now += 10
    other.remove("paused")
    clock.now += 10
    assert budget.held_seconds == 40.0
    for stop in stops:
        stop()
    clock.now += 3
    assert budget.spent == 3.0


def test_a_pulse_counts_silence_only_while_the_engine_is_asked() -> None:
    clock = Clock()
    pulse = StallDetector(30.0, clock)
    clock.now += 20
    assert pulse.seconds_left == 10.0
    with pulse.suspended():
        clock.now += 500
        assert pulse.seconds_left == 30.0
        with pulse.suspended():
            clock.now += 500
        assert pulse.is_suspended
    clock.now += 29
    assert pulse.seconds_left == 1.0
    pulse.tokens_arrived()
    assert pulse.seconds_left == 30.0
    holds = PauseState()
    with pulse.suspended_while(holds):
        clock.now += 7
        holds.add("paused")
        clock.now += 500
        assert pulse.is_suspended
        holds.remove("paused")
        clock.now += 7
        assert pulse.seconds_left == 23.0


async def test_a_silent_call_is_cancelled_and_a_beating_one_is_not() -> None:
    ended = asyncio.Event()

    async def silent() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    with pytest.raises(EngineStalled, match=r"no token for 0.2 s \(none since the turn started\)"):
        await StallDetector(0.2).guard(silent())
    assert ended.is_set()

    pulse = StallDetector(2.0)

    async def beating() -> str:
        for _ in range(30):
            await asyncio.sleep(0.1)
            pulse.tokens_arrived()
        return "done"

    assert await pulse.guard(beating()) == "done"
    blind = StallDetector(0.05)
    blind.streamed = False
    assert await blind.guard(asyncio.sleep(0.5, "late")) == "late"
