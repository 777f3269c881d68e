"""Warm sandboxes by spec: created ahead in the background, handed out once, never returned.

A sandbox that has been handed out belongs to its caller until destroyed, so no session ever sees what another one ran
inside. The pool holds unused sandboxes only, and a bounded number of them; when there are too many, those of the least
recently used spec go first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field

from towline.common.budget import uncharged
from towline.errors import TowlineError
from towline.sandboxes.base import Runtime, Sandbox, SandboxError, SandboxSpec

_log = logging.getLogger(__name__)
_MAX_IDLE_FRACTION = 0.1
"""A warm sandbox's lifetime is running: it is discarded after this fraction of `SandboxSpec.seconds`."""


@dataclass(slots=True)
class _SpecPool:
    """The warm sandboxes of one spec."""

    target: int = 0
    """How many to keep ready."""
    ready: deque[tuple[float, Sandbox]] = field(default_factory=deque)
    """With the time of creation, oldest first."""
    creating: set[asyncio.Task[None]] = field(default_factory=set)
    waiting: deque[asyncio.Future[Sandbox]] = field(default_factory=deque)
    """Callers that take the next created sandbox directly."""
    last_used: float = 0.0


class SandboxPool:
    """Keeps `size` sandboxes ready for every spec that was acquired, `max_warm` for all specs together."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        size: int = 2,
        max_warm: int | None = None,
        idle_seconds: float = 600.0,
        concurrency: int = 4,
        on_created: Callable[[Exception | None], None] = lambda error: None,
    ):
        """`on_created` is called for every sandbox: with None, or with the error if it could not be created."""
        self._on_created = on_created
        self._runtime, self._size, self._idle_seconds = runtime, size, idle_seconds
        self._max_warm = max(8, 4 * size) if max_warm is None else max_warm
        self._slots = asyncio.Semaphore(concurrency)
        self._pools: dict[SandboxSpec, _SpecPool] = {}
        self._destroying: set[asyncio.Task[None]] = set()
        self._cleanup: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def warm_count(self) -> int:
        """Sandboxes that are ready or being created."""
        return sum(len(pool.ready) + len(pool.creating) for pool in self._pools.values())

    def ready_count(self, spec: SandboxSpec) -> int:
        """Sandboxes of a spec that `acquire` would return immediately."""
        pool = self._pools.get(spec)
        return len(pool.ready) if pool is not None else 0

    def warm(self, spec: SandboxSpec, count: int = 1) -> None:
        """Create sandboxes in the background until `count` are ready. Failures are logged, and raised by `acquire`."""
        pool = self._pool_of(spec)
        pool.target = max(pool.target, count)
        self._refill(spec, pool)

    async def acquire(self, spec: SandboxSpec) -> Sandbox:
        """An unused sandbox: a warm one if there is one, else a new one."""
        if self._closed:
            raise SandboxError("the sandbox pool is closed")
        pool = self._pool_of(spec)
        pool.target = max(pool.target, self._size)
        while pool.ready:
            _, sandbox = pool.ready.popleft()
            if _alive(sandbox):
                self._refill(spec, pool)
                return sandbox
            self._discard(sandbox)
        if len(pool.waiting) < len(pool.creating):
            made = await self._next(pool)
            if made is not None:
                self._refill(spec, pool)
                return made
        sandbox = await self._create(spec)
        self._refill(spec, pool)
        return sandbox

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        try:
            sandbox = await self._runtime.create(spec)
        except (TowlineError, OSError) as error:
            self._on_created(error)
            raise
        self._on_created(None)
        return sandbox

    async def _next(self, pool: _SpecPool) -> Sandbox | None:
        """The next sandbox that is already being created; None if that fails."""
        waiter: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        pool.waiting.append(waiter)
        try:
            # That start may wait for others, and has a time limit of its own.
            with uncharged():
                return await waiter
        except SandboxError:
            return None
        except asyncio.CancelledError:
            with suppress(ValueError):
                pool.waiting.remove(waiter)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._offer(pool, waiter.result())
            raise

    def _pool_of(self, spec: SandboxSpec) -> _SpecPool:
        pool = self._pools.setdefault(spec, _SpecPool())
        pool.last_used = time.monotonic()
        return pool

    def _refill(self, spec: SandboxSpec, pool: _SpecPool) -> None:
        if self._closed:
            return
        while len(pool.ready) + len(pool.creating) - len(pool.waiting) < pool.target:
            if self.warm_count >= self._max_warm and not self._make_room(spec):
                break
            # An empty context: what is created ahead is charged to no budget of the caller.
            creating = self._create_warm(spec, pool)
            pool.creating.add(asyncio.get_running_loop().create_task(creating, context=Context()))
        if self._cleanup is None:
            self._cleanup = asyncio.get_running_loop().create_task(self._clean_up())

    def _make_room(self, spec: SandboxSpec) -> bool:
        """Discard a warm sandbox of the least recently used other spec."""
        others = [pool for other, pool in self._pools.items() if other != spec and pool.ready]
        if not others:
            return False
        oldest = min(others, key=lambda pool: pool.last_used)
        self._discard(oldest.ready.popleft()[1])
        return True

    async def _create_warm(self, spec: SandboxSpec, pool: _SpecPool) -> None:
        failure: Exception | None = None
        try:
            async with self._slots:
                sandbox = await self._create(spec)
        except (TowlineError, OSError) as error:
            failure = error
        task = asyncio.current_task()
        assert task is not None
        pool.creating.discard(task)  # before a waiter checks again
        if failure is not None:
            _log.warning("cannot create a warm sandbox: %s", failure)
            pool.target = 0  # the next `acquire` raises the reason, and sets the target again
            if pool.waiting:
                waiter = pool.waiting.popleft()
                if not waiter.done():
                    waiter.set_exception(SandboxError(str(failure)))
            return
        self._offer(pool, sandbox)

    def _offer(self, pool: _SpecPool, sandbox: Sandbox) -> None:
        if self._closed:
            self._discard(sandbox)
            return
        while pool.waiting:
            waiter = pool.waiting.popleft()
            if not waiter.done():
                waiter.set_result(sandbox)
                return
        pool.ready.append((time.monotonic(), sandbox))

    def _discard(self, sandbox: Sandbox) -> None:
        task = asyncio.get_running_loop().create_task(_destroy(sandbox))
        self._destroying.add(task)
        task.add_done_callback(self._destroying.discard)

    async def _clean_up(self) -> None:
        """Discard sandboxes that have been idle for too long."""
        while not self._closed:
            await asyncio.sleep(max(0.01, min(self._idle_seconds / 4, 30.0)))
            now = time.monotonic()
            for spec, pool in list(self._pools.items()):
                old = now - self._idle_seconds
                if spec.seconds is not None:
                    old = max(old, now - spec.seconds * _MAX_IDLE_FRACTION)
                while pool.ready and (pool.ready[0][0] < old or not _alive(pool.ready[0][1])):
                    self._discard(pool.ready.popleft()[1])
                if pool.last_used < now - self._idle_seconds:
                    pool.target = 0
                    if not (pool.ready or pool.creating or pool.waiting):
                        del self._pools[spec]
                else:
                    self._refill(spec, pool)

    async def close(self) -> None:
        """Destroy warm sandboxes; those that were handed out still belong to their callers."""
        self._closed = True
        tasks = [task for pool in self._pools.values() for task in pool.creating]
        if self._cleanup is not None:
            tasks.append(self._cleanup)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool in self._pools.values():
            for waiter in pool.waiting:
                if not waiter.done():
                    waiter.set_exception(SandboxError("the sandbox pool is closed"))
            while pool.ready:
                self._discard(pool.ready.popleft()[1])
        self._pools.clear()
        await asyncio.gather(*self._destroying, return_exceptions=True)


def _alive(sandbox: Sandbox) -> bool:
    """Whether a sandbox can still be used, as far as its runtime knows without asking."""
    return bool(getattr(sandbox, "alive", True))


async def _destroy(sandbox: Sandbox) -> None:
    try:
        await sandbox.destroy()
    except (TowlineError, OSError) as error:
        _log.warning("cannot remove a warm sandbox: %s", error)
