"""Which replica takes a turn, and which turns wait: decisions only, no I/O.

- A conversation stays on its replica, which has its prefix cached. It moves only if that replica does not serve, or if it
  would have to wait there while another is less than half full.
- The conversations of a group, which share a prompt, begin on one replica until that is loaded, or clearly more loaded
  than others.
- Everything else goes to the least loaded replica.
- Turns wait in order of arrival: for their own replica if they have one, else for any. A turn that was cut short, by a
  replica's death or an abort, keeps its place.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from towline.engines.pool.replica import Replica

T = TypeVar("T")
LOADED = 0.75
AHEAD = 0.25
"""The utilization, and the distance from the least loaded, from which a replica gets no more conversations just because
their group is there."""
IDLE = 0.5
"""The utilization below which a replica takes a conversation that would wait elsewhere."""
_ROUNDING = 1e-6
_REMEMBERED = 65_536


@dataclass(order=True, slots=True)
class QueuedTurn:
    """A turn that needs a slot. `slot` resolves to its replica, or to None if the turn was aborted before it got one."""

    arrival: int
    queued_at: float = field(compare=False)
    id: str = field(compare=False)
    conversation: str = field(compare=False)
    group: str = field(compare=False)
    slot: asyncio.Future[Replica | None] = field(compare=False)


class Dispatcher:
    """Assigns queued turns to replicas."""

    def __init__(self, replicas: Sequence[Replica]):
        self.replicas = replicas
        self.open = True
        """Closed while the pool is paused: every turn waits."""
        self._arrivals = itertools.count()
        self._cut_short: OrderedDict[str, int] = OrderedDict()
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._groups: OrderedDict[str, Replica] = OrderedDict()
        self._queues: dict[Replica | None, list[QueuedTurn]] = {None: [], **{replica: [] for replica in replicas}}
        """The turns that wait for a replica; under None, for any. Heaps: the first to arrive comes first."""

    def add(self, replica: Replica) -> None:
        """A replica was added to `replicas`."""
        self._queues.setdefault(replica, [])

    def drop(self, replica: Replica) -> None:
        """A replica was removed from `replicas`: turns that wait for it go to others."""
        self._queues[None] += self._queues.pop(replica, [])
        self.redistribute()

    def arrive(self, id: str) -> int:
        """The place in the order of arrival of the turn `id`."""
        before = self._cut_short.pop(id, None)
        return next(self._arrivals) if before is None else before

    def keep_place(self, id: str, arrival: int) -> None:
        """The turn was aborted and will come back."""
        _remember(self._cut_short, id, arrival)

    def enqueue(self, turn: QueuedTurn) -> None:
        """Give the turn a slot, or let it wait."""
        home = self._home(turn)
        replica = self._choose(turn, home) if self.open else None
        if replica is not None:
            self._grant(turn, replica)
        else:
            heapq.heappush(self._queues[home], turn)

    def release(self, replica: Replica) -> None:
        """A turn is done with its slot."""
        replica.in_flight -= 1
        self.fill(replica)

    def fill(self, replica: Replica) -> None:
        """Give the replica's free slots to waiting turns."""
        while self.open and replica.has_room and (turn := self._next(replica)) is not None:
            self._grant(turn, replica)

    def redistribute(self) -> None:
        """Assign every waiting turn again: a replica joined or left, or the pool was resumed."""
        turns = sorted(self.waiting())
        for queue in self._queues.values():
            queue.clear()
        for turn in turns:
            self.enqueue(turn)

    def waiting(self) -> Iterator[QueuedTurn]:
        """The turns that wait, in no particular order."""
        for queue in self._queues.values():
            yield from (turn for turn in queue if not turn.slot.done())

    def waiting_for(self, replica: Replica | None) -> int:
        return sum(not turn.slot.done() for turn in self._queues[replica])

    def _home(self, turn: QueuedTurn) -> Replica | None:
        """The replica that the conversation is on, if it serves."""
        home = self._homes.get(turn.conversation)
        return home if home is not None and home.serving else None

    def _choose(self, turn: QueuedTurn, home: Replica | None) -> Replica | None:
        """A free replica for a turn that has just arrived, unless an earlier turn is entitled to it."""
        free = [replica for replica in self.replicas if replica.has_room and not self._first(replica)]
        if home is not None:
            if home in free:
                return home
            free = [replica for replica in free if replica.utilization < IDLE]
        elif self._first(None):
            return None
        least = min(free, key=lambda replica: replica.utilization, default=None)
        preferred = self._groups.get(turn.group) if home is None else None
        if (
            least is not None
            and preferred in free
            and preferred.utilization < min(LOADED, least.utilization + AHEAD + _ROUNDING)
        ):
            return preferred
        return least

    def _next(self, replica: Replica) -> QueuedTurn | None:
        """The turn that gets a free slot: the first to arrive of those that wait for this replica or for any; if there is
        none and the replica is idle, of all that wait."""
        queues = [self._queues[replica], self._queues[None]]
        if not any(map(self._prune, queues)) and replica.utilization < IDLE:
            queues = list(self._queues.values())
        heads = [queue for queue in queues if self._prune(queue)]
        return heapq.heappop(min(heads, key=lambda queue: queue[0])) if heads else None

    def _first(self, replica: Replica | None) -> QueuedTurn | None:
        queue = self._queues[replica]
        return queue[0] if self._prune(queue) else None

    def _prune(self, queue: list[QueuedTurn]) -> bool:
        """Drop turns that stopped waiting from the head of a queue; whether any are left."""
        while queue and queue[0].slot.done():
            heapq.heappop(queue)
        return bool(queue)

    def _grant(self, turn: QueuedTurn, replica: Replica) -> None:
        replica.in_flight += 1
        _remember(self._homes, turn.conversation, replica)
        if turn.group:
            preferred = self._groups.get(turn.group)
            if preferred is None or not preferred.serving:
                _remember(self._groups, turn.group, replica)
        turn.slot.set_result(replica)


def _remember(known: OrderedDict[str, T], name: str, value: T) -> None:
    if not name:
        return
    known[name] = value
    known.move_to_end(name)
    if len(known) > _REMEMBERED:
        known.popitem(last=False)
