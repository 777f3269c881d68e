"""The pool: warm sandboxes are handed out once, refilled in the background, bounded, and all destroyed in the end."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from towline.sandboxes.base import SandboxError, SandboxSpec, execute
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
from towline.sandboxes.pool import SandboxPool


class Counted:
    """A runtime that counts sandboxes: created and alive."""

    name = "counted"

    def __init__(self) -> None:
        self.live: set[CountedSandbox] = set()
        self.made = 0
        self.failing: str = ""
        self.gate = asyncio.Event()
        self.gate.set()

    async def create(self, spec: SandboxSpec) -> Any:
        await self.gate.wait()
        await asyncio.sleep(0)
        if self.failing:
            raise SandboxError(self.failing)
        self.made += 1
        sandbox = CountedSandbox(self, spec)
        self.live.add(sandbox)
        return sandbox


class CountedSandbox:
    _numbers = itertools.count()

    def __init__(self, runtime: Counted, spec: SandboxSpec):
        self.runtime, self.spec, self.id = runtime, spec, str(next(self._numbers))
        self.alive = True

    async def destroy(self) -> None:
        self.runtime.live.discard(self)


async def until(condition: Callable[[], object]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition did not become true")


async def settle(pool: SandboxPool, count: int) -> None:
    for _ in range(1000):
        if (
            pool.warm_count == count
            and not any(warm.creating for warm in pool._pools.values())
            and not pool._destroying
        ):
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{pool.warm_count} are warm, not {count}")


async def test_each_is_handed_out_once_and_refilled() -> None:
    runtime = Counted()
    pool = SandboxPool(runtime, size=2, concurrency=2)  # type: ignore[arg-type]
    one, other = SandboxSpec(), SandboxSpec(workdir="/other")
    taken = await asyncio.gather(*(pool.acquire(one if number % 2 else other) for number in range(20)))
    assert len({sandbox.id for sandbox in taken}) == 20
    assert [sandbox.spec for sandbox in taken] == [one if number % 2 else other for number in range(20)]
    await settle(pool, 4)
    made = runtime.made
    warm = await pool.acquire(one)
    assert runtime.made == made, "it was ready"
    await settle(pool, 4)
    assert runtime.made == made + 1
    assert len(runtime.live) == 25
    await pool.close()
    assert len(runtime.live) == 21, "handed-out sandboxes still belong to their callers"
    assert warm in runtime.live
    with pytest.raises(SandboxError, match="closed"):
        await pool.acquire(one)


async def test_all_specs_together_are_bounded_and_the_least_recently_used_goes() -> None:
    runtime = Counted()
    pool = SandboxPool(runtime, size=2, max_warm=4)  # type: ignore[arg-type]
    specs = [SandboxSpec(workdir=f"/{number}") for number in range(5)]
    for number, spec in enumerate(specs, 1):
        pool.warm(spec, 2)
        await settle(pool, min(2 * number, 4))
    assert sorted(sandbox.spec.workdir for sandbox in runtime.live) == ["/3", "/3", "/4", "/4"]
    await pool.close()
    assert not runtime.live


async def test_callers_wait_for_what_is_being_created_and_a_cancelled_one_loses_nothing() -> None:
    runtime = Counted()
    pool = SandboxPool(runtime, size=1)  # type: ignore[arg-type]
    spec = SandboxSpec()
    runtime.gate.clear()
    pool.warm(spec, 1)
    waiting = asyncio.create_task(pool.acquire(spec))
    await until(lambda: pool._pools[spec].waiting)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    again = asyncio.create_task(pool.acquire(spec))
    await until(lambda: pool._pools[spec].waiting)
    runtime.gate.set()
    sandbox = await again
    await settle(pool, 1)
    assert runtime.made == 2, "the one waited for, and its replacement"
    assert sandbox in runtime.live
    await pool.close()
    assert runtime.live == {sandbox}


async def test_failures_reach_the_caller_and_dead_sandboxes_are_not_handed_out() -> None:
    runtime = Counted()
    pool = SandboxPool(runtime, size=1, idle_seconds=0.2)  # type: ignore[arg-type]
    spec = SandboxSpec()
    runtime.failing = "no more loops"
    pool.warm(spec, 1)
    await until(lambda: not pool._pools[spec].creating)
    with pytest.raises(SandboxError, match="no more loops"):
        await pool.acquire(spec)
    runtime.failing = ""
    pool.warm(spec, 1)
    await settle(pool, 1)
    dead = next(iter(runtime.live))
    dead.alive = False
    taken = await pool.acquire(spec)
    assert taken is not dead
    await settle(pool, 1)
    # Idle sandboxes are discarded.
    await settle(pool, 0)
    assert runtime.live == {taken}
    await pool.close()


async def test_with_real_sandboxes(tmp_path: Path) -> None:
    runtime = BubblewrapRuntime(tmp_path)
    await runtime.open()
    pool = SandboxPool(runtime, size=2)
    spec = SandboxSpec()
    pool.warm(spec, 2)
    taken = await asyncio.gather(*(pool.acquire(spec) for _ in range(4)))
    done = await asyncio.gather(*(execute(sandbox, ["sh", "-c", "ls -A; echo x > mine; ls"]) for sandbox in taken))
    assert [run.stdout for run in done] == [b"mine\n"] * 4, "no sandbox sees what another one wrote"
    await asyncio.gather(*(sandbox.destroy() for sandbox in taken))
    await pool.close()
    await runtime.close()
    assert os.listdir(tmp_path) == []
