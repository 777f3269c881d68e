"""The queue: tasks are validated and stored, sessions are claimed for a node.

The queue is the index `sessions_waiting` and nothing in memory: a waiting session costs one row, and claiming the next
costs the same however many wait behind it. Free slots are shared fairly between tenants (`fairness`); priorities order the
sessions of one. `admit` rejects everything that can be known to be wrong before anything runs, with the field at fault.
What an untrusted task may name is decided in `task_trust.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import Row, bindparam, func, insert, literal_column, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.cluster.runner import InvalidTask, Runner
from towline.common.crashpoints import crash_point
from towline.common.text import one_line
from towline.config import ServerSettings
from towline.config.tenants import TenantLimits
from towline.schema import DEFAULT_TENANT, Accepted, FailureReason, Session, SessionState, Task, TaskState
from towline.schema.entities import digest_values
from towline.schema.files import dump_json
from towline.schema.trust import RootRegistry
from towline.server import quotas
from towline.server.delivery.callbacks import check_callback
from towline.server.errors import InvalidInput, QueueFull, ResourceConflict
from towline.server.pacing.pacer import PaceGate
from towline.server.scheduling.ending import session_event, waiting_row
from towline.server.scheduling.fairness import FairShare
from towline.server.scheduling.task_trust import admitted
from towline.server.store import names, tables
from towline.server.store.database import Store
from towline.server.store.queries import session_of
from towline.server.store.tables import NewEvent, Phase, add_events, chunks, take_numbers

log = logging.getLogger("towline.server")

LARGEST = 2**31 - 1
"""Largest integer in a column of a task."""


# Submitting


@dataclass(slots=True)
class SerializedTask:
    """A task as it is stored."""

    task: Task
    body: bytes
    digest: str
    field: str
    """Path of the task in the request: empty, or `[3]`."""
    tenant: str = DEFAULT_TENANT

    @property
    def key(self) -> str:
        """The id under which it is stored."""
        return names.qualify(self.tenant, self.task.task_id)


def serialize_task(task: Task, field: str = "", tenant: str = DEFAULT_TENANT) -> SerializedTask:
    """Serialize a task; raises `InvalidInput` for values that a database cannot hold."""
    for name in ("num_samples", "max_attempts", "priority", "max_staleness"):
        value = getattr(task, name)
        if value is not None and abs(value) > LARGEST:
            raise InvalidInput(f"must be at most {LARGEST}", field=f"{field}.{name}".lstrip("."))
    values = task.model_dump(mode="python")
    known = digest_values(values)
    try:
        canonical = orjson.dumps(known, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        # Integers beyond 64 bits and lone surrogates need the slower encoder.
        canonical = json.dumps(known, sort_keys=True, separators=(",", ":")).encode()
    return SerializedTask(task, dump_json(values), hashlib.sha256(canonical).hexdigest(), field, tenant)


async def accept(store: Store, tasks: Sequence[SerializedTask], *, room: int, at: float) -> tuple[list[Accepted], int]:
    """Store the new tasks, all or none; returns one answer per task and the number of added sessions."""
    async with store.write() as tx:
        # The counter serializes submissions: what follows sees every stored task.
        last = await take_numbers(tx, "tasks", len(tasks))
        known = await _digests(tx, [one.key for one in tasks])
        fresh: list[SerializedTask] = []
        answers: list[Accepted] = []
        for one in tasks:
            task = one.task
            found = known.get(one.key)
            if found is not None and found != one.digest:
                where = f"{one.field}.task_id".lstrip(".")
                raise ResourceConflict(
                    f"another task has the id {task.task_id!r}: use a different task_id", field=where
                )
            if found is None:
                fresh.append(one)
                known[one.key] = one.digest
            answers.append(Accepted(task_id=task.task_id, created=found is None, sessions=task.num_samples))
        wanted = sum(one.task.num_samples for one in fresh)
        if wanted > room:
            raise QueueFull(f"the queue has room for {max(0, room)} sessions, but {wanted} are needed: retry later")
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


async def _insert(tx: AsyncConnection, fresh: Sequence[SerializedTask], first: int, at: float) -> None:
    task_rows: list[dict[str, Any]] = []
    session_rows: list[dict[str, Any]] = []
    for number, one in enumerate(fresh, first):
        task = one.task
        task_rows.append(
            {
                "task_id": one.key,
                "owner": one.tenant,
                "number": number,
                "digest": one.digest,
                "body": one.body,
                "state": TaskState.QUEUED.value,
                "priority": task.priority,
                "num_samples": task.num_samples,
                "required": task.required_samples,
                "grace": task.grace_seconds,
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
        session_rows += [waiting_row(one.key, number, task.priority, sample, at) for sample in range(task.num_samples)]
    await tx.execute(insert(tables.tasks), task_rows)
    for some in chunks(session_rows):
        await tx.execute(insert(tables.sessions), list(some))
    events = [(one.tenant, "task", {"task_id": one.task.task_id, "state": TaskState.QUEUED.value}) for one in fresh]
    await add_events(tx, events, at)


# Scheduling


@dataclass(slots=True)
class ClaimedSession:
    """A session that this server may run."""

    session: Session
    key: str
    """The stored id of its task."""
    body: bytes
    """The stored task."""
    deaths: int
    """Node deaths at which its sample was running."""
    company: int
    """Sessions that were running at the last of them."""


async def suspects(tx: AsyncConnection, deaths: int) -> list[int]:
    """For each waiting session with this many node deaths: how many sessions were running at the last one."""
    table = tables.sessions
    query = select(table.c.company).where(table.c.phase == Phase.WAITING, table.c.deaths >= deaths)
    return list((await tx.execute(query)).scalars())


async def waiting_tenants(tx: AsyncConnection) -> list[str]:
    """The tenants with waiting sessions: one step in the index per tenant, however many sessions wait."""
    table = tables.sessions
    waits = table.c.phase == literal_column(str(int(Phase.WAITING)))
    first = select(func.min(table.c.owner).label("owner")).where(waits)
    found = first.cte("found", recursive=True)
    following = select(func.min(table.c.owner)).where(waits, table.c.owner > found.c.owner).scalar_subquery()
    found = found.union_all(select(following).where(found.c.owner.is_not(None)))
    return list((await tx.execute(select(found.c.owner).where(found.c.owner.is_not(None)))).scalars())


async def _choose(
    tx: AsyncConnection, count: int, share: FairShare, gate: PaceGate | None, deaths: int
) -> list[Row[Any]]:
    """Waiting sessions: as many of each tenant as its fair share of the slots, of each tenant the most urgent ones."""
    sessions = tables.sessions
    waiting = (
        select(sessions.c.session_id, sessions.c.task_id)
        .where(sessions.c.phase == Phase.WAITING)
        .order_by(sessions.c.urgency, sessions.c.number, sessions.c.sample)
    )
    if deaths:
        waiting = waiting.where(sessions.c.deaths >= deaths)
    chosen: dict[str, list[Row[Any]]] = {tenant: [] for tenant in await waiting_tenants(tx)}
    left, open_ = count, set(chosen)
    while left > 0 and open_:
        given = {tenant: len(rows) for tenant, rows in chosen.items()}
        for tenant, wanted in share.divide(left, open_, given).items():
            own = waiting.where(sessions.c.owner == tenant).limit(wanted)
            if chosen[tenant]:
                own = own.where(sessions.c.session_id.not_in([row.session_id for row in chosen[tenant]]))
            rows: list[Row[Any]] = (
                list(await tx.execute(own)) if gate is None else await gate.choose(tx, own, wanted, tenant)
            )
            chosen[tenant] += rows
            left -= len(rows)
            if len(rows) < wanted:
                open_.discard(tenant)
    return [row for rows in chosen.values() for row in rows]


async def claim(
    tx: AsyncConnection,
    count: int,
    *,
    epoch: int,
    node: str,
    at: float,
    version: int,
    share: FairShare,
    gate: PaceGate | None = None,
    deaths: int = 0,
) -> list[ClaimedSession]:
    """Claim waiting sessions that the gate admits: the most urgent ones of each tenant, as many as is its share.

    `version`: the policy version, recorded with new groups. With `deaths`, only sessions with at least that many node
    deaths.
    """
    sessions, tasks = tables.sessions, tables.tasks
    # Tasks are locked before sessions, as everywhere; a session claimed or ended in between is skipped below.
    found = await _choose(tx, count, share, gate, deaths)
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
    events: list[NewEvent] = [
        (names.tenant_of(key), "task", {"task_id": names.plain(key), "state": TaskState.RUNNING.value})
        for key in begun.scalars()
    ]
    await add_events(tx, events, at)
    claimed = []
    for row in rows:
        try:
            claimed.append(ClaimedSession(session_of(row), row.task_id, bodies[row.task_id], row.deaths, row.company))
        except (KeyError, ValueError) as error:
            log.error("damaged: row of session %s: %s", row.session_id, one_line(error))
            damaged.append(row.session_id)
    if damaged:
        await set_aside(tx, damaged)
    return claimed


async def take_over(tx: AsyncConnection, session_ids: Sequence[str], *, epoch: int) -> list[ClaimedSession]:
    """Make active sessions of an earlier server this one's: from here on only this epoch can end them."""
    table, claimed = tables.sessions, []
    for some in chunks(session_ids):
        mine = (
            update(table)
            .where(table.c.session_id.in_(some), table.c.phase == Phase.ACTIVE, table.c.epoch < epoch)
            .values(epoch=epoch)
            .returning(*table.c)
        )
        claimed += [
            ClaimedSession(session_of(row), row.task_id, b"", row.deaths, row.company) for row in await tx.execute(mine)
        ]
    return claimed


