"""Read-only queries about tasks, sessions, consumers and stored trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import Row, func, select, tuple_

from towline.cluster.segments import SegmentSlice
from towline.errors import DamagedData
from towline.schema import (
    EarlyStop,
    EndReason,
    FailureReason,
    Session,
    SessionLength,
    SessionState,
    TaskState,
    TaskStatus,
)
from towline.server.errors import ResourceNotFound
from towline.server.store import names, tables
from towline.server.store.database import Store
from towline.server.store.tables import WITHHELD, chunks

_CONSUMERS = 100
"""Maximum number of consumers in the metrics: clients choose the names, and each makes a time series."""


class SortOrder(StrEnum):
    """Order of sessions in a list, by when their tasks were submitted."""

    OLDEST = "oldest"
    """Sessions of the oldest task first."""
    NEWEST = "newest"
    """Sessions of the newest task first."""


@dataclass(frozen=True, slots=True)
class SessionQuery:
    """Which sessions to list."""

    state: SessionState | None = None
    reason: FailureReason | None = None
    task: str | None = None
    """Stored id of their task."""
    after: str | None = None
    """The last session of the previous page."""
    order: SortOrder = SortOrder.OLDEST
    limit: int = 100
    tenant: str | None = None
    """Only sessions of this tenant; `None`: of all."""


@dataclass(frozen=True, slots=True)
class ConsumerLag:
    """How far a consumer is behind."""

    consumer: str
    tenant: str
    unit: str
    lag: int
    """Results that were not delivered to it yet."""
    leases: int
    """Results that it has leased."""


async def task_status(store: Store, tenant: str, task_id: str) -> TaskStatus:
    """A task of the tenant with every attempt at every sample."""
    tasks, sessions = tables.tasks, tables.sessions
    key = names.qualify(tenant, task_id)
    async with store.read() as tx:
        mine = (tasks.c.task_id == key, *tables.owned_by(tasks, tenant))
        row = (await tx.execute(select(tasks).where(*mine))).one_or_none()
        if row is None:
            raise ResourceNotFound(f"no task {task_id!r}")
        query = select(sessions).where(sessions.c.task_id == key)
        rows = list(await tx.execute(query.order_by(sessions.c.sample, sessions.c.attempt)))
    attempts = [session_of(found) for found in rows]
    latest = [one for one, found in zip(attempts, rows, strict=True) if found.latest]
    return _status(row, latest, attempts, EarlyStop.of([[_length(found) for found in rows if found.latest]]))


async def task_list(
    store: Store, state: TaskState | None, after: str | None, limit: int, tenant: str | None = None
) -> list[TaskStatus]:
    """Tasks of a tenant, or of all, in the order of submission, after the task with the stored id `after`."""
    table = tables.tasks
    query = select(table).where(*tables.owned_by(table, tenant)).order_by(table.c.number).limit(limit)
    if state is not None:
        query = query.where(table.c.state == state.value)
    async with store.read() as tx:
        if after is not None:
            mine = (table.c.task_id == after, *tables.owned_by(table, tenant))
            number = await tx.scalar(select(table.c.number).where(*mine))
            if number is None:
                raise ResourceNotFound(f"`after`: unknown task {names.plain(after)!r}")
            query = query.where(table.c.number > number)
        return [_status(row, [], []) for row in await tx.execute(query)]


def _length(row: Row[Any]) -> SessionLength:
    return SessionLength(
        finished=row.state == SessionState.DONE,
        cut=row.end_reason == EndReason.EARLY_STOP,
        turns=row.turns or 0,
        trained_tokens=row.trained_tokens or 0,
        seconds=row.seconds or 0.0,
        run_ended=row.stage in (SessionState.BUILDING, SessionState.EVALUATING),
    )


def _status(
    row: Row[Any], sessions: list[Session], attempts: list[Session], early_stop: EarlyStop | None = None
) -> TaskStatus:
    return TaskStatus(
        task_id=names.plain(row.task_id),
        tenant=names.tenant_of(row.task_id),
        state=TaskState(row.state),
        num_samples=row.num_samples,
        finished=row.finished,
        usable=row.usable,
        created=row.created,
        updated=row.updated,
        grace_until=row.grace_until,
        cut=row.cut,
        early_stop=early_stop,
        sessions=sessions,
        attempts=attempts,
    )


async def session(store: Store, session_id: str, tenant: str | None = None) -> Session:
    """A session of the tenant, or of any."""
    table = tables.sessions
    async with store.read() as tx:
        mine = (table.c.session_id == session_id, *tables.owned_by(table, tenant))
        row = (await tx.execute(select(table).where(*mine))).one_or_none()
    if row is None:
        raise ResourceNotFound(f"no session {session_id!r}")
    return session_of(row)


async def session_list(store: Store, wanted: SessionQuery) -> list[Session]:
    """Sessions of all attempts, by task, sample and attempt, oldest or newest task first."""
    table = tables.sessions
    place = (table.c.number, table.c.sample, table.c.attempt)
    newest = wanted.order is SortOrder.NEWEST
    mine = tables.owned_by(table, wanted.tenant)
    order = (column.desc() if newest else column for column in place)
    query = select(table).where(*mine).order_by(*order).limit(wanted.limit)
    if wanted.state is not None:
        query = query.where(table.c.state == wanted.state.value)
    if wanted.reason is not None:
        query = query.where(table.c.failure == wanted.reason.value)
    if wanted.task is not None:
        query = query.where(table.c.task_id == wanted.task)
    async with store.read() as tx:
        if wanted.after is not None:
            last = (await tx.execute(select(*place).where(table.c.session_id == wanted.after, *mine))).one_or_none()
            if last is None:
                raise ResourceNotFound(f"`after`: unknown session {wanted.after!r}")
            behind = tuple_(*place) < tuple_(*last) if newest else tuple_(*place) > tuple_(*last)
            query = query.where(behind)
        return [session_of(row) for row in await tx.execute(query)]


async def consumer_lags(store: Store, tenant: str | None = None) -> list[ConsumerLag]:
    """How far the most recently seen consumers of a tenant, or of all, are behind."""
    table, results, leases = tables.consumers, tables.results, tables.leases
    found = []
    async with store.read() as tx:
        out = leases.c.delivery > WITHHELD
        held = select(leases.c.consumer, leases.c.unit, out.label("out"), func.count().label("held")).group_by(
            leases.c.consumer, leases.c.unit, out
        )
        holding = {(row.consumer, row.unit, bool(row.out)): row.held for row in await tx.execute(held)}
        recent = select(table).where(*tables.owned_by(table, tenant)).order_by(table.c.seen.desc()).limit(_CONSUMERS)
        for row in list(await tx.execute(recent)):
            behind = [results.c.owner == row.owner, results.c.unit == row.unit, results.c.seq > row.cursor]
            if row.prefix:
                behind.append(results.c.task_id.startswith(row.prefix, autoescape=True))
            lag = await tx.scalar(select(func.count()).select_from(results).where(*behind))
            withheld, given = (holding.get((row.name, row.unit, it_is), 0) for it_is in (False, True))
            behind_by = int(lag or 0) + withheld
            found.append(ConsumerLag(names.plain(row.name), row.owner, row.unit, behind_by, given))
    return found


@dataclass(slots=True)
class StoredTrajectories:
    """Where trajectories are stored, in the order of the request; sessions without one are left out."""

    pieces: dict[str, SegmentSlice] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    """Sessions whose row does not say where, with the reasons."""


async def find_trajectories(store: Store, session_ids: Sequence[str], tenant: str | None = None) -> StoredTrajectories:
    """Those of the sessions that the tenant owns; of any tenant, if none is given."""
    table = tables.sessions
    rows: dict[str, Row[Any]] = {}
    async with store.read() as tx:
        for some in chunks(list(session_ids)):
            query = select(table.c.session_id, table.c.segment, table.c.place, table.c.sha256).where(
                table.c.session_id.in_(some), table.c.segment.is_not(None), *tables.owned_by(table, tenant)
            )
            rows |= {row.session_id: row for row in await tx.execute(query)}
    found = StoredTrajectories()
    for name in dict.fromkeys(session_ids):
        if name in rows:
            try:
                found.pieces[name] = SegmentSlice.at(rows[name].segment, rows[name].place, rows[name].sha256)
            except DamagedData as error:
                found.broken[name] = str(error)
    return found


def session_of(row: Any) -> Session:
    """The session of a row."""
    return Session(
        session_id=row.session_id,
        task_id=names.plain(row.task_id),
        tenant=names.tenant_of(row.task_id),
        sample=row.sample,
        attempt=row.attempt,
        state=SessionState(row.state),
        end_reason=row.end_reason,
        failure=row.failure,
        stage=row.stage,
        error=row.error,
        node=row.node,
        created=row.created,
        updated=row.updated,
    )
