"""A time budget that can be put on hold, for example while an engine is paused.

`run_within` bounds work by a budget. What the work does inside `uncharged` is charged neither to that budget nor to those
around it: the budgets of a task are in its context, so code deep below need not know them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class Budget:
    """A budget of seconds that runs from its creation, except while it is on hold. Holds nest."""

    def __init__(
        self,
        seconds: float = math.inf,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self.seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._began = clock()
        self._holds = 0
        self._held_since = 0.0
        self._held = 0.0
        self._running = asyncio.Event()
        self._running.set()

    @property
    def on_hold(self) -> bool:
        return self._holds > 0

    @property
    def held_seconds(self) -> float:
        """Time on hold, which is not charged."""
        return self._held + (self._clock() - self._held_since if self.on_hold else 0.0)

    @property
    def spent(self) -> float:
        return self._clock() - self._began - self.held_seconds

    @property
    def left(self) -> float:
        return self.seconds - self.spent

    def hold(self, held: bool = True) -> None:
        """Put the budget on hold, or with `False` release one hold."""
        if held:
            if not self.on_hold:
                self._held_since = self._clock()
                self._running.clear()
            self._holds += 1
            return
        if not self.on_hold:
            raise ValueError("the budget is not on hold")
        self._holds -= 1
        if not self.on_hold:
            self._held += self._clock() - self._held_since
            self._running.set()

    async def used_up(self) -> None:
        """Wait until the budget is used up."""
        while True:
            await self._running.wait()
            left = self.left
            if left <= 0:
                return
            # After a hold in the meantime some time is left.
            await self._sleep(min(left, _LONGEST))


_LONGEST = 3600.0
"""Longest single sleep of the event loop."""


_charged: ContextVar[tuple[Budget, ...]] = ContextVar("charged", default=())
"""The budgets that the time of this task is charged to."""


@contextlib.contextmanager
def charged_to(budget: Budget) -> Iterator[None]:
    """Charge the block, and the tasks that it creates, to the budget."""
    token = _charged.set((*_charged.get(), budget))
    try:
        yield
    finally:
        _charged.reset(token)


@contextlib.contextmanager
def uncharged() -> Iterator[None]:
    """Charge the block to no budget: those of this task are on hold meanwhile."""
    budgets = _charged.get()
    for budget in budgets:
        budget.hold()
    try:
        yield
    finally:
        for budget in budgets:
            budget.hold(False)


async def run_within(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """The result of the work; cancels it and raises `TimeoutError` when its budget is used up."""
    budget = Budget(seconds)
    with charged_to(budget):
        task = asyncio.ensure_future(work)
    used_up = asyncio.ensure_future(budget.used_up())
    try:
        await asyncio.wait((task, used_up), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise TimeoutError(f"timed out after {seconds:g} seconds")
    finally:
        used_up.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