async def set_aside(tx: AsyncConnection, session_ids: Sequence[str]) -> None:
    """End sessions whose rows cannot be read, leaving the other columns as they are."""
    table = tables.sessions
    values = {"phase": Phase.ENDED, "state": SessionState.FAILED, "failure": FailureReason.STORAGE.value}
    for some in chunks(session_ids):
        await tx.execute(update(table).where(table.c.session_id.in_(some)).values(**values, error="its row is damaged"))


async def write_steps(tx: AsyncConnection, steps: Sequence[Session], epoch: int, at: float) -> None:
    """Write the stages that sessions reached; sessions that have ended since are skipped."""
    table = tables.sessions
    changed = (
        update(table)
        .where(table.c.session_id == bindparam("id"), table.c.phase == Phase.ACTIVE.value, table.c.epoch == epoch)
        .values(state=bindparam("now"), end_reason=bindparam("why"), updated=bindparam("when"), node=bindparam("where"))
    )
    await tx.execute(
        changed,
        [
            {
                "id": one.session_id,
                "now": one.state.value,
                "why": one.end_reason,
                "when": one.updated,
                "where": one.node,
            }
            for one in steps
        ],
    )
    await add_events(tx, [step_event(one) for one in steps], at)


def step_event(session: Session) -> NewEvent:
    return session_event(session.__dict__, session.tenant)


