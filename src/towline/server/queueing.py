"""Tasks on their way in, and sessions on their way to a node.

The queue is the index `sessions_waiting` and nothing in memory: what waits costs a row, and taking the next costs the same
however many wait behind it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import bindparam, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.crashpoints import crash_point
from towline.schema import Accepted, FailureReason, Session, SessionState, Task, TaskState
from towline.schema.files import dump_json
from towline.server import tables
from towline.server.errors import Conflict, Full, Invalid
from towline.server.gate import PaceGate
from towline.server.rows import row_event, waiting_row
from towline.server.store import Store, add_events, chunks, take
from towline.server.tables import Phase

log = logging.getLogger("towline.server")

LARGEST = 2**31 - 1
"""Of every whole number in a task."""


# Submitting


@dataclass(slots=True)
class Written:
    """A task as it is stored."""

    task: Task
    body: bytes
    digest: str
    field: str
    """The path of the task in what was submitted: empty, or `[3]`."""


def written(task: Task, field: str = "") -> Written:
    """Raises `Invalid` for a task that no database can hold."""
    for name in ("num_samples", "max_attempts", "priority", "max_staleness"):
        value = getattr(task, name)
        if value is not None and abs(value) > LARGEST:
            raise Invalid(f"must be at most {LARGEST}", field=f"{field}.{name}".lstrip("."))
    values = task.model_dump(mode="python")
    try:
        canonical = orjson.dumps(values, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        # Integers past 64 bits and broken surrogates, which only the slow way can hold.
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    return Written(task, dump_json(values), hashlib.sha256(canonical).hexdigest(), field)


async def accept(store: Store, tasks: Sequence[Written], *, room: int, at: float) -> tuple[list[Accepted], int]:
    """Store the tasks that are new, all of them or none; the answers, and how many sessions now wait that did not."""
    async with store.write() as tx:
        # Whoever submits waits here for whoever submits: what follows sees every task that is there.
        last = await take(tx, "tasks", len(tasks))
        known = await _digests(tx, [one.task.task_id for one in tasks])
        fresh: list[Written] = []
        answers: list[Accepted] = []
        for one in tasks:
            task = one.task
            found = known.get(task.task_id)
            if found is not None and found != one.digest:
                where = f"{one.field}.task_id".lstrip(".")
                raise Conflict(f"another task has the id {task.task_id!r}; submit this one under its own", field=where)
            if found is None:
                fresh.append(one)
                known[task.task_id] = one.digest
            answers.append(Accepted(task_id=task.task_id, created=found is None, sessions=task.num_samples))
        wanted = sum(one.task.num_samples for one in fresh)
        if wanted > room:
            raise Full(f"the queue has room for {max(0, room)} sessions and this needs {wanted}")
        if fresh:
            await _insert(tx, fresh, last - len(tasks) + 1, at)
        crash_point("server.before_accept")
    crash_point("server.after_accept")
    return answers, wanted


async def _digests(tx: AsyncConnection, ids: Sequence[str]) -> dict[str, str]:
    table, found = tables.tasks, {}
    for some in chunks(list(ids)):
        rows = await tx.execute(select(table.c.task_id, table.c.digest).where(table.c.task_id.in_(some)))
        found.update({row.task_id: row.digest for row in rows})
    return found


async def _insert(tx: AsyncConnection, fresh: Sequence[Written], first: int, at: float) -> None:
    task_rows: list[dict[str, Any]] = []
    session_rows: list[dict[str, Any]] = []
    for number, one in enumerate(fresh, first):
        task = one.task
        task_rows.append(
            {
                "task_id": task.task_id,
                "number": number,
                "digest": one.digest,
                "body": one.body,
                "state": TaskState.QUEUED.value,
                "priority": task.priority,
                "num_samples": task.num_samples,
                "required": task.required_samples,
                "max_attempts": task.max_attempts,
                "max_staleness": task.max_staleness,
                "callback": task.callback,
                "finished": 0,
                "usable": 0,
                "grouped": False,
                "created": at,
                "updated": at,
            }
        )
        session_rows += [
            waiting_row(task.task_id, number, task.priority, sample, at) for sample in range(task.num_samples)
        ]
    await tx.execute(insert(tables.tasks), task_rows)
    for some in chunks(session_rows):
        await tx.execute(insert(tables.sessions), list(some))
    told = [("task", {"task_id": one.task.task_id, "state": TaskState.QUEUED.value}) for one in fresh]
    await add_events(tx, told, at)


# Scheduling


@dataclass(slots=True)
class Claimed:
    session: Session
    body: bytes
    """The task's."""
    deaths: int
    """Node deaths at which its sample was running."""
    company: int
    """Sessions that were running at the last of them."""


