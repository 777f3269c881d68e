"""An event loop on virtual time: when nothing is ready, its clock jumps to the next timer instead of waiting.

What takes real time takes no virtual time. Jobs for executors run at once in the loop's thread. The clock stands still while
`working` says that other threads work for the loop, such as those of a database driver. A run without such threads is
deterministic as far as the code under it is.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, TypeVar

from towline.common.clock import Clock
from towline.errors import TowlineError

T = TypeVar("T")
EPOCH = 1_750_000_000.0
"""The time of day at which virtual time starts."""


class VirtualTimeStuck(TowlineError):
    """Nothing is ready, no timer is set and no thread works: the program waits forever."""


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for threads, never for timers."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self.loop.busy:
            # A thread that finishes wakes the loop through its self-pipe.
            return super().select(None)
        if timeout is None:
            raise VirtualTimeStuck("the simulation waits for something that never happens")
        self.loop.jump(timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Use `run`, or a runner of asyncio with this class as its loop factory."""

    def __init__(self) -> None:
        selector = _JumpingSelector()
        selector.loop = self
        self._virtual = 0.0
        self._stopped = 0
        self.working: Callable[[], bool] = lambda: False
        """Whether threads work for the loop."""
        super().__init__(selector)

    def time(self) -> float:
        return self._virtual

    @property
    def clock(self) -> Clock:
        """The clock for what runs in this loop."""
        return Clock(now=lambda: EPOCH + self._virtual, monotonic=self.time)

    @property
    def busy(self) -> bool:
        return self._stopped > 0 or self.working()

    def jump(self, seconds: float) -> None:
        # The loop asks for the time until its next timer; never less than the clock's resolution, or it asks again.
        self._virtual += max(seconds, self._clock_resolution)  # type: ignore[attr-defined]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let no virtual time pass."""
        self._stopped += 1
        try:
            yield
        finally:
            self._stopped -= 1

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run the job at once, in this thread: the order of events does not depend on the machine."""
        job: asyncio.Future[T] = self.create_future()
        try:
            job.set_result(func(*args))
        except Exception as error:
            job.set_exception(error)
        return job


def run(main: Callable[[VirtualTimeLoop], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function on a new virtual-time loop, which it gets."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return runner.run(main(loop))
