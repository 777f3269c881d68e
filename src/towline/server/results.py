"""Delivery: consumers lease results, use them, and acknowledge them by id.

A consumer is a cursor into the results and the leases of what it has not acknowledged yet, so that a call costs the same
whatever the history is. Results are committed in the order of their numbers (see `tables`), hence a cursor passes nobody
by. A result at or below the cursor without a lease is acknowledged, was dropped as stale, or is of a task that the
consumer does not follow: it never comes again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Row, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.crashpoints import crash_point
from towline.schema import Acked, FailureReason, Result, SchemaError, SessionResult, SessionState, Stale, Start, Unit
from towline.schema.files import load_json
from towline.server import names, tables
from towline.server.bias import Done
from towline.server.delivery_order import DeliveryOrder
from towline.server.errors import Conflict
from towline.server.paced import HELD
from towline.server.rules import stale
from towline.server.store import Store, chunks

log = logging.getLogger("towline.server")
_SCANNED = 1000
"""Most results that one transaction passes over."""
_SEEN = 30.0
"""Seconds between two notes that a consumer is alive."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a consumer asks for."""

    consumer: str
    unit: Unit
    most: int
    seconds: float
    """Of the lease."""
    start: Start = Start.BEGINNING
    max_staleness: int | None = None
    stale: Stale = Stale.DROP
    prefix: str | None = None
    """How the ids of those tasks begin that the consumer follows; `None` is what it said when it was first seen."""
    groups_per_update: int | None = None
    """How many groups the consumer uses under each policy version; sessions are then started at its pace."""


@dataclass(slots=True)
class Leased:
    results: list[Result]
    dropped: int
    flagged: int
    more: bool
    """Some were passed over, and there may be others behind them."""
    next_expiry: float | None
    """When the first lease of this consumer runs out."""
    withheld: int = 0
    """Finished groups that are not handed out yet, because older ones need their places."""
    passed: list[Done] = field(default_factory=list)
    """Groups that were dropped."""


