"""Repairs rows with impossible values at the start: values that follow from other rows are derived, the rest set aside.

Nothing is deleted, and nothing here stops a start. Each repair logs one line.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Sequence
from enum import StrEnum

from sqlalchemy import BigInteger, Column, ColumnElement, String, cast, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.schema import EndReason, FailureReason, SessionState, TaskState
from towline.server.store import tables
from towline.server.store.tables import Phase, chunks, get_meta, put_meta

log = logging.getLogger("towline.server")
_TOKEN = re.compile(r"[0-9a-f]{8}")
_IMPOSSIBLE = 10**17
"""No counter reaches this number."""
_SHOWN = 20
"""Maximum number of ids in one log line."""


async def repair_counters(tx: AsyncConnection) -> None:
    """Raise counters above every number in use: no number is given out twice, whatever the counters say."""
    counters = tables.counters
    used: dict[str, Column[int]] = {
        "epoch": tables.sessions.c.epoch,
        "tasks": tables.tasks.c.number,
        "results": tables.results.c.seq,
        "events": tables.events.c.seq,
    }
    # A damaged value may be of another type.
    found = await tx.execute(select(counters.c.name, cast(counters.c.value, BigInteger).label("value")))
    values = {row.name: int(row.value or 0) for row in found}
    for name, column in used.items():
        highest = int(await tx.scalar(select(func.max(column)).where(column < _IMPOSSIBLE)) or 0)
        now = values.get(name, 0)
        if not highest <= now < _IMPOSSIBLE:
            log.error("damaged: counter %s: it is %d, but %d is in use; continuing from there", name, now, highest)
            await tx.execute(update(counters).where(counters.c.name == name).values(value=highest))
    token = await get_meta(tx, "token")
    if token is None or not _TOKEN.fullmatch(token):
        log.error("damaged: token of the store: %r; results get new ids", token)
        await put_meta(tx, "token", secrets.token_hex(4))


async def repair_rows(tx: AsyncConnection) -> None:
    """Give sessions and tasks with an unknown state, reason or task a valid one, and results a task."""
    sessions, tasks = tables.sessions, tables.tasks
    await _repair_task_ids(tx)
    for phase, state in ((Phase.WAITING, SessionState.QUEUED), (Phase.ACTIVE, SessionState.RUNNING)):
        wrong = _unknown(sessions.c.state, [SessionState.QUEUED] if phase is Phase.WAITING else list(SessionState))
        await _set(tx, "session", sessions.c.session_id, (sessions.c.phase == phase) & wrong, {"state": state.value})
    await _set(
        tx,
        "session",
        sessions.c.session_id,
        or_(_unknown(sessions.c.state, list(SessionState)), sessions.c.phase.not_in([int(one) for one in Phase])),
        {"state": SessionState.FAILED.value, "phase": int(Phase.ENDED), "error": "its row is damaged"},
    )
    optional: Sequence[tuple[str, type[StrEnum]]] = (
        ("end_reason", EndReason),
        ("failure", FailureReason),
        ("stage", SessionState),
    )
    for name, values in optional:
        column = sessions.c[name]
        wrong = column.is_not(None) & _unknown(column, list(values))
        await _set(tx, "session", sessions.c.session_id, wrong, {name: None})
    over = tasks.c.grouped
    wrong = _unknown(tasks.c.state, list(TaskState))
    await _set(tx, "task", tasks.c.task_id, wrong & over, {"state": TaskState.DONE.value})
    await _set(tx, "task", tasks.c.task_id, wrong & ~over, {"state": TaskState.RUNNING.value})
    waits = sessions.c.phase.in_([int(Phase.WAITING), int(Phase.ACTIVE)])
    await _set(
        tx,
        "session",
        sessions.c.session_id,
        waits & sessions.c.task_id.not_in(select(tasks.c.task_id)),
        {"state": SessionState.FAILED.value, "phase": int(Phase.ENDED), "error": "its task does not exist"},
    )


async def _repair_task_ids(tx: AsyncConnection) -> None:
    """Replace empty task ids by those of related rows, where there are any."""
    sessions, tasks, results = tables.sessions, tables.tasks, tables.results
    related = (
        (tasks, select(func.max(sessions.c.task_id)).where(sessions.c.number == tasks.c.number)),
        (sessions, select(func.max(tasks.c.task_id)).where(tasks.c.number == sessions.c.number)),
        (results, select(func.max(sessions.c.task_id)).where(sessions.c.session_id == results.c.session_id)),
    )
    for table, query in related:
        number = table.c.seq if table is results else table.c.number
        found = query.correlate(table).scalar_subquery()
        # Distinct, as a task's id is its key.
        unknown = "damaged-" + cast(number, String)
        value = func.coalesce(func.nullif(found, ""), unknown)
        changed = update(table).where(table.c.task_id == "").values(task_id=value).returning(table.c.task_id)
        for name in (await tx.execute(changed)).scalars():
            log.error("damaged: a row of %s without a task id: it is set to %s", table.name, name)


def _unknown(column: Column[str], values: Sequence[StrEnum]) -> ColumnElement[bool]:
    return column.not_in([one.value for one in values])


async def _set(
    tx: AsyncConnection, what: str, key: Column[str], where: ColumnElement[bool], values: dict[str, object]
) -> None:
    ids = list((await tx.execute(select(key).where(where))).scalars())
    if not ids:
        return
    shown = ", ".join(map(str, ids[:_SHOWN])) + ("" if len(ids) <= _SHOWN else f" and {len(ids) - _SHOWN} more")
    log.error("damaged: rows of %d %ss (%s): set to %s", len(ids), what, shown, values)
    for some in chunks(ids):
        await tx.execute(update(key.table).where(key.in_(some)).values(**values))
