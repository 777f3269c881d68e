"""The radix cache against a model of it: every slot remembers which prefix, of which version, it was computed for."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from towline.engines.embedded.cache import PrefixLease, RadixCache, RadixNode, common_prefix

CAPACITY = 40
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=18)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


class Holder:
    """A turn: leased tokens, then its own."""

    def __init__(self, ids: list[int], lease: PrefixLease, slots: np.ndarray, own: np.ndarray, version: int):
        self.ids, self.lease, self.version = ids, lease, version
        self.slots = np.concatenate((slots, own))


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = RadixCache(CAPACITY, version=0)
        self.holders: list[Holder] = []
        self.contents: dict[int, tuple[int, tuple[int, ...]]] = {}

    @rule(ids=PROMPTS)
    def begin(self, ids: list[int]) -> None:
        lease, slots = self.cache.acquire(array(ids[:-1]))
        assert lease.length == len(slots) < len(ids)
        for at, slot in enumerate(slots.tolist()):
            assert self.contents[slot] == (self.cache.version, tuple(ids[: at + 1]))
        own = self.cache.allocate(len(ids) - lease.length)
        if own is None:
            self.cache.release(lease)
            return
        self.holders.append(Holder(ids, lease, slots, own, self.cache.version))
        for at in range(lease.length, len(ids)):
            self.contents[int(own[at - lease.length])] = (self.cache.version, tuple(ids[: at + 1]))

    @rule(pick=st.integers(0, 99), count=st.integers(1, 18))
    def share(self, pick: int, count: int) -> None:
        if self.holders:
            holder = self.holders[pick % len(self.holders)]
            start = holder.lease.length
            stop = min(start + count, len(holder.ids))
            if stop > start:
                ids, run = array(holder.ids[start:stop]), holder.slots[start:stop]
                holder.slots[start:stop] = self.cache.extend(holder.lease, ids, run)
                assert holder.lease.length == stop

    @rule(pick=st.integers(0, 99))
    def end(self, pick: int) -> None:
        if self.holders:
            holder = self.holders.pop(pick % len(self.holders))
            self.cache.free_slots(holder.slots[holder.lease.length :])
            self.cache.release(holder.lease)

    @rule()
    def invalidate(self) -> None:
        self.cache.invalidate(self.cache.version + 1)
        lease, _ = self.cache.acquire(array([0, 1, 2]))
        assert lease.length == 0
        self.cache.release(lease)

    @invariant()
    def holders_keep_their_contents(self) -> None:
        for holder in self.holders:
            for at, slot in enumerate(holder.slots.tolist()):
                assert self.contents[slot] == (holder.version, tuple(holder.ids[: at + 1]))

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        places = self.cache._free[: self.cache.free].tolist()
        evictable = 0
        pending: list[RadixNode] = [self.cache.root]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            places += node.slots.tolist()
            evictable += len(node.slots) if node.leases == 0 else 0
            assert node.parent is None or all(child.leases <= node.leases for child in node.children.values())
        assert evictable == self.cache.evictable
        for holder in self.holders:
            places += holder.slots[holder.lease.length :].tolist()
        detached = {
            slot
            for holder in self.holders
            if holder.version != self.cache.version
            for slot in holder.slots[: holder.lease.length].tolist()
        }
        assert len(places) == len(set(places))
        assert set(places) | detached == set(range(1, CAPACITY + 1))
        assert not set(places) & detached

    def teardown(self) -> None:
        while self.holders:
            self.end(0)
        assert self.cache.available == CAPACITY
        assert len(self.cache.allocate(CAPACITY)) == CAPACITY


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def put(cache: RadixCache, ids: list[int]) -> None:
    lease, _ = cache.acquire(array(ids))
    own = cache.allocate(len(ids) - lease.length)
    assert own is not None
    cache.extend(lease, array(ids[lease.length :]), own)
    cache.release(lease)


def held(cache: RadixCache, ids: list[int]) -> int:
    """How many of `ids` are cached, found without touching what was used last."""
    node, length = cache.root, 0
    while length < len(ids) and (child := node.children.get(ids[length])) is not None:
        shared = common_prefix(child.ids, array(ids[length:]))
        length += shared
        if shared < len(child.ids):
            break
        node = child
    return length


def test_least_recently_used_goes_first_and_from_the_end() -> None:
    cache = RadixCache(12)
    put(cache, [1, 2, 3, 4])
    put(cache, [1, 2, 5, 6])
    put(cache, [7, 8, 9])
    assert cache.free == 3
    put(cache, [1, 2, 3, 4])  # used again: [5, 6] is now the oldest, then [7, 8, 9]

    taken = cache.allocate(4)
    assert (held(cache, [1, 2, 3, 4]), held(cache, [1, 2, 5, 6]), held(cache, [7, 8, 9])) == (4, 3, 3)
    more = cache.allocate(3)
    assert (held(cache, [1, 2, 3, 4]), held(cache, [1, 2, 5, 6]), held(cache, [7, 8, 9])) == (4, 2, 1)

    lease, slots = cache.acquire(array([1, 2, 3, 9]))
    assert lease.length == len(slots) == 3
    assert cache.allocate(3) is None  # only [4] and [7] may go
    rest = cache.allocate(2)
    assert (held(cache, [1, 2, 3, 4]), held(cache, [7, 8, 9])) == (3, 0)
    cache.release(lease)
    for slots in (taken, more, rest):
        cache.free_slots(slots)
    assert cache.available == 12
    assert cache.evicted == 6


def test_many_releases_do_not_pile_up() -> None:
    cache = RadixCache(64)
    for turn in range(5000):
        put(cache, [turn % 7, 1, 2, 3])
    assert len(cache._leaves) <= 1024
    assert cache.evictable == 28
