"""Paced consumers, read from the store: what they hold, what runs and waits for them, and in which order they get it.

Everything is derived from the rows of tasks, results and leases, so a group that failed, was cancelled, or was
acknowledged frees its slot in the transaction that records it, and a restart changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from sqlalchemy import ColumnElement, Row, Select, func, null, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.schema import TaskState, Unit
from towline.server.pacing.pace import GroupPace, Slack, slack, taken_slots
from towline.server.store import names, tables
from towline.server.store.tables import WITHHELD, Phase


def strictest_bound(*limits: int | None) -> int | None:
    """The strictest of the given staleness limits."""
    return min((limit for limit in limits if limit is not None), default=None)


@dataclass(slots=True)
class PacedConsumer:
    """One paced consumer."""

    name: str
    """As it is stored."""
    owner: str
    prefix: str
    groups_per_update: int
    max_staleness: int | None
    used: int
    """Groups used under the current policy version."""
    in_hand: int
    """Groups that are leased, not acknowledged and not too old."""
    running: int
    finished: int
    """Groups that wait to be delivered."""
    slacks: dict[str, Slack]
    """Slacks of the groups that have started and are not delivered, by task; empty if only their number was read."""
    pace: GroupPace

    def follows(self, task_id: str) -> bool:
        """Whether the task with this stored id is one of its own tenant that it follows."""
        return task_id.startswith(self.prefix) and names.tenant_of(task_id) == self.owner

    def slack_of(self, max_staleness: int | None) -> Slack:
        """The slack of a group that starts now, of a task with this limit."""
        return slack(None, strictest_bound(self.max_staleness, max_staleness), 0)

    @property
    def admissible(self) -> int | None:
        """How many groups of tasks without their own limit may start; `None`: no limit."""
        own = self.slack_of(None)
        return None if own is None else self.pace.room(own, (own + 1) * self.groups_per_update)


async def paced_rows(tx: AsyncConnection, now: float, lapse: float) -> list[Row[Any]]:
    """The consumers that pace admission, locked: they were seen recently, or hold a lease."""
    consumers, leases = tables.consumers, tables.leases
    holding = (
        select(leases.c.seq)
        .where(leases.c.consumer == consumers.c.name, leases.c.unit == consumers.c.unit, leases.c.until > now)
        .exists()
    )
    query = (
        select(consumers)
        .where(consumers.c.groups_per_update.is_not(None), or_(consumers.c.seen > now - lapse, holding))
        .order_by(consumers.c.name, consumers.c.unit)
        .with_for_update()
    )
    return list(await tx.execute(query))


async def running_groups(tx: AsyncConnection, owner: str) -> list[Row[Any]]:
    """The groups of a tenant that have started and not ended."""
    table = tables.tasks
    query = select(table.c.task_id, table.c.version, table.c.max_staleness).where(
        table.c.state == TaskState.RUNNING.value, table.c.grouped.is_(False), table.c.owner == owner
    )
    return list(await tx.execute(query))


async def paced_consumer(
    tx: AsyncConnection, row: Row[Any], started: Iterable[Row[Any]], version: int
) -> PacedConsumer:
    """The consumer of this locked row. `started` must have been read earlier in the same transaction."""
    limit = row.max_staleness
    slacks: dict[str, Slack] = {}
    for task in started:
        if task.task_id.startswith(row.prefix):
            # Tasks started by an older Towline have no version.
            old = (
                slack(task.version, strictest_bound(limit, task.max_staleness), version)
                if task.version is not None
                else -1
            )
            slacks[task.task_id] = old
    in_hand, finished = 0, 0
    for result in await _results(tx, row, version):
        left = slack(result.lowest_version, strictest_bound(limit, result.max_staleness), version)
        slacks.pop(result.task_id, None)
        if left is not None and left < 0:
            continue
        if result.delivery is None or result.delivery == WITHHELD:
            slacks[result.task_id] = left
            finished += 1
        else:
            in_hand += 1
    used = row.used if row.used_version == version else 0
    size = row.groups_per_update
    pace = GroupPace.of(size, taken_slots(used, in_hand, size), list(slacks.values()))
    return PacedConsumer(
        row.name, row.owner, row.prefix, size, limit, used, in_hand, len(slacks) - finished, finished, slacks, pace
    )


async def counted_consumer(tx: AsyncConnection, row: Row[Any], version: int) -> PacedConsumer:
    """The consumer of this locked row, for admission: groups are counted by the database, so the cost per claim does not
    grow with their number as it does in `paced_consumer`. A group that finishes between both queries, where the database
    allows that, is counted twice: less is admitted, until the next claim.
    """
    tasks, limit = tables.tasks, row.max_staleness
    slacks: list[Slack] = []
    running = 0
    started = (
        tasks.c.state == TaskState.RUNNING.value,
        tasks.c.grouped.is_(False),
        tasks.c.owner == row.owner,
        *_prefixed(tasks.c.task_id, row.prefix),
    )
    columns = (tasks.c.version, tasks.c.max_staleness)
    for group in await tx.execute(select(*columns, func.count().label("groups")).where(*started).group_by(*columns)):
        bound = strictest_bound(limit, group.max_staleness)
        # Tasks started by an older Towline have no version.
        slacks += [-1 if group.version is None else slack(group.version, bound, version)] * group.groups
        running += group.groups
    in_hand, finished = 0, 0
    for source in _result_sources(row, version):
        found = source.where(*_prefixed(source.selected_columns.task_id, row.prefix)).subquery()
        kinds = (found.c.lowest_version, found.c.max_staleness, found.c.delivery)
        for result in await tx.execute(select(*kinds, func.count().label("groups")).group_by(*kinds)):
            left = slack(result.lowest_version, strictest_bound(limit, result.max_staleness), version)
            if left is not None and left < 0:
                continue
            if result.delivery is None or result.delivery == WITHHELD:
                slacks += [left] * result.groups
                finished += result.groups
            else:
                in_hand += result.groups
    used = row.used if row.used_version == version else 0
    size = row.groups_per_update
    pace = GroupPace.of(size, taken_slots(used, in_hand, size), slacks)
    return PacedConsumer(row.name, row.owner, row.prefix, size, limit, used, in_hand, running, finished, {}, pace)


def _prefixed(task_id: ColumnElement[str], prefix: str) -> tuple[ColumnElement[bool], ...]:
    return (func.substr(task_id, 1, len(prefix)) == prefix,) if prefix else ()


async def started_with_waiting(tx: AsyncConnection) -> list[str]:
    """The tasks that have started and have waiting sessions. Reads the whole queue."""
    sessions, tasks = tables.sessions, tables.tasks
    has_started = select(tasks.c.task_id).where(
        tasks.c.task_id == sessions.c.task_id, tasks.c.state == TaskState.RUNNING.value
    )
    query = select(sessions.c.task_id).where(sessions.c.phase == Phase.WAITING, has_started.exists()).distinct()
    return list((await tx.execute(query)).scalars())


async def _results(tx: AsyncConnection, row: Row[Any], version: int) -> list[Row[Any]]:
    """Complete groups that the consumer has not acknowledged; of those it has not seen, as many as can matter."""
    known, fresh = _result_sources(row, version)
    found: list[Row[Any]] = list(await tx.execute(known))
    found += [one for one in await tx.execute(fresh) if one.task_id.startswith(row.prefix)]
    return found


def _result_sources(row: Row[Any], version: int) -> tuple[Select[Any], Select[Any]]:
    """Queries for complete groups that the consumer holds, and for those that it has not seen."""
    results, leases = tables.results, tables.leases
    columns = (results.c.seq, results.c.task_id, results.c.lowest_version, results.c.max_staleness)
    known = (
        select(*columns, leases.c.delivery)
        .join(results, results.c.seq == leases.c.seq)
        .where(leases.c.consumer == row.name, leases.c.unit == Unit.GROUP.value, results.c.usable)
    )
    fresh = select(*columns, null().label("delivery")).where(
        results.c.owner == row.owner, results.c.unit == Unit.GROUP.value, results.c.seq > row.cursor, results.c.usable
    )
    if row.max_staleness is not None:
        fresh = fresh.where(results.c.lowest_version >= version - row.max_staleness)
        if not names.plain(row.prefix):
            # More groups than fit into all updates within the bound leave no room anyway.
            fresh = fresh.limit((row.max_staleness + 1) * row.groups_per_update + 1)
    return known, fresh


class DeliveryOrder:
    """The delivery order in one call of a paced consumer: groups close to their deadline first, others leave them room."""

    def __init__(self, consumer: PacedConsumer):
        self.consumer = consumer
        self.withheld = 0

    @classmethod
    async def of(cls, tx: AsyncConnection, known: Row[Any], version: int) -> Self:
        return cls(await paced_consumer(tx, known, await running_groups(tx, known.owner), version))

    def sort(self, rows: Iterable[Row[Any]]) -> list[Row[Any]]:
        return sorted(rows, key=lambda row: (not self._free(row), *_slack_rank(self._slack(row)), row.seq))

    def delivers(self, row: Row[Any]) -> bool:
        """Whether the result is delivered in this call; if so, it takes a slot of an update."""
        if self._free(row):
            return True
        pace, slack = self.consumer.pace, self._slack(row)
        if not pace.delivers(slack):
            self.withheld += 1
            return False
        pace.deliver(slack)
        return True

    def _slack(self, row: Row[Any]) -> Slack:
        return self.consumer.slacks.get(row.task_id)

    @staticmethod
    def _free(row: Row[Any]) -> bool:
        """Whether a result takes no slot: it was delivered before, or is a group without sessions."""
        return row.delivery > WITHHELD or not row.usable


def _slack_rank(slack: Slack) -> tuple[bool, int]:
    return slack is None, slack or 0
