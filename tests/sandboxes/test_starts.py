"""The start limit: never more creations at once than it says, whatever asks for them, and waiting costs no budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from towline.common.budget import Budget, charged_to, run_within
from towline.sandboxes.base import SandboxError, SandboxSpec
from towline.sandboxes.pool import SandboxPool
from towline.sandboxes.starts import LimitedRuntime, StartLimiter, default_start_limit


class Gated:
    """A runtime that counts how many sandboxes are being created, and finishes one per `step`."""

    name = "gated"
    facts: Any = None

    def __init__(self) -> None:
        self.creating = self.most = self.made = 0
        self.steps = asyncio.Semaphore(0)
        self.failing = False

    async def create(self, spec: SandboxSpec) -> Any:
        self.creating += 1
        self.most = max(self.most, self.creating)
        try:
            await self.steps.acquire()
            if self.failing:
                raise SandboxError("no room")
            self.made += 1
            return GatedSandbox(spec)
        finally:
            self.creating -= 1

    async def open(self) -> None: ...

    async def prepare(self, spec: SandboxSpec) -> None: ...

    async def close(self) -> None: ...


class GatedSandbox:
    def __init__(self, spec: SandboxSpec):
        self.spec = spec

    async def destroy(self) -> None: ...


async def until(condition: Callable[[], object]) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition did not become true")


async def test_two_pools_never_start_more_than_the_limit() -> None:
    starts, one, other = StartLimiter(3, 60.0), Gated(), Gated()
    pools = [SandboxPool(LimitedRuntime(each, starts), size=2, concurrency=4) for each in (one, other)]
    specs = [SandboxSpec(workdir=f"/{number}") for number in range(4)]
    for pool in pools:
        for spec in specs:
            pool.warm(spec, 2)
    wanted = [asyncio.ensure_future(pool.acquire(spec)) for pool in pools for spec in specs for _ in range(3)]
    most = 0
    for _ in range(400):
        await asyncio.sleep(0)
        assert starts.starting == one.creating + other.creating <= 3
        most = max(most, starts.starting)
        if most == 3:
            one.steps.release()
            other.steps.release()
    await asyncio.gather(*wanted)
    assert most == 3
    status = starts.status()
    assert (status["limit"], status["failed"]) == (3, 0)
    assert status["started"] == one.made + other.made >= len(wanted)
    assert status["longest_seconds"] >= status["mean_seconds"] >= 0
    for pool in pools:
        await pool.close()
    assert (starts.starting, starts.waiting) == (0, 0)


async def test_waiting_for_a_start_is_not_charged_and_the_start_is() -> None:
    starts, runtime = StartLimiter(1, 60.0), Gated()
    pool = SandboxPool(LimitedRuntime(runtime, starts), size=0)
    first = asyncio.ensure_future(pool.acquire(SandboxSpec()))
    await until(lambda: starts.starting)
    budget = Budget()
    with charged_to(budget):
        second = asyncio.ensure_future(pool.acquire(SandboxSpec()))
    await until(lambda: starts.waiting == 1)
    assert budget.on_hold
    assert runtime.creating == 1
    runtime.steps.release()
    await first
    await until(lambda: runtime.creating == 1)
    assert not budget.on_hold
    runtime.steps.release()
    await second


async def test_a_caller_that_waits_for_a_warm_start_is_not_charged() -> None:
    starts, runtime = StartLimiter(1, 60.0), Gated()
    pool = SandboxPool(LimitedRuntime(runtime, starts), size=0)
    pool.warm(SandboxSpec(), 1)
    await until(lambda: runtime.creating == 1)
    budget = Budget()
    with charged_to(budget):
        taken = asyncio.ensure_future(pool.acquire(SandboxSpec()))
    await until(lambda: budget.on_hold)
    runtime.steps.release()
    await taken
    assert not budget.on_hold
    assert runtime.made == 1
    await pool.close()


async def test_a_start_that_hangs_fails_and_makes_room() -> None:
    starts, runtime = StartLimiter(1, 0.05), Gated()
    limited = LimitedRuntime(runtime, starts)
    hung, other = (asyncio.ensure_future(limited.create(SandboxSpec())) for _ in range(2))
    with pytest.raises(SandboxError, match=r"started no sandbox within 0\.05 s"):
        await hung
    with pytest.raises(SandboxError, match=r"raise node\.seconds\.start"):
        await other
    runtime.failing = True
    runtime.steps.release()
    with pytest.raises(SandboxError, match="no room"):
        await limited.create(SandboxSpec())
    status = starts.status()
    assert (status["started"], status["failed"], status["starting"], status["waiting"]) == (0, 3, 0, 0)
    assert status["mean_seconds"] is None


async def test_a_cancelled_caller_leaves_the_queue() -> None:
    starts, runtime = StartLimiter(1, 60.0), Gated()
    limited = LimitedRuntime(runtime, starts)
    first, second, third = (asyncio.ensure_future(limited.create(SandboxSpec())) for _ in range(3))
    await until(lambda: starts.waiting == 2)
    second.cancel()
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    runtime.steps.release()
    await third
    assert (starts.starting, starts.waiting, runtime.most) == (0, 0, 1)


async def test_work_within_a_budget() -> None:
    async def hangs() -> None:
        await asyncio.Event().wait()

    async def gives() -> int:
        return 7

    async def fails() -> None:
        raise TimeoutError("its own")

    assert await run_within(gives(), 60.0) == 7
    with pytest.raises(TimeoutError, match=r"timed out after 0\.01 seconds"):
        await run_within(hangs(), 0.01)
    with pytest.raises(TimeoutError, match="its own"):
        await run_within(fails(), 60.0)
    assert default_start_limit() >= 2
