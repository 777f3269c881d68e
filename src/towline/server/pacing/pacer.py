"""The pacing of one server: the gate that admits groups to the queue's claims, and what pacing costs.

A group is admitted when its first session is claimed. Every paced consumer that follows its task must have room, so the
strictest one decides. Further sessions of an admitted group, and retries, always pass: a group that waited for itself would
block everything.

Dropping stale groups drops slow ones. The groups that a consumer finished recently are sorted by duration into quartiles;
if the slowest quartile's share of the trained groups is below a quarter, slow tasks are trained on less than they were
submitted. These numbers live in memory and start again with the server.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.common.mappings import BoundedDict
from towline.schema import ConsumerPace, DurationQuartile, Pacing, TaskState
from towline.server.pacing import consumers
from towline.server.pacing.consumers import PacedConsumer
from towline.server.pacing.pace import Slack
from towline.server.store import names, tables
from towline.server.store.database import Store
from towline.server.store.tables import chunks

log = logging.getLogger("towline.server")
_ROUNDS = 4
"""How often one claim looks past groups that were not admitted."""


class PaceGate:
    """The gate for one claim."""

    def __init__(
        self,
        consumers: Sequence[PacedConsumer],
        started: Mapping[str, int],
        starved: Collection[str] = (),
        exhausted_prefixes: set[tuple[str, frozenset[str]]] | None = None,
    ):
        self.consumers = consumers
        self.started = started
        """Tasks whose groups were admitted and that may have waiting sessions."""
        self.admitted: set[str] = set()
        """Tasks whose groups this claim admits."""
        self.exhausted: set[str] = set()
        """Those of `started` that have no waiting session."""
        self.holds = False
        """Whether some consumer has no room for another group."""
        self._starved = {one.name for one in consumers if one.name in starved and not one.running + one.finished}
        self._exhausted_prefixes = set() if exhausted_prefixes is None else exhausted_prefixes
        """Sets of prefixes outside of which no task of a tenant waits, as far as is known: scanning all waiting tasks is
        slow."""

    async def choose(self, tx: AsyncConnection, waiting: Select[Any], count: int, tenant: str) -> list[Row[Any]]:
        """The most urgent sessions of the query `waiting`, all of one tenant, that may be claimed."""
        sessions = tables.sessions
        known = waiting.add_columns(sessions.c.urgency, sessions.c.number, sessions.c.sample).limit(count)
        found: list[Row[Any]] = []
        # What an earlier call for this claim admitted has started, as far as this one is concerned.
        started = [key for key in {**self.started, **dict.fromkeys(self.admitted)} if names.tenant_of(key) == tenant]
        for some in chunks(started):
            own = list(await tx.execute(known.where(sessions.c.task_id.in_(some))))
            if len(own) < count:
                self.exhausted |= self.started.keys() & (set(some) - {row.task_id for row in own})
            found += own
        found += await self._admitted(tx, known, count, tenant)
        found.sort(key=lambda row: (row.urgency, row.number, row.sample))
        return found[:count]

    async def _admitted(self, tx: AsyncConnection, known: Select[Any], count: int, tenant: str) -> list[Row[Any]]:
        """Sessions of groups that may start now."""
        own_consumers = [one for one in self.consumers if one.owner == tenant]
        sessions, tasks = tables.sessions, tables.tasks
        # As subqueries, the queue is read in its order and only as far as needed: a join may sort all queued tasks first.
        own = tasks.c.task_id == sessions.c.task_id
        staleness = select(tasks.c.max_staleness).where(own).scalar_subquery().label("max_staleness")
        is_queued = select(tasks.c.task_id).where(own, tasks.c.state == TaskState.QUEUED.value).exists()
        queued = known.add_columns(staleness).where(is_queued)
        admitted: list[Row[Any]] = []
        decided = {key: True for key in self.admitted if names.tenant_of(key) == tenant}
        for _ in range(_ROUNDS):
            closed = frozenset(one.prefix for one in own_consumers if not self._admits(one, one.slack_of(None)))
            self.holds = self.holds or bool(closed)
            if names.qualify(tenant, "") in closed or (tenant, closed) in self._exhausted_prefixes:
                break
            fresh = list(await tx.execute(_past(queued, closed, decided)))
            if not fresh and not decided:
                self._exhausted_prefixes.add((tenant, closed))
            for row in fresh:
                if row.task_id not in decided:
                    decided[row.task_id] = self._admit(row.task_id, row.max_staleness)
                if decided[row.task_id]:
                    admitted.append(row)
            if len(fresh) < count or len(admitted) >= count:
                break
        return admitted

    def _admit(self, task_id: str, max_staleness: int | None) -> bool:
        """Whether every consumer of the task has room for its group; if so, the group is counted."""
        concerned = [(one, one.slack_of(max_staleness)) for one in self.consumers if one.follows(task_id)]
        if not all(self._admits(one, slack) for one, slack in concerned):
            self.holds = True
            return False
        for one, slack in concerned:
            if not one.pace.admits(slack):
                log.warning(
                    "consumer %r uses more groups than its groups_per_update of %d before the policy version advances: "
                    "starting one more. Set groups_per_update to the number of groups in one update",
                    names.plain(one.name),
                    one.groups_per_update,
                )
            self._starved.discard(one.name)
            one.pace.admit(slack)
        self.admitted.add(task_id)
        return True

    def _admits(self, consumer: PacedConsumer, slack: Slack) -> bool:
        return consumer.pace.admits(slack) or consumer.name in self._starved


def _past(queued: Select[Any], closed: Collection[str], decided: Collection[str]) -> Select[Any]:
    """Sessions of groups that are neither decided nor of a prefix without room."""
    task_id = tables.sessions.c.task_id
    query = queued.where(*(func.substr(task_id, 1, len(prefix)) != prefix for prefix in closed))
    return query.where(task_id.not_in(sorted(decided))) if decided else query


_KEPT = 2000
"""Groups kept per consumer."""
_CONSUMERS = 64
"""Consumers kept."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A complete group that a consumer has finished with."""

    seconds: float
    """From the start of its first session to its end."""
    trained: bool


