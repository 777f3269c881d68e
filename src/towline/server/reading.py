"""Questions about tasks and sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import Row, func, select, tuple_

from towline.schema import FailureReason, Session, SessionState, TaskState, TaskStatus
from towline.server import tables
from towline.server.errors import Damaged, NotFound
from towline.server.paced import HELD
from towline.server.queueing import session_of
from towline.server.segments import Piece
from towline.server.store import Store, chunks

_CONSUMERS = 100
"""Most consumers in the figures: names are chosen by clients, and each makes a series."""


class Order(StrEnum):
    """Of sessions in a list, by when their tasks were submitted."""

    OLDEST = "oldest"
    NEWEST = "newest"


@dataclass(frozen=True, slots=True)
class SessionQuery:
    """Which sessions to list."""

    state: SessionState | None = None
    reason: FailureReason | None = None
    task: str | None = None
    after: str | None = None
    """The last session of the page before."""
    order: Order = Order.OLDEST
    limit: int = 100


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a consumer is."""

    consumer: str
    unit: str
    lag: int
    """Results that it has not been handed."""
    leases: int
    """Results that it holds."""


async def task_status(store: Store, task_id: str) -> TaskStatus:
    """The task with every attempt."""
    tasks, sessions = tables.tasks, tables.sessions
    async with store.read() as tx:
        row = (await tx.execute(select(tasks).where(tasks.c.task_id == task_id))).one_or_none()
        if row is None:
            raise NotFound(f"no task {task_id!r}")
        query = select(sessions).where(sessions.c.task_id == task_id)
        rows = list(await tx.execute(query.order_by(sessions.c.sample, sessions.c.attempt)))
    attempts = [session_of(found) for found in rows]
    latest = [one for one, found in zip(attempts, rows, strict=True) if found.latest]
    return _status(row, latest, attempts)


async def task_list(store: Store, state: TaskState | None, after: str | None, limit: int) -> list[TaskStatus]:
    """Tasks in the order they came, from the one after `after`."""
    table = tables.tasks
    query = select(table).order_by(table.c.number).limit(limit)
    if state is not None:
        query = query.where(table.c.state == state.value)
    async with store.read() as tx:
        if after is not None:
            number = await tx.scalar(select(table.c.number).where(table.c.task_id == after))
            if number is None:
                raise NotFound(f"no task {after!r} to continue after")
            query = query.where(table.c.number > number)
        return [_status(row, [], []) for row in await tx.execute(query)]


def _status(row: Row[Any], sessions: list[Session], attempts: list[Session]) -> TaskStatus:
    return TaskStatus(
        task_id=row.task_id,
        state=TaskState(row.state),
        num_samples=row.num_samples,
        finished=row.finished,
        usable=row.usable,
        created=row.created,
        updated=row.updated,
        sessions=sessions,
        attempts=attempts,
    )


async def session(store: Store, session_id: str) -> Session:
    table = tables.sessions
    async with store.read() as tx:
        row = (await tx.execute(select(table).where(table.c.session_id == session_id))).one_or_none()
    if row is None:
        raise NotFound(f"no session {session_id!r}")
    return session_of(row)


async def session_list(store: Store, wanted: SessionQuery) -> list[Session]:
    """Sessions of all attempts: by task, sample and attempt, in the order that the tasks came or from the newest."""
    table = tables.sessions
    place = (table.c.number, table.c.sample, table.c.attempt)
    newest = wanted.order is Order.NEWEST
    query = select(table).order_by(*(column.desc() if newest else column for column in place)).limit(wanted.limit)
    if wanted.state is not None:
        query = query.where(table.c.state == wanted.state.value)
    if wanted.reason is not None:
        query = query.where(table.c.failure == wanted.reason.value)
    if wanted.task is not None:
        query = query.where(table.c.task_id == wanted.task)
    async with store.read() as tx:
        if wanted.after is not None:
            last = (await tx.execute(select(*place).where(table.c.session_id == wanted.after))).one_or_none()
            if last is None:
                raise NotFound(f"no session {wanted.after!r} to continue after")
            behind = tuple_(*place) < tuple_(*last) if newest else tuple_(*place) > tuple_(*last)
            query = query.where(behind)
        return [session_of(row) for row in await tx.execute(query)]


async def consumers(store: Store) -> list[Standing]:
    """Where the consumers are that were seen last."""
    table, results, leases = tables.consumers, tables.results, tables.leases
    found = []
    async with store.read() as tx:
        out = leases.c.delivery > HELD
        held = select(leases.c.consumer, leases.c.unit, out.label("out"), func.count().label("held")).group_by(
            leases.c.consumer, leases.c.unit, out
        )
        holding = {(row.consumer, row.unit, bool(row.out)): row.held for row in await tx.execute(held)}
        for row in list(await tx.execute(select(table).order_by(table.c.seen.desc()).limit(_CONSUMERS))):
            behind = [results.c.unit == row.unit, results.c.seq > row.cursor]
            if row.prefix:
                behind.append(results.c.task_id.startswith(row.prefix, autoescape=True))
            lag = await tx.scalar(select(func.count()).select_from(results).where(*behind))
            withheld, given = (holding.get((row.name, row.unit, it_is), 0) for it_is in (False, True))
            found.append(Standing(row.name, row.unit, int(lag or 0) + withheld, given))
    return found


@dataclass(slots=True)
class Stored:
    """Where the trajectories of sessions are, in the order asked; sessions without one are left out."""

    pieces: dict[str, Piece] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    """Sessions whose row names no place that could be read, with the reason."""


async def stored(store: Store, session_ids: Sequence[str]) -> Stored:
    table = tables.sessions
    rows: dict[str, Row[Any]] = {}
    async with store.read() as tx:
        for some in chunks(list(session_ids)):
            query = select(table.c.session_id, table.c.segment, table.c.place, table.c.sha256).where(
                table.c.session_id.in_(some), table.c.segment.is_not(None)
            )
            rows |= {row.session_id: row for row in await tx.execute(query)}
    found = Stored()
    for name in dict.fromkeys(session_ids):
        if name in rows:
            try:
                found.pieces[name] = Piece.at(rows[name].segment, rows[name].place, rows[name].sha256)
            except Damaged as error:
                found.broken[name] = str(error)
    return found
