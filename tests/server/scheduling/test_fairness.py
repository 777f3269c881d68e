"""Fair sharing of session slots: by weight, over time, without credit for absence, and cheap in the database."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from support.security.two_tenants import key
from support.server.server_rig import Rig, rig, task, until_idle
from towline.benchmarks.fake_runner import FakeRunner
from towline.schema import Role
from towline.server.scheduling import queue
from towline.server.scheduling.fairness import FairShare


class Machine:
    """A machine with slots, and tenants that always have sessions waiting."""

    def __init__(self, slots: int, weights: dict[str, float], lengths: dict[str, int]):
        self.now = 0.0
        self.slots = slots
        self.lengths = lengths
        self.share = FairShare(lambda tenant: weights[tenant], lambda: self.now)
        self.running: list[tuple[float, str]] = []

    def step(self, waiting: set[str]) -> None:
        """Fill the free slots, and run for a second."""
        free = self.slots - len(self.running)
        for tenant, count in self.share.divide(free, waiting, {}).items():
            for _ in range(count):
                self.running.append((self.now + self.lengths[tenant], tenant))
                self.share.started(tenant)
        self.now += 1
        for ended in [one for one in self.running if one[0] <= self.now]:
            self.running.remove(ended)
            self.share.ended(ended[1])

    def shares(self, steps: int, waiting: set[str]) -> dict[str, float]:
        """The share of the slot seconds that each tenant gets from here on."""
        before = dict(self.share.slot_seconds)
        for _ in range(steps):
            self.step(waiting)
        had = {name: seconds - before.get(name, 0.0) for name, seconds in self.share.slot_seconds.items()}
        return {name: seconds / sum(had.values()) for name, seconds in had.items()}


@settings(max_examples=30, deadline=None)
@given(
    slots=st.integers(1, 24),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    lengths=st.lists(st.integers(1, 30), min_size=4, max_size=4),
)
def test_shares_follow_the_weights_whatever_the_lengths(slots: int, weights: list[float], lengths: list[int]) -> None:
    names = [f"t{number}" for number in range(len(weights))]
    machine = Machine(slots, dict(zip(names, weights, strict=True)), dict(zip(names, lengths, strict=False)))
    found = machine.shares(800, set(names))
    for name, weight in zip(names, weights, strict=True):
        assert found[name] == pytest.approx(weight / sum(weights), abs=0.05)


def test_absence_earns_no_credit_and_presence_no_debt() -> None:
    machine = Machine(8, {"a": 1.0, "b": 1.0}, {"a": 3, "b": 3})
    machine.shares(500, {"a"})
    assert machine.shares(30, {"a", "b"})["b"] == pytest.approx(0.5, abs=0.12)  # at once, and not more
    machine.shares(500, {"b"})
    assert machine.shares(300, {"a", "b"})["b"] == pytest.approx(0.5, abs=0.05)


def test_slots_that_one_does_not_need_go_to_the_others() -> None:
    share = FairShare({"a": 1.0, "b": 3.0}.__getitem__, lambda: 0.0)
    assert share.divide(8, {"a"}, {}) == {"a": 8}
    assert share.divide(8, {"a", "b"}, {}) == {"a": 2, "b": 6}
    assert share.divide(4, {"a", "b"}, {"b": 6}) == {"a": 3, "b": 1}
    share.started("b")
    assert share.divide(4, {"a"}, {}) == {"a": 4}
    assert not share.divide(4, set(), {})
    assert not share.divide(0, {"a"}, {})


async def until_held(r: Rig, held: dict[str, int]) -> None:
    """Returns once each tenant holds these slots."""
    for _ in range(3000):
        if r.service.scheduler.share.active == held:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"held are {r.service.scheduler.share.active}, not {held}")


async def test_a_flood_at_top_priority_gets_its_share_and_no_more(database: str, tmp_path: Path) -> None:
    """Row 37: priorities order the sessions of one tenant, never those of two."""
    runner = FakeRunner(capacity=6)
    async with rig(tmp_path, database, runner) as r:
        await key(r, "default", Role.ADMIN)
        alice, mallory = [await key(r, name, Role.SUBMIT, Role.CONSUME) for name in ("alice", "mallory")]
        runner.hold = True
        await mallory.submit(*(task(f"m{number}", 10, priority=100) for number in range(10)))
        await until_idle(r.service)
        await alice.submit(task("low", 20, priority=-5), task("high", 2, priority=5))
        await until_held(r, {"mallory": 6})
        for _ in range(3):
            runner.release()
            await until_idle(r.service)
            await until_held(r, {"mallory": 3, "alice": 3})
        runner.hold = False
        runner.release()
        started = [name for name in runner.started if name.startswith(("low", "high"))]
        assert [name.startswith("high") for name in started[:3]] == [True, True, False]


async def test_the_queue_is_read_by_its_index(database: str, tmp_path: Path) -> None:
    """However many sessions of other tenants wait, a claim reads only what it takes."""
    runner = FakeRunner(capacity=1)
    async with rig(tmp_path, database, runner) as r:
        runner.hold = True
        await key(r, "default", Role.ADMIN)
        for name in ("alice", "bob", "mallory"):
            await (await key(r, name, Role.SUBMIT)).submit(task("t", 5))
        store = r.service.store
        async with store.read() as tx:
            assert sorted(await queue.waiting_tenants(tx)) == ["alice", "bob", "mallory"]
            if store.sqlite:
                wanted = (
                    "EXPLAIN QUERY PLAN SELECT session_id FROM sessions WHERE phase = ? AND owner = ? "
                    "ORDER BY urgency, number, sample LIMIT 1"
                )
                plan = str((await tx.exec_driver_sql(wanted, (0, "alice"))).all())
                assert "sessions_waiting" in plan, plan
                assert "TEMP B-TREE" not in plan, plan
            else:
                await tx.execute(text("SET enable_seqscan = off"))
                wanted = (
                    "EXPLAIN SELECT session_id FROM sessions WHERE phase = 0 AND owner = 'alice' "
                    "ORDER BY urgency, number, sample LIMIT 1"
                )
                plan = str((await tx.execute(text(wanted))).all())
                assert "sessions_waiting" in plan, plan
                assert "Sort" not in plan, plan
        runner.hold = False
        runner.release()
