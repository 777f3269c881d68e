"""The prefix cache: a radix tree of computed tokens over a pool of slots, one slot per token.

An edge of the tree is a run of ids with the slots of their keys and values. A turn takes a lease on the longest path
that is a prefix of its prompt, computes the rest into slots of its own, and gives those to the tree as it goes: the
next turn of the conversation, and the other sessions of its group, find them there.

Invariants
- Every slot is in one place: free, on one node of the tree, or with the turn that allocated it.
- A node on a leased path is never evicted. Others are evicted from the leaves inwards, least recently used first, token
  by token from the end.
- A path belongs to the weight version it was computed under. `invalidate` detaches the whole tree: nothing of it is
  found again, and nodes still leased free their slots when the last lease on them ends.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from towline.engines.base import Ids
from towline.engines.embedded.batch import Indices


@dataclass(slots=True, eq=False)
class RadixNode:
    """A run of tokens. The path from the root to its end is one cached prefix."""

    ids: Ids
    slots: Indices
    parent: RadixNode | None
    children: dict[int, RadixNode] = field(default_factory=dict)
    """By their first id."""
    leases: int = 0
    """Leases on this node or below it."""
    last_used: int = 0
    detached: bool = False
    """No longer part of the tree: evicted, or of an older version."""


@dataclass(slots=True, eq=False)
class PrefixLease:
    """A turn's hold on a path: the tokens from the root to the end of `node`."""

    node: RadixNode
    length: int