class Delivery:
    def __init__(self, store: Store):
        self.store = store

    async def lease(self, wish: Wish, *, version: int, now: float) -> Leased:
        """What there is for the consumer now; its first call makes it known."""
        async with self.store.write() as tx:
            leased = await self._lease(tx, wish, version, now)
            if leased.results:
                crash_point("server.before_lease")
        if leased.results:
            crash_point("server.after_lease")
        return leased

    async def _lease(self, tx: AsyncConnection, wish: Wish, version: int, now: float) -> Leased:
        known = await self._consumer(tx, wish, now)
        if wish.groups_per_update is None:
            order, cursor = None, known.cursor
            expired = await self._expired(tx, wish, now, wish.most)
            rows = [*expired, *await self._fresh(tx, wish, known, wish.most - len(expired))]
        else:
            order = await DeliveryOrder.of(tx, known, version)
            cursor = await self._hold_fresh(tx, wish, known)
            rows = expired = order.sort(await self._expired(tx, wish, now, _SCANNED))
        kept: list[Row[Any]] = []
        old: set[int] = set()
        for row in rows:
            if len(kept) >= wish.most:
                break
            cursor = max(cursor, row.seq)
            if not row.task_id.startswith(known.prefix):
                continue
            if stale(version, row.lowest_version, row.max_staleness, wish.max_staleness):
                old.add(row.seq)
                if wish.stale is Stale.DROP:
                    continue
            elif order is not None and not order.comes(row):
                continue
            kept.append(row)
        if wish.stale is Stale.DROP:
            await self._release(tx, wish.consumer, wish.unit, [row.seq for row in expired if row.seq in old])
        until = now + wish.seconds
        deliveries = await self._grant(tx, wish, kept, until)
        dropped, flagged = (len(old), 0) if wish.stale is Stale.DROP else (0, len(old))
        if cursor != known.cursor or kept or old or known.seen < now - _SEEN:
            await self._note(tx, wish, known, cursor, len(kept), dropped, flagged, now)
        results = await self._read(tx, wish, kept, deliveries, until, old)
        more = not results and (bool(old) or cursor != known.cursor)
        passed = await self._done(tx, old) if dropped and wish.unit is Unit.GROUP else []
        withheld = order.withheld if order is not None else 0
        return Leased(results, dropped, flagged, more, await self._next_expiry(tx, wish), withheld, passed)

    # The consumer

    async def _consumer(self, tx: AsyncConnection, wish: Wish, now: float) -> Row[Any]:
        table, counters = tables.consumers, tables.counters
        mine = select(table).where(table.c.name == wish.consumer, table.c.unit == wish.unit.value).with_for_update()
        found = (await tx.execute(mine)).one_or_none()
        if found is not None:
            if wish.prefix not in (None, found.prefix):
                raise Conflict(
                    f"consumer {wish.consumer!r} follows tasks that begin with {found.prefix!r}; take another name",
                    field="prefix",
                )
            if (found.groups_per_update, found.max_staleness) == self._pace(wish):
                return found
            await tx.execute(
                update(table)
                .where(table.c.name == wish.consumer, table.c.unit == wish.unit.value)
                .values(**dict(zip(("groups_per_update", "max_staleness"), self._pace(wish), strict=True)))
            )
            return (await tx.execute(mine)).one()
        cursor = 0
        if wish.start is Start.NOW:
            cursor = int(await tx.scalar(select(counters.c.value).where(counters.c.name == "results")) or 0)
        blank = dict.fromkeys(("delivered", "acked", "dropped", "flagged"), 0)
        row: dict[str, Any] = {"name": wish.consumer, "unit": wish.unit.value, "cursor": cursor}
        row |= {"created": now, "seen": now}
        row["prefix"] = wish.prefix or ""
        row["groups_per_update"], row["max_staleness"] = self._pace(wish)
        await tx.execute(self.store.insert_new(table).values(**row, **blank))
        return (await tx.execute(mine)).one()

    @staticmethod
    def _pace(wish: Wish) -> tuple[int | None, int | None]:
        """What is kept of the pace that a consumer declares."""
        size = wish.groups_per_update
        return size, None if size is None else wish.max_staleness

    async def _note(
        self, tx: AsyncConnection, wish: Wish, known: Row[Any], cursor: int, given: int, dropped: int, flagged: int,
        now: float,
    ) -> None:  # fmt: skip
        table = tables.consumers
        await tx.execute(
            update(table)
            .where(table.c.name == wish.consumer, table.c.unit == wish.unit.value)
            .values(
                cursor=cursor,
                delivered=known.delivered + given,
                dropped=known.dropped + dropped,
                flagged=known.flagged + flagged,
                seen=now,
            )
        )

    # Leases

    async def _expired(self, tx: AsyncConnection, wish: Wish, now: float, most: int) -> list[Row[Any]]:
        leases, results = tables.leases, tables.results
        query = (
            select(*results.c, leases.c.delivery)
            .join(results, results.c.seq == leases.c.seq)
            .where(leases.c.consumer == wish.consumer, leases.c.unit == wish.unit.value, leases.c.until <= now)
            .order_by(leases.c.seq)
            .limit(most)
        )
        return list(await tx.execute(query))

    async def _hold_fresh(self, tx: AsyncConnection, wish: Wish, known: Row[Any]) -> int:
        """Take over what was published since: to be handed out when its turn comes, in any order. The cursor after it."""
        fresh = await self._fresh(tx, wish, known, _SCANNED)
        mine = {"consumer": wish.consumer, "unit": wish.unit.value, "until": 0.0, "delivery": HELD}
        rows = [mine | {"seq": row.seq} for row in fresh if row.task_id.startswith(known.prefix)]
        if rows:
            await tx.execute(insert(tables.leases), rows)
        return int(fresh[-1].seq if fresh else known.cursor)

    async def _fresh(self, tx: AsyncConnection, wish: Wish, known: Row[Any], wanted: int) -> list[Row[Any]]:
        if wanted <= 0:
            return []
        table = tables.results
        passing_over = known.prefix or (wish.max_staleness is not None and wish.stale is Stale.DROP)
        query = (
            select(table)
            .where(table.c.unit == wish.unit.value, table.c.seq > known.cursor)
            .order_by(table.c.seq)
            .limit(max(wanted, _SCANNED) if passing_over else wanted)
        )
        return list(await tx.execute(query))

    async def _grant(self, tx: AsyncConnection, wish: Wish, rows: Sequence[Row[Any]], until: float) -> dict[int, int]:
        """Lease the rows until then; how often each was handed out."""
        table = tables.leases
        again = {row.seq: row.delivery + 1 for row in rows if "delivery" in row._fields}
        fresh = [row.seq for row in rows if row.seq not in again]
        for some in chunks(list(again)):
            await tx.execute(
                update(table)
                .where(table.c.consumer == wish.consumer, table.c.unit == wish.unit.value, table.c.seq.in_(some))
                .values(until=until, delivery=table.c.delivery + 1)
            )
        if fresh:
            mine = {"consumer": wish.consumer, "unit": wish.unit.value, "until": until, "delivery": 1}
            await tx.execute(insert(table), [mine | {"seq": seq} for seq in fresh])
        return again | dict.fromkeys(fresh, 1)

    async def _release(self, tx: AsyncConnection, consumer: str, unit: Unit, seqs: Sequence[int]) -> int:
        """How many of them were leased."""
        table, released = tables.leases, 0
        for some in chunks(seqs):
            gone = await tx.execute(
                delete(table).where(table.c.consumer == consumer, table.c.unit == unit.value, table.c.seq.in_(some))
            )
            released += gone.rowcount
        return released

    async def give_back(self, consumer: str, *, now: float) -> int:
        """End all leases of the consumer; how many."""
        table = tables.leases
        async with self.store.write() as tx:
            mine = (table.c.consumer == consumer, table.c.until > now)
            return int((await tx.execute(update(table).where(*mine).values(until=now))).rowcount)

    async def _next_expiry(self, tx: AsyncConnection, wish: Wish) -> float | None:
        table = tables.leases
        mine = (table.c.consumer == wish.consumer, table.c.unit == wish.unit.value, table.c.delivery > HELD)
        found = await tx.scalar(select(table.c.until).where(*mine).order_by(table.c.until).limit(1))
        return None if found is None else float(found)

    # What a result holds

    async def _read(
        self,
        tx: AsyncConnection,
        wish: Wish,
        rows: Sequence[Row[Any]],
        deliveries: dict[int, int],
        until: float,
        old: set[int],
    ) -> list[Result]:
        members = await self._members(tx, rows) if wish.unit is Unit.GROUP else {}
        reasons = await _reasons(tx, [row.task_id for row in rows if wish.unit is Unit.GROUP and not row.usable])
        results = []
        for row in rows:
            sessions = members.get(row.seq, []) if wish.unit is Unit.GROUP else [_session(row)]
            if row.seq in old:
                sessions = [one.model_copy(update={"stale": True}) for one in sessions]
            results.append(
                Result(
                    result_id=names.result_id(wish.unit, row.seq, self.store.token),
                    unit=wish.unit,
                    task_id=row.task_id,
                    sessions=sessions,
                    reasons=reasons.get(row.task_id, {}),
                    delivery=deliveries[row.seq],
                    lease_until=until,
                )
            )
        return results

    async def _members(self, tx: AsyncConnection, groups: Sequence[Row[Any]]) -> dict[int, list[SessionResult]]:
        """The sessions of complete groups: the usable results of their tasks that came before them."""
        complete = {row.task_id: row.seq for row in groups if row.usable}
        found: dict[int, list[SessionResult]] = {seq: [] for seq in complete.values()}
        table = tables.results
        for some in chunks(list(complete)):
            query = select(table).where(table.c.task_id.in_(some), table.c.unit == Unit.SESSION.value, table.c.usable)
            for row in await tx.execute(query):
                group = complete[row.task_id]
                if row.seq < group:
                    found[group].append(_session(row))
        return {seq: sorted(sessions, key=lambda one: one.sample) for seq, sessions in found.items()}

    # Acknowledging

    async def ack(
        self, consumer: str, result_ids: Sequence[str], unusable: Collection[str] = (), *, version: int, now: float
    ) -> tuple[Acked, list[Done]]:
        """Done with for good, however often it is said. What was never handed to this consumer is told apart.

        Groups that are not `unusable` count as used under the policy version now.
        """
        parsed = {name: names.parse_result_id(name, self.store.token) for name in result_ids}
        acked: list[str] = []
        unknown: list[str] = []
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
            done: list[Done] = []
            for unit, some in seqs.items():
                values: dict[str, Any] = {"seen": now}
                if unit is Unit.GROUP:
                    held = await self._held(tx, consumer, some)
                    done = await self._done(tx, held, trained=set(held) - useless)
                    used = known[unit].used if known[unit].used_version == version else 0
                    values |= {"used": used + sum(one.trained for one in done), "used_version": version}
                released = await self._release(tx, consumer, unit, some)
                mine = (table.c.name == consumer, table.c.unit == unit.value)
                await tx.execute(update(table).where(*mine).values(acked=table.c.acked + released, **values))
            crash_point("server.before_ack")
        crash_point("server.after_ack")
        return Acked(acked=acked, unknown=unknown), done

    async def _held(self, tx: AsyncConnection, consumer: str, seqs: Sequence[int]) -> list[int]:
        """Those groups that are leased to the consumer."""
        table, found = tables.leases, []
        for some in chunks(seqs):
            query = select(table.c.seq).where(
                table.c.consumer == consumer,
                table.c.unit == Unit.GROUP.value,
                table.c.seq.in_(some),
                table.c.delivery > HELD,
            )
            found += list((await tx.execute(query)).scalars())
        return found

    async def _done(self, tx: AsyncConnection, seqs: Collection[int], trained: Collection[int] = ()) -> list[Done]:
        """What becomes of complete groups."""
        results, tasks = tables.results, tables.tasks
        found: list[Done] = []
        for some in chunks(sorted(seqs)):
            query = (
                select(results.c.seq, results.c.created, tasks.c.started)
                .join(tasks, tasks.c.task_id == results.c.task_id)
                .where(results.c.seq.in_(some), results.c.usable)
            )
            found += [
                Done(row.created - (row.created if row.started is None else row.started), row.seq in trained)
                for row in await tx.execute(query)
            ]
        return found


