"""Whether an engine that is being asked for a turn produces anything: the one place where a stall is noticed.

The engine beats the pulse with every token that arrives. Time in which the engine is not being asked (paused, no replica
free, its circuit breaker open) does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from towline.engines.holds import Holds
from towline.errors import EngineError

T = TypeVar("T")


class EngineStalled(EngineError):
    """The engine was asked for a turn and has produced no token for too long."""

    failure = "stall"


class Pulse:
    """The pulse of one turn. `limit` is the longest silence in seconds."""

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic):
        self.limit = limit
        self.tokens = 0
        self._clock = clock
        self._last = clock()
        self.blind = False
        """The engine tells the turn as a whole: its silence says nothing while the turn lasts."""
        self._waits = 0
        self._listeners: list[Callable[[], None]] = []

    def beat(self, tokens: int = 1) -> None:
        """Tokens have arrived. May be called from any thread."""
        self.tokens += tokens
        self._last = self._clock()
        for listener in list(self._listeners):
            listener()

    @property
    def waiting(self) -> bool:
        """Whether the engine is not being asked at all."""
        return self._waits > 0

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """The engine is not being asked inside the block; behind it, silence is counted anew."""
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            self._last = self._clock()

    @contextlib.contextmanager
    def follow(self, holds: Holds) -> Iterator[None]:
        """Inside the block, the engine is not being asked while it is on hold."""

        def hold(held: bool) -> None:
            self._waits += 1 if held else -1
            self._last = self._clock()

        stop = holds.watch(hold)
        try:
            yield
        finally:
            stop()

    @property
    def silence(self) -> float:
        """Seconds without a token."""
        return 0.0 if self.waiting else self._clock() - self._last

    @property
    def left(self) -> float:
        """Seconds of silence until the turn is stalled."""
        return self.limit - self.silence

    def stalled(self) -> EngineStalled:
        after = f"after {self.tokens} tokens" if self.tokens else "not even the first"
        return EngineStalled(f"the engine has produced no token for {self.limit:g} s, {after}")

    async def next_beat(self) -> None:
        """Return with the next token."""
        loop, beaten = asyncio.get_running_loop(), asyncio.Event()

        def listener() -> None:
            loop.call_soon_threadsafe(beaten.set)

        self._listeners.append(listener)
        try:
            await beaten.wait()
        finally:
            self._listeners.remove(listener)

    async def guard(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of the call; `EngineStalled`, and the call cancelled, if the silence lasts too long."""
        task = asyncio.ensure_future(call)
        try:
            while True:
                await asyncio.wait((task,), timeout=max(self.left, 0.0) or self.limit)
                if task.done():
                    return task.result()
                if self.left <= 0 and not self.blind:
                    raise self.stalled()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
