"""Stall detection: has an engine that was called for a turn stopped producing tokens?

An engine reports every token that arrives to the turn's `StallDetector`; too long without one is a stall. Time in which
the engine is not being called (paused, no free replica, circuit breaker open) does not count: the detector is suspended
for as long as a `PauseState` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

from towline.errors import EngineError

T = TypeVar("T")
PauseCallback = Callable[[bool], None]


class PauseState:
    """Why an engine is paused (by a caller, for a weight update, unusable), with callbacks on every change."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._callbacks: list[PauseCallback] = []

    @property
    def paused(self) -> bool:
        return bool(self._reasons)

    def add(self, reason: str) -> None:
        before = self.paused
        self._reasons.add(reason)
        if not before:
            self._notify(True)

    def remove(self, reason: str) -> None:
        before = self.paused
        self._reasons.discard(reason)
        if before and not self.paused:
            self._notify(False)

    def subscribe(self, callback: PauseCallback) -> Callable[[], None]:
        """Call `callback` on every change, and with `True` at once if paused. Returns how to unsubscribe; if paused at
        that moment, `callback` gets a last `False`."""
        self._callbacks.append(callback)
        if self.paused:
            callback(True)

        def unsubscribe() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)
                if self.paused:
                    callback(False)

        return unsubscribe

    def _notify(self, paused: bool) -> None:
        for callback in list(self._callbacks):
            callback(paused)


class PauseGate(asyncio.Event):
    """An event that is set while an engine samples; its `pauses` follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses = PauseState()
        super().set()

    def set(self) -> None:
        super().set()
        self.pauses.remove("paused")

    def clear(self) -> None:
        super().clear()
        self.pauses.add("paused")


@runtime_checkable
class ReportsPauses(Protocol):
    """An engine that reports when it is paused."""

    @property
    def pauses(self) -> PauseState: ...


class EngineStalled(EngineError):
    """The engine was called for a turn and has produced no token for too long."""

    failure = "stall"


class StallDetector:
    """Watches one turn. `limit` is the longest time without a token, in seconds."""

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic):
        self.limit = limit
        self.tokens = 0
        self.streamed = True
        """False if the engine returns the turn as a whole: then silence means nothing while the turn lasts."""
        self._clock = clock
        self._last = clock()
        self._suspensions = 0
        self._listeners: list[Callable[[], None]] = []

    def tokens_arrived(self, count: int = 1) -> None:
        """May be called from any thread."""
        self.tokens += count
        self._last = self._clock()
        for listener in list(self._listeners):
            listener()

    @property
    def is_suspended(self) -> bool:
        """Whether the engine is not being called at all."""
        return self._suspensions > 0

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """The engine is not being called inside the block; after it, the time limit starts over."""
        self._suspensions += 1
        try:
            yield
        finally:
            self._suspensions -= 1
            self._last = self._clock()

    @contextlib.contextmanager
    def suspended_while(self, pauses: PauseState) -> Iterator[None]:
        """Inside the block, the detector is suspended whenever the engine is paused."""

        def on_change(paused: bool) -> None:
            self._suspensions += 1 if paused else -1
            self._last = self._clock()

        unsubscribe = pauses.subscribe(on_change)
        try:
            yield
        finally:
            unsubscribe()

    @property
    def idle_seconds(self) -> float:
        """Seconds without a token."""
        return 0.0 if self.is_suspended else self._clock() - self._last

    @property
    def seconds_left(self) -> float:
        """Seconds without a token until the turn counts as stalled."""
        return self.limit - self.idle_seconds

    def error(self) -> EngineStalled:
        before = f"{self.tokens} before that" if self.tokens else "none since the turn started"
        return EngineStalled(f"the engine has produced no token for {self.limit:g} s ({before})")

    async def next_token(self) -> None:
        """Return when the next token arrives."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def listener() -> None:
            loop.call_soon_threadsafe(arrived.set)

        self._listeners.append(listener)
        try:
            await arrived.wait()
        finally:
            self._listeners.remove(listener)

    async def guard(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of the call; raises `EngineStalled` and cancels the call when no token arrives for too long."""
        task = asyncio.ensure_future(call)
        try:
            while True:
                await asyncio.wait((task,), timeout=max(self.seconds_left, 0.0) or self.limit)
                if task.done():
                    return task.result()
                if self.seconds_left <= 0 and self.streamed:
                    raise self.error()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