class RadixCache:
    """Slots are numbered from 1 to `capacity`; 0 is reserved for padding."""

    def __init__(self, capacity: int, version: int = 0):
        self.capacity = capacity
        self.version = version
        self.evictable = 0
        """Tokens in the tree that no lease protects."""
        self.evicted = 0
        """Tokens evicted so far."""
        self.root = _new_root()
        self._free = np.arange(capacity, 0, -1, dtype=np.int64)
        self._free_count = capacity
        self._clock = 0
        self._leaves: list[tuple[int, int, RadixNode]] = []
        """A heap of evictable leaves by last use; outdated entries are skipped."""
        self._pushes = 0
        self._prune_at = 1024

    @property
    def free(self) -> int:
        return self._free_count

    @property
    def available(self) -> int:
        """How many slots can be allocated."""
        return self._free_count + self.evictable

    def acquire(self, ids: Ids) -> tuple[PrefixLease, Indices]:
        """A lease on the longest cached prefix of `ids`, with its slots."""
        node, matched = self.root, 0
        runs: list[Indices] = []
        while matched < len(ids):
            child = self._descend(node, ids[matched:])
            if child is None:
                break
            node = child
            matched += len(node.ids)
            runs.append(node.slots)
        self._lease(node, None)
        return PrefixLease(node, matched), np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)

    def extend(self, lease: PrefixLease, ids: Ids, slots: Indices) -> Indices:
        """Give the tree `ids` that follow the leased path, and lengthen the lease over them.

        The slots become the tree's. Where it held some of the tokens already, the given slots are freed and the tree's
        own take their place; the slots to use from now on are returned.
        """
        node, done = lease.node, 0
        kept = slots.copy()
        while done < len(ids):
            child = self._descend(node, ids[done:])
            if child is None:
                break
            node = child
            end = done + len(node.ids)
            self.free_slots(slots[done:end])
            kept[done:end] = node.slots
            done = end
        self._lease(node, lease.node)
        lease.length += len(ids)
        lease.node = self._append(node, ids[done:], kept[done:]) if done < len(ids) else node
        return kept

    def release(self, lease: PrefixLease) -> None:
        """End a lease; what it covered stays cached until it is evicted."""
        self._clock += 1
        node: RadixNode | None = lease.node
        while node is not None:
            parent = node.parent
            node.leases -= 1
            node.last_used = self._clock
            if node.leases == 0 and parent is not None:
                if node.detached:
                    self._detach(node)
                    self.free_slots(node.slots)
                else:
                    self.evictable += len(node.ids)
                    if not node.children:
                        self._push(node)
            node = parent

    def allocate(self, count: int) -> Indices | None:
        """`count` slots, evicting as needed; `None` if leased paths and other turns hold too many."""
        if count > self.available:
            return None
        if count > self._free_count:
            self._evict(count - self._free_count)
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count][::-1].copy()

    def free_slots(self, slots: Indices) -> None:
        """Free slots that a turn allocated and did not give to the tree."""
        self._free[self._free_count : self._free_count + len(slots)] = slots[::-1]
        self._free_count += len(slots)

    def invalidate(self, version: int) -> None:
        """Drop everything: from now on tokens are computed with the weights of `version`."""
        pending = [self.root]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            node.children.clear()
            node.detached = True
            if node.leases == 0:
                self.free_slots(node.slots)
        self.root = _new_root()
        self.version = version
        self.evictable = 0
        self._leaves.clear()

    def _descend(self, node: RadixNode, ids: Ids) -> RadixNode | None:
        """The child whose run `ids` starts with, split at the end of what they share."""
        child = node.children.get(int(ids[0]))
        if child is None:
            return None
        shared = common_prefix(child.ids, ids)
        return child if shared == len(child.ids) else self._split(child, shared)

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Split a run in two; `node` stays the lower half, so that leases on it stay valid."""
        upper = RadixNode(
            node.ids[:at], node.slots[:at], node.parent, {}, node.leases, node.last_used, detached=node.detached
        )
        assert node.parent is not None
        node.parent.children[int(upper.ids[0])] = upper
        node.ids, node.slots, node.parent = node.ids[at:], node.slots[at:], upper
        upper.children[int(node.ids[0])] = node
        return upper

    def _append(self, node: RadixNode, ids: Ids, slots: Indices) -> RadixNode:
        """Add a run below a leased node, and lease it."""
        if node.leases == 1 and not node.children and node.parent is not None:
            # No other lease ends here: one longer run is cheaper to walk than a chain of short ones.
            node.ids = np.concatenate((node.ids, ids))
            node.slots = np.concatenate((node.slots, slots))
            return node
        child = RadixNode(ids.copy(), slots.copy(), node, leases=1, detached=node.detached)
        node.children[int(ids[0])] = child
        return child

    def _lease(self, node: RadixNode, above: RadixNode | None) -> None:
        """Count a lease on `node` and its ancestors below `above`."""
        cursor: RadixNode | None = node
        while cursor is not None and cursor is not above:
            if cursor.leases == 0:
                self.evictable -= len(cursor.ids)
            cursor.leases += 1
            cursor = cursor.parent

    def _evict(self, count: int) -> None:
        self.evicted += count
        while count > 0:
            stamp, _, node = heapq.heappop(self._leaves)
            if not _is_evictable(node, stamp):
                continue
            taken = min(count, len(node.ids))
            count -= taken
            self.evictable -= taken
            self.free_slots(node.slots[len(node.slots) - taken :])
            if taken < len(node.ids):
                node.ids, node.slots = node.ids[:-taken], node.slots[:-taken]
                self._push(node)
                continue
            parent = node.parent
            self._detach(node)
            node.detached = True
            if parent is not None and parent.parent is not None and parent.leases == 0 and not parent.children:
                self._push(parent)

    def _detach(self, node: RadixNode) -> None:
        """Take a node out of its parent, if it is still there."""
        siblings = node.parent.children if node.parent is not None else {}
        if siblings.get(int(node.ids[0])) is node:
            del siblings[int(node.ids[0])]

    def _push(self, node: RadixNode) -> None:
        if len(self._leaves) >= self._prune_at:
            self._leaves = [entry for entry in self._leaves if _is_evictable(entry[2], entry[0])]
            heapq.heapify(self._leaves)
            self._prune_at = max(1024, 2 * len(self._leaves))
        self._pushes += 1
        heapq.heappush(self._leaves, (node.last_used, self._pushes, node))


def common_prefix(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> int:
    """How many ids two runs share from their beginning."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _is_evictable(node: RadixNode, stamp: int) -> bool:
    return node.leases == 0 and not node.children and not node.detached and node.last_used == stamp


def _new_root() -> RadixNode:
    return RadixNode(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64), None)
