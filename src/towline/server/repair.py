"""Rows that say what cannot be, put right at the start: what follows from others is derived again, the rest set aside.

Nothing is deleted, and nothing here stops a start. Each repair is one line in the log.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Sequence
from enum import StrEnum

from sqlalchemy import BigInteger, Column, ColumnElement, cast, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.schema import EndReason, FailureReason, SessionState, TaskState
from towline.server import ownership, tables
from towline.server.store import Store, chunks
from towline.server.tables import Phase

log = logging.getLogger("towline.server")
_TOKEN = re.compile(r"[0-9a-f]{8}")
_MOST = 10**17
"""Numbers that no counter comes to."""
_NAMED = 20
"""Most ids in one line."""


async def repair_counters(store: Store, tx: AsyncConnection) -> None:
    """No number that was given out is given out again, whatever the counters say."""
    counters = tables.counters
    reached: dict[str, Column[int]] = {
        "epoch": tables.sessions.c.epoch,
        "tasks": tables.tasks.c.number,
        "results": tables.results.c.seq,
        "events": tables.events.c.seq,
    }
    # A damaged value may be of another type.
    found = await tx.execute(select(counters.c.name, cast(counters.c.value, BigInteger).label("value")))
    values = {row.name: int(row.value or 0) for row in found}
    for name, column in reached.items():
        highest = int(await tx.scalar(select(func.max(column)).where(column < _MOST)) or 0)
        now = values.get(name, 0)
        if not highest <= now < _MOST:
            log.error("damaged: the counter of %s is %d, and %d is in use; it continues from there", name, now, highest)
            await tx.execute(update(counters).where(counters.c.name == name).values(value=highest))
    token = await ownership.get(tx, "token")
    if token is None or not _TOKEN.fullmatch(token):
        log.error("damaged: the token of the store is %r; results get new ids", token)
        await ownership.put(store, tx, "token", secrets.token_hex(4))


async def repair_rows(store: Store) -> None:
    """Sessions and tasks in states that there are."""
    sessions, tasks = tables.sessions, tables.tasks
    async with store.write() as tx:
        for phase, state in ((Phase.WAITING, SessionState.QUEUED), (Phase.ACTIVE, SessionState.RUNNING)):
            wrong = _unknown(sessions.c.state, [SessionState.QUEUED] if phase is Phase.WAITING else list(SessionState))
            await _set(
                tx, "session", sessions.c.session_id, (sessions.c.phase == phase) & wrong, {"state": state.value}
            )
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
            {"state": SessionState.FAILED.value, "phase": int(Phase.ENDED), "error": "its task is not there"},
        )


def _unknown(column: Column[str], values: Sequence[StrEnum]) -> ColumnElement[bool]:
    return column.not_in([one.value for one in values])


async def _set(
    tx: AsyncConnection, what: str, key: Column[str], where: ColumnElement[bool], values: dict[str, object]
) -> None:
    ids = list((await tx.execute(select(key).where(where))).scalars())
    if not ids:
        return
    shown = ", ".join(map(str, ids[:_NAMED])) + ("" if len(ids) <= _NAMED else f" and {len(ids) - _NAMED} more")
    log.error("damaged: the rows of %d %ss (%s); set to %s", len(ids), what, shown, values)
    for some in chunks(ids):
        await tx.execute(update(key.table).where(key.in_(some)).values(**values))
