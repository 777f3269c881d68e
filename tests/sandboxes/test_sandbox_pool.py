"""The pool: warm sandboxes are handed out once, refilled behind the caller's back, bounded, and all gone in the end."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from towline.sandboxes.base import SandboxError, Spec, execute
from towline.sandboxes.bubblewrap import BubblewrapRuntime
from towline.sandboxes.pool import Pool


class Counted:
    """A runtime that counts: what is made, what lives, what is handed out twice."""

    name = "counted"

    def __init__(self) -> None:
        self.live: set[CountedSandbox] = set()
        self.made = 0
        self.failing: str = ""
        self.gate = asyncio.Event()
        self.gate.set()

    async def create(self, spec: Spec) -> Any:
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

    def __init__(self, runtime: Counted, spec: Spec):
        self.runtime, self.spec, self.id = runtime, spec, str(next(self._numbers))
        self.alive = True

    async def destroy(self) -> None:
        self.runtime.live.discard(self)


async def settle(pool: Pool, count: int) -> None:
    for _ in range(1000):
        if pool.warm_count == count and not any(shelf.making for shelf in pool._shelves.values()) and not pool._ending:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{pool.warm_count} are warm, not {count}")


async def test_each_is_handed_out_once_and_refilled() -> None:
    runtime = Counted()
    pool = Pool(runtime, size=2, makers=2)  # type: ignore[arg-type]
    one, other = Spec(), Spec(workdir="/other")
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
    assert len(runtime.live) == 21, "what was handed out stays its holder's"
    assert warm in runtime.live
    with pytest.raises(SandboxError, match="closed"):
        await pool.acquire(one)


async def test_all_specs_together_are_bounded_and_the_least_wanted_goes() -> None:
    runtime = Counted()
    pool = Pool(runtime, size=2, most=4)  # type: ignore[arg-type]
    specs = [Spec(workdir=f"/{number}") for number in range(5)]
    for spec in specs:
        pool.warm(spec, 2)
        await asyncio.sleep(0.01)
    await settle(pool, 4)
    assert sorted(sandbox.spec.workdir for sandbox in runtime.live) == ["/3", "/3", "/4", "/4"]
    await pool.close()
    assert not runtime.live


async def test_what_is_being_made_is_waited_for_and_a_cancelled_caller_loses_nothing() -> None:
    runtime = Counted()
    pool = Pool(runtime, size=1)  # type: ignore[arg-type]
    spec = Spec()
    runtime.gate.clear()
    pool.warm(spec, 1)
    waiting = asyncio.create_task(pool.acquire(spec))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    again = asyncio.create_task(pool.acquire(spec))
    await asyncio.sleep(0.01)
    runtime.gate.set()
    sandbox = await again
    await settle(pool, 1)
    assert runtime.made == 2, "one that was waited for, one that replaces it"
    assert sandbox in runtime.live
    await pool.close()
    assert runtime.live == {sandbox}


async def test_failures_reach_who_acquires_and_dead_ones_are_not_handed_out() -> None:
    runtime = Counted()
    pool = Pool(runtime, size=1, idle_seconds=0.2)  # type: ignore[arg-type]
    spec = Spec()
    runtime.failing = "no more loops"
    pool.warm(spec, 1)
    await asyncio.sleep(0.01)
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
    # What nobody wants for long goes.
    await settle(pool, 0)
    assert runtime.live == {taken}
    await pool.close()


async def test_with_real_sandboxes(tmp_path: Path) -> None:
    runtime = BubblewrapRuntime(tmp_path)
    await runtime.open()
    pool = Pool(runtime, size=2)
    spec = Spec()
    pool.warm(spec, 2)
    taken = await asyncio.gather(*(pool.acquire(spec) for _ in range(4)))
    done = await asyncio.gather(*(execute(sandbox, ["sh", "-c", "ls -A; echo x > mine; ls"]) for sandbox in taken))
    assert [run.stdout for run in done] == [b"mine\n"] * 4, "nobody sees what another wrote"
    await asyncio.gather(*(sandbox.destroy() for sandbox in taken))
    await pool.close()
    await runtime.close()
    assert os.listdir(tmp_path) == []
