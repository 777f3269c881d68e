"""Leases and acknowledgements against a model, with any operations in any order, on a simulated clock.

The guarantees: an acknowledged result is never delivered again; an unacknowledged one is, when its lease expires and not
before; every result is delivered; consumers are independent.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sqlalchemy import insert, select

from support.server.server_rig import row_of
from towline.schema import Stale, Start, Unit
from towline.server.delivery.leases import LeaseManager, LeaseRequest
from towline.server.store import tables
from towline.server.store.database import Store, database_url
from towline.server.store.tables import take_numbers

CONSUMERS = st.sampled_from(["a", "b"])


async def publish(store: Store, count: int, version: int) -> list[int]:
    async with store.write() as tx:
        last = await take_numbers(tx, "results", count)
        seqs = list(range(last - count + 1, last + 1))
        await tx.execute(insert(tables.results), [row_of(seq, version) for seq in seqs])
        return seqs


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.store = Store(database_url(None, Path(self.folder.name)))
        self.loop.run_until_complete(self.store.open())
        self.delivery = LeaseManager(self.store)
        self.now = 1000.0
        self.version = 0
        self.published: dict[int, int] = {}
        """Number and version of every result."""
        self.known: dict[str, Known] = {}

    def teardown(self) -> None:
        self.loop.run_until_complete(self.store.close())
        self.loop.close()
        self.folder.cleanup()

    @initialize()
    def begin(self) -> None:
        self.publish(3)

    @rule(count=st.integers(1, 4))
    def publish(self, count: int) -> None:
        for seq in self.loop.run_until_complete(publish(self.store, count, self.version)):
            self.published[seq] = self.version

    @rule(seconds=st.sampled_from([1.0, 7.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def train(self) -> None:
        self.version += 1

    @rule(
        name=CONSUMERS, most=st.integers(1, 5), seconds=st.sampled_from([5.0, 30.0]), start=st.sampled_from(Start),
        staleness=st.none() | st.integers(0, 2), stale=st.sampled_from(Stale),
    )  # fmt: skip
    def lease(self, name: str, most: int, seconds: float, start: Start, staleness: int | None, stale: Stale) -> None:
        consumer = self.known.setdefault(name, Known(max(self.published) if start is Start.NOW else 0))
        request = LeaseRequest(name, Unit.SESSION, most, seconds, start, staleness, stale)
        free = consumer.free(self.published, self.now)
        old = {seq for seq in free if staleness is not None and self.version - self.published[seq] > staleness}
        dropped, more = 0, True
        while more:  # as the service does: some were passed over, and others may be behind them
            found = self.loop.run_until_complete(self.delivery.lease(request, version=self.version, now=self.now))
            dropped, more = dropped + found.dropped, found.more
        got = [int(one.result_id.split("-")[1]) for one in found.results]
        assert len(got) == len(set(got)) <= most
        assert set(got) <= set(free), "nothing that is acknowledged, or that somebody still has"
        for seq, one in zip(got, found.results, strict=True):
            assert one.sessions[0].stale == (seq in old)
            consumer.held[seq] = self.now + seconds
            consumer.deliveries[seq] = consumer.deliveries.get(seq, 0) + 1
            assert (one.delivery, one.lease_until) == (consumer.deliveries[seq], self.now + seconds)
        if stale is Stale.DROP:
            assert not old & set(got)
            gone = self.finished(name) - consumer.done
            assert gone <= old, "only what is stale is dropped"
            assert len(gone) == dropped
            consumer.done |= gone
            consumer.held = {seq: until for seq, until in consumer.held.items() if seq not in gone}
        else:
            assert dropped == 0
        if not got:
            left = set(consumer.free(self.published, self.now))
            assert not left, "everything comes"

    @rule(name=CONSUMERS, data=st.data())
    def ack(self, name: str, data: st.DataObject) -> None:
        consumer = self.known.get(name)
        seqs = data.draw(st.lists(st.integers(1, max(self.published) + 2), max_size=4, unique=True))
        ids = [f"session-{seq}-{self.store.token}" for seq in seqs]
        acked, _ = self.loop.run_until_complete(self.delivery.ack(name, ids, version=0, now=self.now))
        assert sorted(acked.acked + acked.unknown) == sorted(ids)
        for result_id in acked.unknown:
            seq = int(result_id.split("-")[1])
            assert consumer is None or seq not in (consumer.held.keys() | consumer.done)
        for result_id in acked.acked:
            seq = int(result_id.split("-")[1])
            assert consumer is not None
            assert seq in consumer.held or seq in consumer.done
            consumer.held.pop(seq, None)
            consumer.done.add(seq)

    @invariant()
    def the_store_agrees(self) -> None:
        for name, consumer in self.known.items():
            assert self.finished(name) == consumer.done

    def finished(self, name: str) -> set[int]:
        """Results that are never delivered again: at or below the cursor, and not leased."""

        async def read() -> set[int]:
            async with self.store.read() as tx:
                cursor = await tx.scalar(select(tables.consumers.c.cursor).where(tables.consumers.c.name == name))
                leased = await tx.execute(select(tables.leases.c.seq).where(tables.leases.c.consumer == name))
                return set(range(1, int(cursor or 0) + 1)) - set(leased.scalars())

        return self.loop.run_until_complete(read())


class Known:
    """The expected state of a consumer."""

    def __init__(self, floor: int):
        self.done = set(range(1, floor + 1))
        self.held: dict[int, float] = {}
        self.deliveries: dict[int, int] = {}

    def free(self, published: dict[int, int], now: float) -> list[int]:
        return [seq for seq in published if seq not in self.done and self.held.get(seq, 0.0) <= now]


Machine.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestLeases = Machine.TestCase


async def test_a_clock_that_is_set_back_does_not_prolong_leases(tmp_path: Path) -> None:
    store = Store(database_url(None, tmp_path))
    await store.open()
    try:
        await publish(store, 2, 0)
        delivery = LeaseManager(store)
        request = LeaseRequest("a", Unit.SESSION, 2, 10.0)
        first = await delivery.lease(request, version=0, now=10_000.0)
        assert len(first.results) == 2
        # An hour is gone. The acknowledgement of one must not hide that from the next call.
        await delivery.ack("a", [first.results[0].result_id], version=0, now=6_400.0)
        assert not (await delivery.lease(request, version=0, now=6_401.0)).results
        again = await delivery.lease(request, version=0, now=6_412.0)
        assert [one.result_id for one in again.results] == [first.results[1].result_id]
    finally:
        await store.close()
