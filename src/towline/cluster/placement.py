"""The placement policy: which node a session runs on. Pure: no I/O, no clock.

A session goes to the node with the least relative load (sessions / capacity, counted with the new session on it) among the
usable nodes that have room and match its labels. A preferred node, which may have the task's environment prepared, wins if
its load exceeds the least by at most `affinity` and it is not crowded. Equal loads are decided by name, so a choice is a
function of the calls before it.

A node never holds more sessions than its capacity, nor more starting ones than its limit. If an offer shrinks below what
is booked, the sessions stay and the node takes none until it has room again.

The cost of a decision does not grow with the number of nodes. For each label requirement in use there is a heap of the
nodes that match it. Loads that grow leave their entry as it is, and `_Pool.least` corrects it when it reaches the top;
loads that shrink push a new entry. So an entry is never above the node's load, and each change costs O(log n) once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from types import MappingProxyType

AFFINITY = 0.25
"""How much more relative load a preferred node may have than the least loaded one."""
CROWDED = 0.4
"""Relative load above which a node is not preferred: its sessions would wait for a run slot while others have free ones."""
_POOLS = 64
"""Most label requirements with a heap of their own; a requirement beyond that costs one scan of the nodes."""
_ROUNDING = 1e-9
NO_LABELS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class NodeOffer:
    """What a node accepts."""

    name: str
    capacity: int
    """Sessions at once."""
    starting: int = 0
    """Most sessions in INIT at once; 0 means no limit."""
    labels: Mapping[str, str] = field(default_factory=dict)


class _Node:
    """A node's offer and what is booked on it."""

    __slots__ = ("capacity", "drained", "holds", "load", "offer", "pools", "room", "sessions", "starting")

    def __init__(self, offer: NodeOffer):
        self.offer = offer
        self.sessions: set[str] = set()
        self.starting: set[str] = set()
        """The sessions in INIT."""
        self.drained = False
        self.holds: dict[str, None] = {}
        """Reasons why the node is unusable for now, in order."""
        self.pools: list[_Pool] = []
        self.capacity = 0
        """The offered capacity while the node is usable, else 0."""
        self.room = 0
        """Sessions that it could take now."""
        self.load = 0.0
        """Relative load with one more session."""

    def recount(self) -> None:
        """Update `capacity`, `room` and `load`."""
        offer = self.offer
        self.capacity = 0 if self.drained or self.holds else offer.capacity
        room = self.capacity - len(self.sessions)
        if offer.starting:
            room = min(room, offer.starting - len(self.starting))
        self.room = max(0, room)
        # Division is rounded correctly: equal ratios are equal floats.
        self.load = (len(self.sessions) + 1) / max(1, offer.capacity)

    def matches(self, labels: Mapping[str, str]) -> bool:
        own = self.offer.labels
        return all(own.get(key) == value for key, value in labels.items())


class _Pool:
    """The nodes that match one label requirement, by load."""

    def __init__(self) -> None:
        self.members: dict[str, _Node] = {}
        self._entries: list[tuple[float, str]] = []
        self._keys: dict[str, float] = {}
        """The load of each node's valid entry; other entries of the node are leftovers."""

    def add(self, node: _Node) -> None:
        self.members[node.offer.name] = node
        node.pools.append(self)
        self.changed(node)

    def remove(self, node: _Node) -> None:
        del self.members[node.offer.name]
        self._keys.pop(node.offer.name, None)

    def changed(self, node: _Node) -> None:
        """Note that a node's load or room changed."""
        name = node.offer.name
        key = self._keys.get(name)
        if node.room and (key is None or node.load < key):
            self._keys[name] = node.load
            heappush(self._entries, (node.load, name))
            if len(self._entries) > 2 * len(self.members) + 16:
                self._entries = [(load, name) for name, load in self._keys.items()]
                heapify(self._entries)

    def least(self) -> _Node | None:
        """The least loaded node with room, the first by name among equals."""
        entries, keys = self._entries, self._keys
        while entries:
            key, name = entries[0]
            if keys.get(name) != key:
                heappop(entries)
                continue
            node = self.members[name]
            if not node.room:
                heappop(entries)
                del keys[name]
            elif key < node.load:
                keys[name] = node.load
                heapreplace(entries, (node.load, name))
            else:
                return node
        return None