async def suspects(tx: AsyncConnection, deaths: int) -> list[int]:
    """How many sessions were running at the last node death of each that waits and was running at so many."""
    table = tables.sessions
    query = select(table.c.company).where(table.c.phase == Phase.WAITING, table.c.deaths >= deaths)
    return list((await tx.execute(query)).scalars())


async def claim(
    tx: AsyncConnection,
    count: int,
    *,
    epoch: int,
    node: str,
    at: float,
    version: int,
    gate: PaceGate | None = None,
    deaths: int = 0,
) -> list[Claimed]:
    """The most urgent sessions that wait and that the gate lets pass, now this server's. `version` is the policy's.

    With `deaths` only those that were running at so many node deaths.
    """
    sessions, tasks = tables.sessions, tables.tasks
    waiting = (
        select(sessions.c.session_id, sessions.c.task_id)
        .where(sessions.c.phase == Phase.WAITING)
        .order_by(sessions.c.urgency, sessions.c.number, sessions.c.sample)
        .limit(count)
    )
    if deaths:
        waiting = waiting.where(sessions.c.deaths >= deaths)
    # Tasks are locked before sessions, as everywhere; a session that changed hands in between is left alone below.
    found = list(await tx.execute(waiting)) if gate is None else await gate.choose(tx, waiting, count)
    if not found:
        return []
    ids = sorted({row.task_id for row in found})
    query = select(tasks.c.task_id, tasks.c.body).where(tasks.c.task_id.in_(ids)).order_by(tasks.c.task_id)
    bodies = {row.task_id: row.body for row in await tx.execute(query.with_for_update())}
    taken = await tx.execute(
        update(sessions)
        .where(sessions.c.session_id.in_([row.session_id for row in found]), sessions.c.phase == Phase.WAITING)
        .values(phase=Phase.ACTIVE, epoch=epoch, node=node, updated=at)
        .returning(*sessions.c)
    )
    rows = sorted(taken, key=lambda row: (row.urgency, row.number, row.sample))
    damaged: list[str] = []
    begun = await tx.execute(
        update(tasks)
        .where(tasks.c.task_id.in_(ids), tasks.c.state == TaskState.QUEUED.value)
        .values(state=TaskState.RUNNING.value, updated=at, version=version, started=at)
        .returning(tasks.c.task_id)
    )
    told = [("task", {"task_id": name, "state": TaskState.RUNNING.value}) for name in begun.scalars()]
    await add_events(tx, told, at)
    claimed = []
    for row in rows:
        try:
            claimed.append(Claimed(session_of(row), bodies[row.task_id], row.deaths, row.company))
        except (KeyError, ValueError) as error:
            log.error("damaged: the row of session %s: %s", row.session_id, " ".join(str(error).split())[:300])
            damaged.append(row.session_id)
    if damaged:
        await set_aside(tx, damaged)
    return claimed


async def set_aside(tx: AsyncConnection, session_ids: Sequence[str]) -> None:
    """End sessions whose rows cannot be read; whatever else these hold stays."""
    table = tables.sessions
    values = {"phase": Phase.ENDED, "state": SessionState.FAILED, "failure": FailureReason.STORAGE.value}
    for some in chunks(session_ids):
        await tx.execute(update(table).where(table.c.session_id.in_(some)).values(**values, error="its row is damaged"))


async def write_steps(tx: AsyncConnection, steps: Sequence[Session], epoch: int, at: float) -> None:
    """Stages that sessions have come to. One that has ended since is left as it is."""
    table = tables.sessions
    changed = (
        update(table)
        .where(table.c.session_id == bindparam("id"), table.c.phase == Phase.ACTIVE.value, table.c.epoch == epoch)
        .values(state=bindparam("now"), end_reason=bindparam("why"), updated=bindparam("when"))
    )
    await tx.execute(
        changed,
        [{"id": one.session_id, "now": one.state.value, "why": one.end_reason, "when": one.updated} for one in steps],
    )
    await add_events(tx, [("session", step_event(one)) for one in steps], at)


def step_event(session: Session) -> dict[str, Any]:
    return row_event(session.__dict__)


async def waiting(store: Store) -> int:
    """How many sessions wait."""
    table = tables.sessions
    async with store.read() as tx:
        found = await tx.scalar(select(func.count()).select_from(table).where(table.c.phase == Phase.WAITING))
    return int(found or 0)


def session_of(row: Any) -> Session:
    """The session that a row tells of."""
    return Session(
        session_id=row.session_id,
        task_id=row.task_id,
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
