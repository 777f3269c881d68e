"""Questions about tasks and sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, select

from towline.schema import Session, TaskState, TaskStatus
from towline.server import tables
from towline.server.errors import NotFound
from towline.server.queueing import session_of
from towline.server.segments import Piece
from towline.server.store import Store, chunks


async def task_status(store: Store, task_id: str) -> TaskStatus:
    """The task with the latest attempt of every sample."""
    tasks, sessions = tables.tasks, tables.sessions
    async with store.read() as tx:
        row = (await tx.execute(select(tasks).where(tasks.c.task_id == task_id))).one_or_none()
        if row is None:
            raise NotFound(f"no task {task_id!r}")
        query = select(sessions).where(sessions.c.task_id == task_id, sessions.c.latest).order_by(sessions.c.sample)
        return _status(row, [session_of(found) for found in await tx.execute(query)])


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
                raise NotFound(f"no task {after!r} to go on after")
            query = query.where(table.c.number > number)
        return [_status(row, []) for row in await tx.execute(query)]


def _status(row: Row[Any], sessions: list[Session]) -> TaskStatus:
    return TaskStatus(
        task_id=row.task_id,
        state=TaskState(row.state),
        num_samples=row.num_samples,
        finished=row.finished,
        usable=row.usable,
        created=row.created,
        updated=row.updated,
        sessions=sessions,
    )


async def session(store: Store, session_id: str) -> Session:
    table = tables.sessions
    async with store.read() as tx:
        row = (await tx.execute(select(table).where(table.c.session_id == session_id))).one_or_none()
    if row is None:
        raise NotFound(f"no session {session_id!r}")
    return session_of(row)


async def pieces_of(store: Store, session_ids: Sequence[str]) -> list[Piece]:
    """Where the trajectories of the named sessions are, in that order; those that have none are left out."""
    table, found = tables.sessions, {}
    async with store.read() as tx:
        for some in chunks(list(session_ids)):
            query = select(table.c.session_id, table.c.segment, table.c.place, table.c.sha256).where(
                table.c.session_id.in_(some), table.c.segment.is_not(None)
            )
            for row in await tx.execute(query):
                found[row.session_id] = Piece.at(row.segment, row.place, row.sha256)
    return [found[name] for name in dict.fromkeys(session_ids) if name in found]
