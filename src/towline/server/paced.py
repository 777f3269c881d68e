"""Where paced consumers stand, read from the store: what they have in hand, what runs for them, and what waits for them.

Everything is derived from the rows of tasks, results and leases, so a group that failed, was cancelled, or was
acknowledged frees its place with the transaction that says so, and a restart changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, null, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.schema import TaskState, Unit
from towline.server import tables
from towline.server.pacing import Pace, Slack, slack, taken

HELD = 0
"""`leases.delivery` of a result that a consumer's cursor has passed and that was not handed out yet."""


def bound(*limits: int | None) -> int | None:
    """The strictest of those who say how old a group may be."""
    return min((limit for limit in limits if limit is not None), default=None)


@dataclass(slots=True)
class PacedConsumer:
    """One paced consumer."""

    name: str
    prefix: str
    groups_per_update: int
    max_staleness: int | None
    used: int
    """Groups used under the policy version now."""
    in_hand: int
    """Leased and not acknowledged, and not too old to be used."""
    running: int
    finished: int
    """Groups that wait to be handed out."""
    slacks: dict[str, Slack]
    """Of the groups that were started and not handed out, by task."""
    pace: Pace

    def follows(self, task_id: str) -> bool:
        return task_id.startswith(self.prefix)

    def slack_of(self, max_staleness: int | None) -> Slack:
        """Of a group of such a task that starts now."""
        return slack(None, bound(self.max_staleness, max_staleness), 0)

    @property
    def admissible(self) -> int | None:
        """How many groups of tasks without a bound of their own may start; `None` if there is no bound at all."""
        own = self.slack_of(None)
        return None if own is None else self.pace.room(own, (own + 1) * self.groups_per_update)


async def paced_rows(tx: AsyncConnection, now: float, lapse: float) -> list[Row[Any]]:
    """The consumers that pace admission, locked: they were seen lately, or hold a lease."""
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


async def running(tx: AsyncConnection) -> list[Row[Any]]:
    """The groups that were started and have not come to their end."""
    table = tables.tasks
    query = select(table.c.task_id, table.c.version, table.c.max_staleness).where(
        table.c.state == TaskState.RUNNING.value, table.c.grouped.is_(False)
    )
    return list(await tx.execute(query))


async def paced_consumer(
    tx: AsyncConnection, row: Row[Any], started: Iterable[Row[Any]], version: int
) -> PacedConsumer:
    """Of the consumer of this row, which must be locked. `started` must have been read before, in this transaction."""
    limit = row.max_staleness
    slacks: dict[str, Slack] = {}
    for task in started:
        if task.task_id.startswith(row.prefix):
            # A task that an older Towline started does not say when.
            old = slack(task.version, bound(limit, task.max_staleness), version) if task.version is not None else -1
            slacks[task.task_id] = old
    in_hand, finished = 0, 0
    for result in await _results(tx, row, version):
        left = slack(result.lowest_version, bound(limit, result.max_staleness), version)
        slacks.pop(result.task_id, None)
        if left is not None and left < 0:
            continue
        if result.delivery is None or result.delivery == HELD:
            slacks[result.task_id] = left
            finished += 1
        else:
            in_hand += 1
    used = row.used if row.used_version == version else 0
    size = row.groups_per_update
    pace = Pace.of(size, taken(used, in_hand, size), list(slacks.values()))
    return PacedConsumer(
        row.name, row.prefix, size, limit, used, in_hand, len(slacks) - finished, finished, slacks, pace
    )


async def _results(tx: AsyncConnection, row: Row[Any], version: int) -> list[Row[Any]]:
    """Complete groups that the consumer has not acknowledged; of those that it has not seen, as many as matter."""
    results, leases = tables.results, tables.leases
    columns = (results.c.seq, results.c.task_id, results.c.lowest_version, results.c.max_staleness)
    known = (
        select(*columns, leases.c.delivery)
        .join(results, results.c.seq == leases.c.seq)
        .where(leases.c.consumer == row.name, leases.c.unit == Unit.GROUP.value, results.c.usable)
    )
    found: list[Row[Any]] = list(await tx.execute(known))
    fresh = select(*columns, null().label("delivery")).where(
        results.c.unit == Unit.GROUP.value, results.c.seq > row.cursor, results.c.usable
    )
    if row.max_staleness is not None:
        fresh = fresh.where(results.c.lowest_version >= version - row.max_staleness)
        if not row.prefix:
            # More than fit into all updates within the bound leave no room, however many more there are.
            fresh = fresh.limit((row.max_staleness + 1) * row.groups_per_update + 1)
    found += [one for one in await tx.execute(fresh) if one.task_id.startswith(row.prefix)]
    return found
