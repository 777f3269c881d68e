"""An event loop on virtual time: when nothing is ready, its clock jumps to the next timer instead of waiting.

The clock stands still while a thread works for the loop, so that what takes real time takes no virtual time: jobs of
executors are counted by the loop, and `working` tells of others, such as transactions of a database driver with threads of
its own. A run is therefore deterministic as far as the code under it is.
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
        self._jobs = 0
        self.working: Callable[[], bool] = lambda: False
        """Whether threads work that the loop does not know of."""
        super().__init__(selector)

    def time(self) -> float:
        return self._virtual

    @property
    def clock(self) -> Clock:
        """The clock for what runs in this loop."""
        return Clock(now=lambda: EPOCH + self._virtual, monotonic=self.time)

    @property
    def busy(self) -> bool:
        return self._jobs > 0 or self.working()

    def jump(self, seconds: float) -> None:
        # The loop asks for the time until its next timer; never less than the clock's resolution, or it asks again.
        self._virtual += max(seconds, self._clock_resolution)  # type: ignore[attr-defined]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let no virtual time pass."""
        self._jobs += 1
        try:
            yield
        finally:
            self._jobs -= 1

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        job = super().run_in_executor(executor, func, *args)
        self._jobs += 1
        job.add_done_callback(self._job_done)
        return job

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        # A thread of its own waits for the executor's threads.
        with self.stopped():
            await super().shutdown_default_executor()

    def _job_done(self, job: asyncio.Future[Any]) -> None:
        self._jobs -= 1


def run(main: Callable[[VirtualTimeLoop], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function on a new virtual-time loop, which it gets."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return runner.run(main(loop))
