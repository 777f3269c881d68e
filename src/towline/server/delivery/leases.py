"""Leases: consumers lease results, use them, and acknowledge them by id; a lease that expires is granted again.

A consumer is a cursor into the results plus the leases of what it has not acknowledged, so a call costs the same however
long the history is. Results are committed in the order of their numbers (see `tables`), hence a cursor skips none. A
result at or below the cursor without a lease is acknowledged, was dropped as stale, or belongs to a task that the consumer
does not follow: it is never delivered again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Row, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.common.crashpoints import crash_point
from towline.schema import (
    DEFAULT_TENANT,
    Acked,
    Result,
    Stale,
    Start,
    Unit,
)
from towline.server.delivery.results import read_results
from towline.server.errors import InvalidInput, ResourceConflict
from towline.server.pacing.consumers import DeliveryOrder
from towline.server.pacing.pacer import FinishedGroup
from towline.server.scheduling.rules import is_stale
from towline.server.store import names, tables
from towline.server.store.database import Store
from towline.server.store.tables import WITHHELD, chunks, insert_new, parse_result_id

log = logging.getLogger("towline.server")
_SCANNED = 1000
"""Maximum number of results scanned per transaction."""
_SEEN_SECONDS = 30.0
"""Minimum seconds between updates of a consumer's last-seen time."""
_CLOCK_SECONDS = 2.0
"""A consumer that was last seen later than this from now shows that the clock was set back."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """What a consumer asks for."""

    consumer: str
    unit: Unit
    most: int
    seconds: float
    """Duration of the lease."""
    start: Start = Start.BEGINNING
    max_staleness: int | None = None
    stale: Stale = Stale.DROP
    prefix: str | None = None
    """Prefix of the ids of the tasks that the consumer follows; `None`: the one of its first call."""
    groups_per_update: int | None = None
    """How many groups the consumer uses per policy version; sessions then start at its pace."""
    tenant: str = DEFAULT_TENANT
    """Whose results it leases: no consumer sees those of another tenant."""
    most_consumers: int | None = None
    """Consumers that the tenant may have."""

    @property
    def key(self) -> str:
        """The name under which the consumer is stored."""
        return names.qualify(self.tenant, self.consumer)

    @property
    def pace(self) -> dict[str, int | None]:
        """The columns of the pace that the consumer declares."""
        size = self.groups_per_update
        return {"groups_per_update": size, "max_staleness": None if size is None else self.max_staleness}


@dataclass(slots=True)
class LeasedResults:
    """The answer to a `LeaseRequest`."""

    results: list[Result]
    dropped: int
    flagged: int
    more: bool
    """Some were skipped, and there may be others behind them."""
    next_expiry: float | None
    """When the first lease of this consumer expires."""
    withheld: int = 0
    """Finished groups that are not delivered yet, because older ones need their slots."""
    passed: list[FinishedGroup] = field(default_factory=list)
    """Groups that were dropped."""


class LeaseManager:
    """Grants leases, delivers results again whose lease has expired, and ends leases on acknowledgement."""

    def __init__(self, store: Store):
        self.store = store

    async def lease(self, request: LeaseRequest, *, version: int, now: float) -> LeasedResults:
        """The results that are available to the consumer now. Its first call registers it."""
        async with self.store.write() as tx:
            leased = await self._lease(tx, request, version, now)
            if leased.results:
                crash_point("server.before_lease")
        if leased.results:
            crash_point("server.after_lease")
        return leased

    async def _lease(self, tx: AsyncConnection, request: LeaseRequest, version: int, now: float) -> LeasedResults:
        known = await self._consumer(tx, request, now)
        if request.groups_per_update is None:
            order, cursor = None, known.cursor
            expired = await self._expired(tx, request, now, request.most)
            rows = [*expired, *await self._fresh(tx, request, known, request.most - len(expired))]
        else:
            order = await DeliveryOrder.of(tx, known, version)
            cursor = await self._hold_fresh(tx, request, known)
            rows = expired = order.sort(await self._expired(tx, request, now, _SCANNED))
        kept: list[Row[Any]] = []
        old: set[int] = set()
        for row in rows:
            if len(kept) >= request.most:
                break
            cursor = max(cursor, row.seq)
            if not row.task_id.startswith(known.prefix):
                continue
            if is_stale(version, row.lowest_version, row.max_staleness, request.max_staleness):
                old.add(row.seq)
                if request.stale is Stale.DROP:
                    continue
            elif order is not None and not order.delivers(row):
                continue
            kept.append(row)
        if request.stale is Stale.DROP:
            await self._release(tx, request.key, request.unit, [row.seq for row in expired if row.seq in old])
        until = now + request.seconds
        deliveries = await self._grant(tx, request, kept, until)
        dropped, flagged = (len(old), 0) if request.stale is Stale.DROP else (0, len(old))
        if cursor != known.cursor or kept or old or known.seen < now - _SEEN_SECONDS:
            await tx.execute(
                update(tables.consumers)
                .where(*_consumer_is(request))
                .values(
                    cursor=cursor,
                    delivered=known.delivered + len(kept),
                    dropped=known.dropped + dropped,
                    flagged=known.flagged + flagged,
                    seen=now,
                )
            )
        results = await read_results(
            tx, request.unit, kept, token=self.store.token, deliveries=deliveries, until=until, old=old
        )
        more = not results and (bool(old) or cursor != known.cursor)
        passed = await self._finished(tx, old) if dropped and request.unit is Unit.GROUP else []
        withheld = order.withheld if order is not None else 0
        return LeasedResults(results, dropped, flagged, more, await self._next_expiry(tx, request), withheld, passed)

    # The consumer

    async def _consumer(self, tx: AsyncConnection, request: LeaseRequest, now: float) -> Row[Any]:
        """The locked row of the consumer, created or updated to the pace that it declares."""
        table, counters = tables.consumers, tables.counters
        locked = select(table).where(*_consumer_is(request)).with_for_update()
        found = (await tx.execute(locked)).one_or_none()
        if found is not None and found.seen > now + _CLOCK_SECONDS:
            await self._set_back(tx, request, found.seen - now, now)
        if found is not None:
            prefix = names.plain(found.prefix)
            if request.prefix not in (None, prefix):
                raise ResourceConflict(
                    f"consumer {request.consumer!r} follows tasks with the prefix {prefix!r}; use another name",
                    field="prefix",
                )
            if all(getattr(found, name) == value for name, value in request.pace.items()):
                return found
            await tx.execute(update(table).where(*_consumer_is(request)).values(**request.pace))
            return (await tx.execute(locked)).one()
        prefix, cursor = names.qualify(request.tenant, request.prefix or ""), 0
        names.check_length(request.key, "consumer")
        names.check_length(prefix, "prefix")
        await check_consumers(tx, request)
        if request.start is Start.NOW:
            cursor = int(await tx.scalar(select(counters.c.value).where(counters.c.name == "results")) or 0)
        row: dict[str, Any] = dict.fromkeys(("delivered", "acked", "dropped", "flagged"), 0)
        row |= {"name": request.key, "unit": request.unit.value, "cursor": cursor, "prefix": prefix}
        row |= {"created": now, "seen": now, "owner": request.tenant} | request.pace
        await tx.execute(insert_new(tx, table).values(**row))
        return (await tx.execute(locked)).one()

    async def _set_back(self, tx: AsyncConnection, request: LeaseRequest, seconds: float, now: float) -> None:
        """Move the leases of the consumer with a clock that was set back: none may last longer than it was granted for."""
        log.warning("the clock was set back by %.0f s; the leases of consumer %s follow it", seconds, request.consumer)
        table = tables.leases
        granted = (*_leased_to(request.key, request.unit), table.c.delivery > WITHHELD)
        await tx.execute(update(table).where(*granted).values(until=table.c.until - seconds))
        await tx.execute(update(tables.consumers).where(*_consumer_is(request)).values(seen=now))

    # Leases

    async def _expired(self, tx: AsyncConnection, request: LeaseRequest, now: float, most: int) -> list[Row[Any]]:
        """Results whose lease has expired: they are delivered again."""
        leases, results = tables.leases, tables.results
        query = (
            select(*results.c, leases.c.delivery)
            .join(results, results.c.seq == leases.c.seq)
            .where(*_leased_to(request.key, request.unit), leases.c.until <= now)
            .order_by(leases.c.seq)
            .limit(most)
        )
        return list(await tx.execute(query))

    async def _hold_fresh(self, tx: AsyncConnection, request: LeaseRequest, known: Row[Any]) -> int:
        """Hold what was published since the last call, to be delivered in any order; returns the cursor after it."""
        fresh = await self._fresh(tx, request, known, _SCANNED)
        held = {"consumer": request.key, "unit": request.unit.value, "until": 0.0, "delivery": WITHHELD}
        held["owner"] = request.tenant
        rows = [held | {"seq": row.seq} for row in fresh if row.task_id.startswith(known.prefix)]
        if rows:
            await tx.execute(insert(tables.leases), rows)
        return int(fresh[-1].seq if fresh else known.cursor)

    async def _fresh(self, tx: AsyncConnection, request: LeaseRequest, known: Row[Any], wanted: int) -> list[Row[Any]]:
        """Results behind the cursor."""
        if wanted <= 0:
            return []
        table = tables.results
        skips = names.plain(known.prefix) or (request.max_staleness is not None and request.stale is Stale.DROP)
        query = (
            select(table)
            .where(
                *tables.owned_by(table, request.tenant),
                table.c.unit == request.unit.value,
                table.c.seq > known.cursor,
            )
            .order_by(table.c.seq)
            .limit(max(wanted, _SCANNED) if skips else wanted)
        )
        return list(await tx.execute(query))

    async def _grant(
        self, tx: AsyncConnection, request: LeaseRequest, rows: Sequence[Row[Any]], until: float
    ) -> dict[int, int]:
        """Lease the rows until then; returns how often each has been delivered."""
        table = tables.leases
        again = {row.seq: row.delivery + 1 for row in rows if "delivery" in row._fields}
        fresh = [row.seq for row in rows if row.seq not in again]
        for some in chunks(list(again)):
            await tx.execute(
                update(table)
                .where(*_leased_to(request.key, request.unit), table.c.seq.in_(some))
                .values(until=until, delivery=table.c.delivery + 1)
            )
        if fresh:
            lease = {"consumer": request.key, "unit": request.unit.value, "until": until, "delivery": 1}
            lease["owner"] = request.tenant
            await tx.execute(insert(table), [lease | {"seq": seq} for seq in fresh])
        return again | dict.fromkeys(fresh, 1)

    async def _release(self, tx: AsyncConnection, consumer: str, unit: Unit, seqs: Sequence[int]) -> int:
        """End the leases; returns how many there were."""
        table, released = tables.leases, 0
        for some in chunks(seqs):
            released += (
                await tx.execute(delete(table).where(*_leased_to(consumer, unit), table.c.seq.in_(some)))
            ).rowcount
        return released

    async def release_all(self, consumer: str, *, now: float) -> int:
        """Expire all leases of the consumer with this stored name; returns how many."""
        table = tables.leases
        async with self.store.write() as tx:
            open_leases = (table.c.consumer == consumer, table.c.until > now)
            return int((await tx.execute(update(table).where(*open_leases).values(until=now))).rowcount)

    async def _next_expiry(self, tx: AsyncConnection, request: LeaseRequest) -> float | None:
        table = tables.leases
        delivered = (*_leased_to(request.key, request.unit), table.c.delivery > WITHHELD)
        found = await tx.scalar(select(table.c.until).where(*delivered).order_by(table.c.until).limit(1))
        return None if found is None else float(found)

    # Acknowledging

    async def ack(
        self, consumer: str, result_ids: Sequence[str], unusable: Collection[str] = (), *, version: int, now: float
    ) -> tuple[Acked, list[FinishedGroup]]:
        """Acknowledge results for good; repeating it changes nothing. Ids never leased to this consumer are `unknown`.
        `consumer` is its stored name.

        Groups that are not `unusable` count as used under the current policy version.
        """
        parsed = {name: parse_result_id(name, self.store.token) for name in result_ids}
        acked: list[str] = []
        unknown: list[str] = []
        finished: list[FinishedGroup] = []
        table = tables.consumers
        async with self.store.write() as tx:
            query = select(table).where(table.c.name == consumer).order_by(table.c.unit).with_for_update()
            known = {Unit(row.unit): row for row in await tx.execute(query)}
            seqs: dict[Unit, list[int]] = {}
            for name, place in parsed.items():
                if place is None or place[0] not in known or place[1] > known[place[0]].cursor:
                    unknown.append(name)
                else:
                    acked.append(name)
                    seqs.setdefault(place[0], []).append(place[1])
            useless = {place[1] for name, place in parsed.items() if place is not None and name in unusable}
            for unit, some in seqs.items():
                values: dict[str, Any] = {"seen": max(now, known[unit].seen)}
                if unit is Unit.GROUP:
                    leased = await self._leased_groups(tx, consumer, some)
                    finished = await self._finished(tx, leased, trained=set(leased) - useless)
                    used = known[unit].used if known[unit].used_version == version else 0
                    values |= {"used": used + sum(one.trained for one in finished), "used_version": version}
                released = await self._release(tx, consumer, unit, some)
                mine = (table.c.name == consumer, table.c.unit == unit.value)
                await tx.execute(update(table).where(*mine).values(acked=table.c.acked + released, **values))
            crash_point("server.before_ack")
        crash_point("server.after_ack")
        return Acked(acked=acked, unknown=unknown), finished

    async def _leased_groups(self, tx: AsyncConnection, consumer: str, seqs: Sequence[int]) -> list[int]:
        """Those groups that are leased to the consumer."""
        table, found = tables.leases, []
        for some in chunks(seqs):
            delivered = (*_leased_to(consumer, Unit.GROUP), table.c.seq.in_(some), table.c.delivery > WITHHELD)
            found += list((await tx.execute(select(table.c.seq).where(*delivered))).scalars())
        return found

    async def _finished(
        self, tx: AsyncConnection, seqs: Collection[int], trained: Collection[int] = ()
    ) -> list[FinishedGroup]:
        """The complete groups among these results, with their durations."""
        results, tasks = tables.results, tables.tasks
        found: list[FinishedGroup] = []
        for some in chunks(sorted(seqs)):
            query = (
                select(results.c.seq, results.c.created, tasks.c.started)
                .join(tasks, tasks.c.task_id == results.c.task_id)
                .where(results.c.seq.in_(some), results.c.usable)
            )
            found += [
                FinishedGroup(row.created - (row.created if row.started is None else row.started), row.seq in trained)
                for row in await tx.execute(query)
            ]
        return found


async def check_consumers(tx: AsyncConnection, request: LeaseRequest) -> None:
    """Raise `InvalidInput` if the tenant has as many consumers as it may have."""
    if request.most_consumers is None:
        return
    table = tables.consumers
    count = int(await tx.scalar(select(func.count()).select_from(table).where(table.c.owner == request.tenant)) or 0)
    if count >= request.most_consumers:
        raise InvalidInput(
            f"this tenant has {count} consumers, and the limit consumers is {request.most_consumers}: use known names",
            field="consumer",
        )


def _consumer_is(request: LeaseRequest) -> tuple[ColumnElement[bool], ...]:
    table = tables.consumers
    return table.c.name == request.key, table.c.unit == request.unit.value


def _leased_to(consumer: str, unit: Unit) -> tuple[ColumnElement[bool], ...]:
    table = tables.leases
    return table.c.consumer == consumer, table.c.unit == unit.value