class Placement:
    """Books sessions on nodes.

    Calls about an unknown node or a session without a node do nothing: they may come late.
    """

    def __init__(self, *, affinity: float = AFFINITY):
        self.affinity = affinity
        self._nodes: dict[str, _Node] = {}
        self._of: dict[str, _Node] = {}
        """The node of each session."""
        self._everywhere = _Pool()
        self._pools: dict[frozenset[tuple[str, str]], _Pool] = {}
        """By label requirement, the least recently used first."""
        self._room = 0
        self._capacity = 0

    # Nodes

    def update(self, offer: NodeOffer) -> None:
        """Add a node, or change what it offers. Its sessions, drain and holds stay."""
        node = self._nodes.get(offer.name)
        if node is None:
            node = self._nodes[offer.name] = _Node(offer)
            self._join(node)
        elif node.offer.labels != offer.labels:
            self._leave(node)
            node.offer = offer
            self._join(node)
        node.offer = offer
        self._changed(node)

    def remove(self, name: str) -> set[str]:
        """Forget a node that is gone; returns its sessions, which have no node any more."""
        node = self._nodes.pop(name, None)
        if node is None:
            return set()
        self._leave(node)
        self._room -= node.room
        self._capacity -= node.capacity
        for session_id in node.sessions:
            del self._of[session_id]
        return node.sessions

    def drain(self, name: str) -> None:
        """Give a node no new sessions until `undrain`."""
        self._set_drained(name, True)

    def undrain(self, name: str) -> None:
        self._set_drained(name, False)

    def _set_drained(self, name: str, drained: bool) -> None:
        if (node := self._nodes.get(name)) is not None:
            node.drained = drained
            self._changed(node)

    def hold(self, name: str, reason: str) -> None:
        """Give a node no new sessions for a reason, until that is released."""
        if (node := self._nodes.get(name)) is not None:
            node.holds[reason] = None
            self._changed(node)

    def release_hold(self, name: str, reason: str | None = None) -> None:
        """Withdraw one reason of `hold`, or all of them. The node is usable when none is left."""
        if (node := self._nodes.get(name)) is not None:
            if reason is None:
                node.holds.clear()
            else:
                node.holds.pop(reason, None)
            self._changed(node)

    def unusable(self, name: str) -> str:
        """Why a node takes no new sessions; empty if it takes them while it has room."""
        node = self._nodes.get(name)
        if node is None:
            return "no such node"
        return ", ".join([*(["drained"] if node.drained else []), *node.holds])

    # Sessions

    def place(self, session_id: str, *, prefer: str = "", labels: Mapping[str, str] = NO_LABELS) -> str | None:
        """Book a session on a node and return its name; `None` if no node that matches has room.

        A session that has a node keeps it.
        """
        node = self._of.get(session_id)
        if node is not None:
            return node.offer.name
        node = self._pool(labels).least()
        if node is None:
            return None
        preferred = self._nodes.get(prefer)
        if (
            preferred is not None
            and preferred.room
            and preferred.load - node.load <= self.affinity + _ROUNDING
            and preferred.load <= CROWDED + _ROUNDING
            and preferred.matches(labels)
        ):
            node = preferred
        node.sessions.add(session_id)
        node.starting.add(session_id)
        self._of[session_id] = node
        self._changed(node)
        return node.offer.name

    def book(self, session_id: str, name: str) -> None:
        """Record a session that already runs on a node, whether or not that has room."""
        node = self._nodes[name]
        node.sessions.add(session_id)
        self._of[session_id] = node
        self._changed(node)

    def started(self, session_id: str) -> None:
        """Record that a session has left INIT."""
        node = self._of.get(session_id)
        if node is not None and session_id in node.starting:
            node.starting.discard(session_id)
            self._changed(node)

    def ended(self, session_id: str) -> None:
        """Free all that a session has booked."""
        node = self._of.pop(session_id, None)
        if node is not None:
            node.sessions.discard(session_id)
            node.starting.discard(session_id)
            self._changed(node)

    def node_of(self, session_id: str) -> str | None:
        node = self._of.get(session_id)
        return None if node is None else node.offer.name

    def sessions_of(self, name: str) -> set[str]:
        node = self._nodes.get(name)
        return set() if node is None else set(node.sessions)

    @property
    def room(self) -> int:
        """Sessions without label requirements that could be placed now, over all usable nodes."""
        return self._room

    @property
    def capacity(self) -> int:
        """Sessions that the usable nodes accept at once. Drained and held nodes count for nothing, their sessions too."""
        return self._capacity

    @property
    def names(self) -> list[str]:
        return sorted(self._nodes)

    # The heaps

    def _changed(self, node: _Node) -> None:
        room, capacity = node.room, node.capacity
        node.recount()
        self._room += node.room - room
        self._capacity += node.capacity - capacity
        for pool in node.pools:
            pool.changed(node)

    def _join(self, node: _Node) -> None:
        self._everywhere.add(node)
        for required, pool in self._pools.items():
            if node.matches(dict(required)):
                pool.add(node)

    def _leave(self, node: _Node) -> None:
        for pool in node.pools:
            pool.remove(node)
        node.pools.clear()

    def _pool(self, labels: Mapping[str, str]) -> _Pool:
        if not labels:
            return self._everywhere
        required = frozenset(labels.items())
        pool = self._pools.pop(required, None)
        if pool is None:
            if len(self._pools) >= _POOLS:
                unused = self._pools.pop(next(iter(self._pools)))
                for node in unused.members.values():
                    node.pools.remove(unused)
            pool = _Pool()
            for node in self._nodes.values():
                if node.matches(labels):
                    pool.add(node)
        self._pools[required] = pool
        return pool