class DurationBias:
    """The durations of the groups that each consumer finished recently."""

    def __init__(self) -> None:
        self._done: BoundedDict[str, deque[FinishedGroup]] = BoundedDict(_CONSUMERS)

    def add(self, consumer: str, done: FinishedGroup) -> None:
        if consumer not in self._done:
            self._done[consumer] = deque(maxlen=_KEPT)
        self._done[consumer].append(done)

    @property
    def consumers(self) -> list[str]:
        return list(self._done)

    def quartiles(self, consumer: str) -> list[DurationQuartile]:
        """From the fastest to the slowest; empty while there are fewer than four groups."""
        return quartiles(list(self._done.get(consumer, ())))


def quartiles(groups: list[FinishedGroup]) -> list[DurationQuartile]:
    ordered = sorted(groups, key=lambda one: one.seconds)
    count, trained = len(ordered), sum(one.trained for one in ordered)
    if count < 4:
        return []
    found = []
    for number in range(4):
        own = ordered[count * number // 4 : count * (number + 1) // 4]
        used = sum(one.trained for one in own)
        found.append(
            DurationQuartile(
                longest_seconds=own[-1].seconds,
                groups=len(own),
                trained=used,
                share=len(own) / count,
                trained_share=used / trained if trained else 0.0,
            )
        )
    return found


STARVED = 30.0
"""Seconds that a consumer waits with no group running for it before one more is started."""
_GAP = 5.0
"""Longest gap between two calls of a consumer that counts as waiting."""


@dataclass(slots=True)
class _WaitingConsumer:
    """When a consumer began to wait for results, and its latest call."""

    since: float
    latest: float
    calls: int = 0
    """Open calls."""


class Pacer:
    """Builds the gate of each claim, and keeps what pacing costs."""

    def __init__(self, store: Store, lapse: float):
        self.store = store
        self.lapse = lapse
        self.clock = store.clock.monotonic
        self.bias = DurationBias()
        self.active = False
        """Whether some consumer has declared a pace."""
        self.idle_seconds = 0.0
        """Slot seconds in which the runner had room and pacing held waiting sessions back."""
        self.withheld_seconds: dict[str, float] = {}
        """Seconds that each consumer waited while finished groups were withheld for older ones."""
        self._waiting: dict[str, _WaitingConsumer] = {}
        self._exhausted_prefixes: set[tuple[str, frozenset[str]]] = set()
        self._idle = (0, self.clock())
        self._startable: dict[str, int] | None = None
        """Started tasks that may have waiting sessions, each with a number that grows when it gets one; `None`: not known.
        Knowing them, a claim need not look at every running group."""
        self._changes = itertools.count()

    async def restore(self) -> None:
        table = tables.consumers
        async with self.store.read() as tx:
            query = select(func.count()).select_from(table).where(table.c.groups_per_update.is_not(None))
            self.active = bool(await tx.scalar(query))

    # Admission

    async def gate(self, tx: AsyncConnection, version: int) -> PaceGate | None:
        """The gate for one claim; `None` if no consumer declares a pace."""
        if not self.active:
            return None
        found = await self._consumers(tx, version)
        if not found:
            # Sessions start without a gate.
            self._startable = None
            return None
        if self._startable is None:
            self._startable = {task_id: next(self._changes) for task_id in await consumers.started_with_waiting(tx)}
        return PaceGate(found, dict(self._startable), self._starved(), self._exhausted_prefixes)

    def claimed(self, gate: PaceGate, *, all_sessions: bool) -> None:
        """Record what a gate admitted; and what it found exhausted, if the claim looked at all waiting sessions."""
        if self._startable is None:
            return
        for task_id in gate.exhausted if all_sessions else ():
            # It may have got a waiting session since the gate was made.
            if self._startable.get(task_id) == gate.started[task_id]:
                del self._startable[task_id]
        self.retried(gate.admitted)

    def retried(self, task_ids: Iterable[str]) -> None:
        """Record that started tasks have waiting sessions again."""
        if self._startable is not None:
            self._startable |= {task_id: next(self._changes) for task_id in task_ids}

    def submitted(self) -> None:
        """Record that new tasks wait."""
        # A claim that is under way keeps its own set.
        self._exhausted_prefixes = set()

    async def _consumers(self, tx: AsyncConnection, version: int) -> list[PacedConsumer]:
        rows = await consumers.paced_rows(tx, self.store.clock.now(), self.lapse)
        return [await consumers.counted_consumer(tx, row, version) for row in rows]

    def set_idle(self, slots: int) -> None:
        """Record how many slots are empty because of pacing from now on."""
        now = self.clock()
        before, since = self._idle
        self.idle_seconds += before * (now - since)
        self._idle = (slots, now)

    # Consumers that wait

    def call_began(self, consumer: str) -> None:
        """Record that a call for results began."""
        now = self.clock()
        waiting = self._waiting.get(consumer)
        if waiting is None or (not waiting.calls and now - waiting.latest > _GAP):
            waiting = self._waiting[consumer] = _WaitingConsumer(now, now)
        waiting.calls += 1

    def call_ended(self, consumer: str, results: int) -> None:
        """Record that a call for results ended."""
        waiting = self._waiting[consumer]
        waiting.calls -= 1
        waiting.latest = self.clock()
        if results:
            waiting.since = waiting.latest

    def add_withheld(self, consumer: str, seconds: float) -> None:
        self.withheld_seconds[consumer] = self.withheld_seconds.get(consumer, 0.0) + seconds

    def _starved(self) -> set[str]:
        now = self.clock()
        return {
            name
            for name, one in self._waiting.items()
            if now - one.since >= STARVED and (one.calls or now - one.latest <= _GAP)
        }

    # Status

    async def status(self, version: int, tenant: str | None = None) -> Pacing:
        """The consumers of a tenant, or of all."""
        self.set_idle(self._idle[0])
        async with self.store.write() as tx:
            found = await self._consumers(tx, version) if self.active else []
        found = [one for one in found if names.visible(one.owner, tenant)]
        others = sorted(set(self.bias.consumers) - {one.name for one in found})
        return Pacing(
            idle_slot_seconds=self.idle_seconds,
            consumers=[
                ConsumerPace(consumer=names.plain(key), tenant=names.tenant_of(key), quartiles=self.bias.quartiles(key))
                for key in others
                if names.visible(names.tenant_of(key), tenant)
            ]
            + [
                ConsumerPace(
                    consumer=names.plain(one.name),
                    tenant=one.owner,
                    groups_per_update=one.groups_per_update,
                    max_staleness=one.max_staleness,
                    used=one.used,
                    in_hand=one.in_hand,
                    running=one.running,
                    finished=one.finished,
                    admissible=one.admissible,
                    withheld_seconds=self.withheld_seconds.get(one.name, 0.0),
                    quartiles=self.bias.quartiles(one.name),
                )
                for one in found
            ],
        )
