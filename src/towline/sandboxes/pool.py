"""Warm sandboxes by spec: made ahead in the background, handed out once, never taken back.

A sandbox that has been handed out belongs to whoever got it, until they destroy it: what once ran inside can therefore
never meet another session. The pool holds untouched ones only, a bounded number of them; when there are too many, those
of the spec that was wanted longest ago go first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from towline.errors import TowlineError
from towline.sandboxes.base import Runtime, Sandbox, SandboxError, Spec

_log = logging.getLogger(__name__)
_SHARE_OF_LIFE = 0.1
"""A warm sandbox's time runs: it is given up when so much of `Spec.seconds` is over."""


@dataclass(slots=True)
class _Shelf:
    """What there is of one spec."""

    target: int = 0
    """As many are kept ready."""
    ready: deque[tuple[float, Sandbox]] = field(default_factory=deque)
    """With the time each was made, oldest first."""
    making: set[asyncio.Task[None]] = field(default_factory=set)
    waiting: deque[asyncio.Future[Sandbox]] = field(default_factory=deque)
    """Who takes what is being made, before it is ever on the shelf."""
    wanted: float = 0.0


class Pool:
    """`size` sandboxes are kept ready for every spec that was acquired, `most` of all specs together."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        size: int = 2,
        most: int | None = None,
        idle_seconds: float = 600.0,
        makers: int = 4,
        made: Callable[[Exception | None], None] = lambda error: None,
    ):
        """`made` is told of every sandbox that was made (None) or could not be."""
        self._made = made
        self._runtime, self._size, self._idle = runtime, size, idle_seconds
        self._most = max(8, 4 * size) if most is None else most
        self._makers = asyncio.Semaphore(makers)
        self._shelves: dict[Spec, _Shelf] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._tidying: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def warm_count(self) -> int:
        """Sandboxes that are ready or being made."""
        return sum(len(shelf.ready) + len(shelf.making) for shelf in self._shelves.values())

    def ready_count(self, spec: Spec) -> int:
        """Sandboxes of a spec that an `acquire` would get at once."""
        shelf = self._shelves.get(spec)
        return len(shelf.ready) if shelf is not None else 0

    def warm(self, spec: Spec, count: int = 1) -> None:
        """Have at least so many ready soon. Returns at once; what fails is logged, and raised by `acquire` if it lasts."""
        shelf = self._shelf(spec)
        shelf.target = max(shelf.target, count)
        self._refill(spec, shelf)

    async def acquire(self, spec: Spec) -> Sandbox:
        """A sandbox that nobody has used: a warm one if there is one, else one that is made now."""
        if self._closed:
            raise SandboxError("the pool of sandboxes is closed")
        shelf = self._shelf(spec)
        shelf.target = max(shelf.target, self._size)
        while shelf.ready:
            _, sandbox = shelf.ready.popleft()
            if _alive(sandbox):
                self._refill(spec, shelf)
                return sandbox
            self._discard(sandbox)
        if len(shelf.waiting) < len(shelf.making):
            made = await self._next(shelf)
            if made is not None:
                self._refill(spec, shelf)
                return made
        sandbox = await self._create(spec)
        self._refill(spec, shelf)
        return sandbox

    async def _create(self, spec: Spec) -> Sandbox:
        try:
            sandbox = await self._runtime.create(spec)
        except (TowlineError, OSError) as error:
            self._made(error)
            raise
        self._made(None)
        return sandbox

    async def _next(self, shelf: _Shelf) -> Sandbox | None:
        """What is being made already; None if it failed."""
        place: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        shelf.waiting.append(place)
        try:
            return await place
        except SandboxError:
            return None
        except asyncio.CancelledError:
            with suppress(ValueError):
                shelf.waiting.remove(place)
            if place.done() and not place.cancelled() and place.exception() is None:
                self._shelve(shelf, place.result())
            raise

    def _shelf(self, spec: Spec) -> _Shelf:
        shelf = self._shelves.setdefault(spec, _Shelf())
        shelf.wanted = time.monotonic()
        return shelf

    def _refill(self, spec: Spec, shelf: _Shelf) -> None:
        if self._closed:
            return
        while len(shelf.ready) + len(shelf.making) - len(shelf.waiting) < shelf.target:
            if self.warm_count >= self._most and not self._make_room(spec):
                break
            shelf.making.add(asyncio.get_running_loop().create_task(self._make(spec, shelf)))
        if self._tidying is None:
            self._tidying = asyncio.get_running_loop().create_task(self._tidy())

    def _make_room(self, spec: Spec) -> bool:
        """Give up a warm sandbox of the spec that was wanted longest ago, other than this one."""
        others = [shelf for other, shelf in self._shelves.items() if other != spec and shelf.ready]
        if not others:
            return False
        oldest = min(others, key=lambda shelf: shelf.wanted)
        self._discard(oldest.ready.popleft()[1])
        return True

    async def _make(self, spec: Spec, shelf: _Shelf) -> None:
        failure: Exception | None = None
        try:
            async with self._makers:
                sandbox = await self._create(spec)
        except (TowlineError, OSError) as error:
            failure = error
        task = asyncio.current_task()
        assert task is not None
        shelf.making.discard(task)  # before anyone who waits looks again
        if failure is not None:
            _log.warning("a sandbox could not be made ahead: %s", failure)
            shelf.target = 0  # whoever acquires the next one sees the reason, and sets it again
            if shelf.waiting:
                place = shelf.waiting.popleft()
                if not place.done():
                    place.set_exception(SandboxError(str(failure)))
            return
        self._shelve(shelf, sandbox)

    def _shelve(self, shelf: _Shelf, sandbox: Sandbox) -> None:
        if self._closed:
            self._discard(sandbox)
            return
        while shelf.waiting:
            place = shelf.waiting.popleft()
            if not place.done():
                place.set_result(sandbox)
                return
        shelf.ready.append((time.monotonic(), sandbox))

    def _discard(self, sandbox: Sandbox) -> None:
        task = asyncio.get_running_loop().create_task(_destroy(sandbox))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _tidy(self) -> None:
        """Give up what nobody has wanted for long."""
        while not self._closed:
            await asyncio.sleep(max(0.01, min(self._idle / 4, 30.0)))
            now = time.monotonic()
            for spec, shelf in list(self._shelves.items()):
                old = now - self._idle
                if spec.seconds is not None:
                    old = max(old, now - spec.seconds * _SHARE_OF_LIFE)
                while shelf.ready and (shelf.ready[0][0] < old or not _alive(shelf.ready[0][1])):
                    self._discard(shelf.ready.popleft()[1])
                if shelf.wanted < now - self._idle:
                    shelf.target = 0
                    if not (shelf.ready or shelf.making or shelf.waiting):
                        del self._shelves[spec]
                else:
                    self._refill(spec, shelf)

    async def close(self) -> None:
        """Destroy what is warm; what was handed out stays its holder's."""
        self._closed = True
        tasks = [task for shelf in self._shelves.values() for task in shelf.making]
        if self._tidying is not None:
            tasks.append(self._tidying)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for shelf in self._shelves.values():
            for place in shelf.waiting:
                if not place.done():
                    place.set_exception(SandboxError("the pool of sandboxes is closed"))
            while shelf.ready:
                self._discard(shelf.ready.popleft()[1])
        self._shelves.clear()
        await asyncio.gather(*self._ending, return_exceptions=True)


def _alive(sandbox: Sandbox) -> bool:
    """Whether a sandbox can still be used, as far as its runtime notices by itself."""
    return bool(getattr(sandbox, "alive", True))


async def _destroy(sandbox: Sandbox) -> None:
    try:
        await sandbox.destroy()
    except (TowlineError, OSError) as error:
        _log.warning("a warm sandbox could not be removed: %s", error)
