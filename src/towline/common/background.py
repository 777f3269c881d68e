"""Background tasks that end with their owner.

Invariant: a task that fails is reported at once, under its name, and no task outlives `close`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger("towline.background")
T = TypeVar("T")


class BackgroundTasks:
    """The background tasks of one owner."""

    def __init__(self, on_failure: Callable[[BaseException], None] | None = None):
        """`on_failure` is called with the error of a task that failed; by default it is logged."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_failure = on_failure

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Run a coroutine in the background."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def finish(self) -> None:
        """Wait until all tasks have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await self.finish()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._on_failure is not None:
            self._on_failure(error)
        else:
            log.error("background task %s failed", task.get_name(), exc_info=error)