async def count_waiting(store: Store) -> Counter[str]:
    """The number of waiting sessions of each tenant."""
    table = tables.sessions
    counted = select(table.c.owner, func.count().label("waiting")).where(table.c.phase == Phase.WAITING)
    async with store.read() as tx:
        return Counter({row.owner: row.waiting for row in await tx.execute(counted.group_by(table.c.owner))})


async def admit(
    task: Task,
    field: str,
    *,
    runner: Runner,
    settings: ServerSettings,
    trusted: bool,
    registry: RootRegistry | None = None,
    tenant: str = DEFAULT_TENANT,
    limits: TenantLimits | None = None,
) -> SerializedTask:
    """Validate a task that a tenant submits; returns it serialized. Raises `InvalidInput` or `Forbidden`."""

    def at(name: str) -> str:
        return f"{field}.{name}".lstrip(".")

    if task.num_samples > settings.queue:
        raise InvalidInput(f"{task.num_samples} exceeds the queue limit of {settings.queue}", field=at("num_samples"))
    if not task.task_id.strip("/") or task.task_id != task.task_id.strip():
        raise InvalidInput("must not be blank, or start or end with a space", field=at("task_id"))
    if task.callback is not None:
        check_callback(task.callback, settings.callback_hosts, at("callback"))
    task = admitted(
        task,
        field,
        trusted=trusted,
        settings=settings,
        registry=registry or RootRegistry(),
        default_sandbox=runner.default_sandbox,
    )
    one = serialize_task(task, field, tenant)
    names.check_length(one.key, at("task_id"))
    if limits is not None:
        quotas.check_task(task, len(one.body), limits, at)
    try:
        await runner.check(task)
    except InvalidTask as error:
        raise InvalidInput(str(error), field=at(error.field)) from error
    return one
