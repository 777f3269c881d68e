"""What delivered results contain: their sessions, why some are missing, and how often each was delivered."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.common.text import one_line
from towline.schema import FailureReason, Result, SchemaError, SessionResult, SessionState, Unit, unusable_reason
from towline.schema.files import load_json
from towline.server.store import names, tables
from towline.server.store.tables import chunks, result_id

log = logging.getLogger("towline.server")


async def read_results(
    tx: AsyncConnection,
    unit: Unit,
    rows: Sequence[Row[Any]],
    *,
    token: str,
    deliveries: dict[int, int],
    until: float,
    old: set[int],
) -> list[Result]:
    """The results of these rows, leased until then; those in `old` are stale. `token`: that of the store."""
    grouped = unit is Unit.GROUP
    members = await _members(tx, rows) if grouped else {}
    reasons = await _unusable_reasons(tx, [row.task_id for row in rows if grouped and not row.usable])
    cut = await _cut(tx, [row.task_id for row in rows]) if grouped else {}
    results = []
    for row in rows:
        sessions = members.get(row.seq, []) if grouped else [_session(row)]
        if row.seq in old:
            sessions = [one.model_copy(update={"stale": True}) for one in sessions]
        results.append(
            Result(
                result_id=result_id(unit, row.seq, token),
                unit=unit,
                task_id=names.plain(row.task_id),
                sessions=sessions,
                reasons=reasons.get(row.task_id, {}),
                cut=cut.get(row.task_id, 0),
                delivery=deliveries[row.seq],
                lease_until=until,
            )
        )
    return results


async def _members(tx: AsyncConnection, groups: Sequence[Row[Any]]) -> dict[int, list[SessionResult]]:
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


async def _cut(tx: AsyncConnection, task_ids: Sequence[str]) -> dict[str, int]:
    """How many samples of each task were stopped early."""
    table, found = tables.tasks, {}
    for some in chunks(task_ids):
        query = select(table.c.task_id, table.c.cut).where(table.c.task_id.in_(some), table.c.cut > 0)
        found.update({row.task_id: row.cut for row in await tx.execute(query)})
    return found


async def _unusable_reasons(tx: AsyncConnection, task_ids: Sequence[str]) -> dict[str, dict[str, int]]:
    """Why samples of the tasks are not usable, counted, for those that have ended."""
    found: dict[str, Counter[str]] = {}
    table = tables.results
    for some in chunks(task_ids):
        query = select(table).where(
            table.c.task_id.in_(some), table.c.unit == Unit.SESSION.value, table.c.usable.is_(False)
        )
        for row in await tx.execute(query):
            reason = unusable_reason(_session(row)) or "untrained"
            found.setdefault(row.task_id, Counter())[reason] += 1
    return {task_id: dict(counted) for task_id, counted in found.items()}


def _session(row: Row[Any]) -> SessionResult:
    """The session of a result row. A row that cannot be read becomes a result flagged as damaged."""
    try:
        return SessionResult.model_validate(load_json(row.body))
    except (SchemaError, TypeError, ValidationError) as error:
        log.error("damaged: row of result %d: %s", row.seq, one_line(error))
        return SessionResult(
            session_id=row.session_id,
            task_id=names.plain(row.task_id),
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