async def _reasons(tx: AsyncConnection, task_ids: Sequence[str]) -> dict[str, dict[str, int]]:
    """Why the samples of tasks are not usable, counted, as far as they have ended."""
    found: dict[str, Counter[str]] = {}
    table = tables.results
    for some in chunks(task_ids):
        query = select(table).where(
            table.c.task_id.in_(some), table.c.unit == Unit.SESSION.value, table.c.usable.is_(False)
        )
        for row in await tx.execute(query):
            found.setdefault(row.task_id, Counter())[_reason(_session(row))] += 1
    return {task_id: dict(counted) for task_id, counted in found.items()}


def _reason(session: SessionResult) -> str:
    if session.failure is not None:
        return session.failure.value
    if session.state is SessionState.FAILED:
        return FailureReason.INTERNAL.value
    if session.state is SessionState.CANCELLED:
        return "cancelled"
    return "unscored" if session.reward is None and session.reward_status is not None else "untrained"


def _session(row: Row[Any]) -> SessionResult:
    """What a row says of its session. One that cannot be read is a result like others, flagged."""
    try:
        return SessionResult.model_validate(load_json(row.body))
    except (SchemaError, TypeError, ValidationError) as error:
        log.error("the row of result %d is damaged: %s", row.seq, " ".join(str(error).split())[:200])
        return SessionResult(
            session_id=row.session_id,
            task_id=row.task_id,
            sample=0,
            attempt=1,
            state=SessionState.FAILED,
            failure=FailureReason.STORAGE,
            error="the row of this result is damaged",
            usable=False,
            turns=0,
            trained_tokens=0,
            damaged="the row of this result is damaged",
            finished=row.created,
        )
