"""The start limit of a node: how many sandboxes are created at once, whatever asks for them.

Starting sandboxes costs CPU, disk and kernel locks that running ones do not, so a burst of starts makes each of them slow.
`StartLimiter` admits starts in the order of arrival, and `LimitedRuntime` sends every `create` of a runtime through it:
those of sessions, of the warm pool, of evaluations, probes and builds. A start has a time limit of its own, which begins
when it is admitted; time spent waiting for admission is charged to no budget of the caller.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from statistics import fmean
from typing import Any

from towline.common.budget import uncharged
from towline.sandboxes.base import Runtime, RuntimeFacts, Sandbox, SandboxError, SandboxSpec

_RECENT = 200
"""Starts whose durations are reported."""


def default_start_limit() -> int:
    """Twice the CPUs that this process may use, at least 2."""
    return max(2, 2 * len(os.sched_getaffinity(0)))


class StartLimiter:
    """Admits at most `limit` starts at a time; each may take `seconds`."""

    def __init__(self, limit: int, seconds: float):
        self.limit = limit
        self.seconds = seconds
        self.starting = 0
        self.waiting = 0
        self.started = 0
        self.failed = 0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._slots = asyncio.Semaphore(limit)

    async def create(self, runtime: Runtime, spec: SandboxSpec) -> Sandbox:
        """Create a sandbox once there is room for another start."""
        self.waiting += 1
        try:
            with uncharged():
                await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.starting += 1
        began = time.monotonic()
        made = False
        try:
            async with asyncio.timeout(self.seconds) as limit:
                sandbox = await runtime.create(spec)
            made = True
            return sandbox
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise SandboxError(
                f"the {runtime.name} runtime started no sandbox within {self.seconds:g} s: see its log, or raise "
                "node.seconds.start"
            ) from error
        finally:
            self.starting -= 1
            self.started += made
            self.failed += not made
            if made:
                self._recent.append(time.monotonic() - began)
            self._slots.release()

    def status(self) -> dict[str, Any]:
        """Starts now and so far, and the durations of the most recent ones."""
        recent = self._recent
        return {
            "limit": self.limit,
            "starting": self.starting,
            "waiting": self.waiting,
            "started": self.started,
            "failed": self.failed,
            "mean_seconds": round(fmean(recent), 3) if recent else None,
            "longest_seconds": round(max(recent), 3) if recent else None,
        }


class LimitedRuntime:
    """A runtime whose sandboxes are created under a start limit."""

    def __init__(self, runtime: Runtime, starts: StartLimiter):
        self._runtime = runtime
        self._starts = starts
        self.name = runtime.name

    @property
    def facts(self) -> RuntimeFacts:
        return self._runtime.facts

    async def open(self) -> None:
        await self._runtime.open()

    async def prepare(self, spec: SandboxSpec) -> None:
        await self._runtime.prepare(spec)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return await self._starts.create(self._runtime, spec)

    async def close(self) -> None:
        await self._runtime.close()
