"""Properties of who gets a slot: whatever comes, goes, dies, returns or is cancelled, in any order."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.engines.pool_rig import FakeReplica
from towline.engines.pool.dispatch import IDLE, Dispatcher, QueuedTurn
from towline.engines.pool.replica import ConcurrencyLimit, Replica

CONVERSATIONS = st.integers(0, 7).map("c{}".format)


class Slots(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.waiters: list[QueuedTurn] = []
        self.running: list[QueuedTurn] = []
        self.homes: dict[str, Replica] = {}

    def teardown(self) -> None:
        self.loop.close()

    @initialize(limits=st.lists(st.integers(1, 4), min_size=1, max_size=3))
    def begin(self, limits: list[int]) -> None:
        self.replicas = [
            Replica(str(n), FakeReplica(str(n)), ConcurrencyLimit(limit), serving=True)
            for n, limit in enumerate(limits)
        ]
        self.dispatcher = Dispatcher(self.replicas)

    def act(self, *act: Any) -> None:
        """Do something, and look at who got a slot by it."""
        full = {
            replica for replica in self.replicas if replica.serving and replica.in_flight >= replica.concurrency.limit
        }
        call, *arguments = act
        call(*arguments)
        granted = [waiter for waiter in self.waiters if waiter.slot.done() and not waiter.slot.cancelled()]
        for waiter in granted:
            self.waiters.remove(waiter)
            self.running.append(waiter)
            replica = self.place(waiter)
            assert replica.serving
            home = self.homes.get(waiter.conversation)
            if home is not None and home is not replica:
                assert not home.serving or home in full or home.in_flight >= home.concurrency.limit, (
                    "left its home for nothing"
                )
            self.homes[waiter.conversation] = replica
        for waiter in granted:
            # Nobody who came earlier could have had this slot: they wait for replicas of their own.
            for other in self.waiters:
                if other.arrival < waiter.arrival and not other.slot.done():
                    home = self.homes.get(other.conversation)
                    assert home is not None
                    assert home.serving
                    assert home is not self.place(waiter)

    @staticmethod
    def place(waiter: QueuedTurn) -> Replica:
        replica = waiter.slot.result()
        assert replica is not None
        return replica

    @rule(conversation=CONVERSATIONS, group=st.sampled_from(["", "g", "h"]))
    def arrive(self, conversation: str, group: str) -> None:
        slot: asyncio.Future[Replica | None] = self.loop.create_future()
        waiter = QueuedTurn(self.dispatcher.arrive(""), 0.0, "", conversation, group, slot)
        self.waiters.append(waiter)
        self.act(self.dispatcher.enqueue, waiter)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.running))
        self.running.remove(waiter)
        self.act(self.dispatcher.release, self.place(waiter))

    @precondition(lambda self: self.waiters)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiters))
        waiter.slot.cancel()
        self.waiters.remove(waiter)

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Its turns keep their places and want a slot elsewhere."""
        replica = data.draw(st.sampled_from(self.replicas))
        replica.serving = False
        self.act(self.dispatcher.redistribute)
        for waiter in [waiter for waiter in self.running if self.place(waiter) is replica]:
            self.running.remove(waiter)
            again = QueuedTurn(waiter.arrival, 0.0, "", waiter.conversation, waiter.group, self.loop.create_future())
            self.waiters.append(again)
            self.act(self.dispatcher.release, replica)
            self.act(self.dispatcher.enqueue, again)

    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(self.replicas))
        replica.serving = True
        self.act(self.dispatcher.redistribute)

    @rule(data=st.data(), limit=st.integers(1, 6))
    def adapt(self, data: st.DataObject, limit: int) -> None:
        replica = data.draw(st.sampled_from(self.replicas))
        replica.concurrency.limit = limit
        self.act(self.dispatcher.fill, replica)

    @rule()
    def pause(self) -> None:
        self.dispatcher.open = False

    @rule()
    def resume(self) -> None:
        self.dispatcher.open = True
        self.act(self.dispatcher.redistribute)

    @invariant()
    def slots_are_counted(self) -> None:
        for replica in getattr(self, "replicas", []):
            assert replica.in_flight == sum(self.place(waiter) is replica for waiter in self.running)

    @invariant()
    def nobody_waits_without_need(self) -> None:
        if not hasattr(self, "replicas"):
            return
        assert {id(w) for w in self.dispatcher.waiting()} == {id(w) for w in self.waiters}, "somebody was lost"
        if not self.dispatcher.open:
            return
        for waiter in self.waiters:
            home = self.homes.get(waiter.conversation)
            if home is None or not home.serving:
                assert not any(replica.has_room for replica in self.replicas)
            else:
                assert not home.has_room
                assert not any(replica.has_room and replica.utilization < IDLE for replica in self.replicas)


Slots.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlots = Slots.TestCase
