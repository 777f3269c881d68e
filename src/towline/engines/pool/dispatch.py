"""Which replica takes a turn, and who waits for one: decisions only, no I/O.

- A conversation stays on its replica, which has its prefix cached. It moves only if that replica does not serve, or if it
  would have to wait there while another is less than half full.
- A group's conversations, which share a prompt, begin on one replica until that is loaded, or clearly more so than others.
- All else goes to the least loaded.
- Who waits, waits in order of arrival: for its own replica if it has one, else for any. A turn that was cut short, by a
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
"""The fill, and how far above the least loaded, from which a replica gets no more conversations only for their group."""
IDLE = 0.5
"""The fill below which a replica takes a conversation that would wait elsewhere."""
_ROUNDING = 1e-6
_REMEMBERED = 65_536


@dataclass(order=True, slots=True)
class Waiter:
    """A turn that wants a slot. `slot` is its replica once it has one, or None if the turn was aborted before."""

    arrival: int
    since: float = field(compare=False)
    id: str = field(compare=False)
    conversation: str = field(compare=False)
    group: str = field(compare=False)
    slot: asyncio.Future[Replica | None] = field(compare=False)


class Dispatcher:
    def __init__(self, replicas: Sequence[Replica]):
        self.replicas = replicas
        self.open = True
        """Closed while the pool is paused: everybody waits."""
        self._arrivals = itertools.count()
        self._cut: OrderedDict[str, int] = OrderedDict()
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._groups: OrderedDict[str, Replica] = OrderedDict()
        self._lines: dict[Replica | None, list[Waiter]] = {None: [], **{replica: [] for replica in replicas}}
        """Who waits for which replica; under None, for any. Heaps: whoever came first is first."""

    def arrive(self, id: str) -> int:
        """The place in the order of the turn named `id`."""
        before = self._cut.pop(id, None)
        return next(self._arrivals) if before is None else before

    def cut(self, id: str, arrival: int) -> None:
        """The turn was aborted, and will come again."""
        _remember(self._cut, id, arrival)

    def enter(self, waiter: Waiter) -> None:
        """Give the turn a slot, or let it wait."""
        home = self._home(waiter)
        replica = self._choose(waiter, home) if self.open else None
        if replica is not None:
            self._grant(waiter, replica)
        else:
            heapq.heappush(self._lines[home], waiter)

    def leave(self, replica: Replica) -> None:
        """A turn is done with its slot."""
        replica.taken -= 1
        self.fill(replica)

    def fill(self, replica: Replica) -> None:
        """Give the replica's free slots to those who wait."""
        while self.open and replica.free and (waiter := self._next(replica)) is not None:
            self._grant(waiter, replica)

    def rearrange(self) -> None:
        """Place everybody anew: a replica came or went, or the pool was resumed."""
        everybody = sorted(self.waiting())
        for line in self._lines.values():
            line.clear()
        for waiter in everybody:
            self.enter(waiter)

    def waiting(self) -> Iterator[Waiter]:
        """Those who wait, in no order."""
        for line in self._lines.values():
            yield from (waiter for waiter in line if not waiter.slot.done())

    def waiting_for(self, replica: Replica | None) -> int:
        return sum(not waiter.slot.done() for waiter in self._lines[replica])

    def _home(self, waiter: Waiter) -> Replica | None:
        """The replica that the conversation is on, if that serves."""
        home = self._homes.get(waiter.conversation)
        return home if home is not None and home.serving else None

    def _choose(self, waiter: Waiter, home: Replica | None) -> Replica | None:
        """A free replica for a turn that has just come, unless somebody who came earlier has a right to it."""
        free = [replica for replica in self.replicas if replica.free and not self._first(replica)]
        if home is not None:
            if home in free:
                return home
            free = [replica for replica in free if replica.fill < IDLE]
        elif self._first(None):
            return None
        least = min(free, key=lambda replica: replica.fill, default=None)
        preferred = self._groups.get(waiter.group) if home is None else None
        if least is not None and preferred in free and preferred.fill < min(LOADED, least.fill + AHEAD + _ROUNDING):
            return preferred
        return least

    def _next(self, replica: Replica) -> Waiter | None:
        """Who gets a slot that became free: whoever came first of those who wait for it or for any; if there is nobody and
        the replica has little to do, of all who wait."""
        lines = [self._lines[replica], self._lines[None]]
        if not any(map(self._prune, lines)) and replica.fill < IDLE:
            lines = list(self._lines.values())
        heads = [line for line in lines if self._prune(line)]
        return heapq.heappop(min(heads, key=lambda line: line[0])) if heads else None

    def _first(self, replica: Replica | None) -> Waiter | None:
        line = self._lines[replica]
        return line[0] if self._prune(line) else None

    def _prune(self, line: list[Waiter]) -> bool:
        """Drop those who gave up waiting from the head of a line; whether anybody is left."""
        while line and line[0].slot.done():
            heapq.heappop(line)
        return bool(line)

    def _grant(self, waiter: Waiter, replica: Replica) -> None:
        replica.taken += 1
        _remember(self._homes, waiter.conversation, replica)
        if waiter.group:
            preferred = self._groups.get(waiter.group)
            if preferred is None or not preferred.serving:
                _remember(self._groups, waiter.group, replica)
        waiter.slot.set_result(replica)


def _remember(known: OrderedDict[str, T], name: str, value: T) -> None:
    if not name:
        return
    known[name] = value
    known.move_to_end(name)
    if len(known) > _REMEMBERED:
        known.popitem(last=False)
