"""The tables of the store, the ids it generates, and the statements that many transactions share.

A session's row names its segment, the slice in it, and its hash. Two counters give `results.seq` and `events.seq`. The row
of a counter is locked from the moment a number is taken until the transaction ends, so numbers are committed in order and
without gaps: a reader that has read up to n never sees a number at or below n appear later. That is what lets a consumer be
one cursor and not a list.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Float,
    Index,
    Insert,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.common.text import slug
from towline.schema import Unit
from towline.schema.files import dump_json
from towline.server.store import names

metadata = MetaData()


def _owner() -> Column[str]:
    """The tenant that a row belongs to. A row without one belongs to nobody, and only an admin key finds it; an event
    without one is of the whole service, and every key sees it."""
    return Column("owner", Text, nullable=False, server_default="")


class Phase(IntEnum):
    """Where a session is for the scheduler."""

    WAITING = 0
    """In the queue."""
    ACTIVE = 1
    """Claimed by the server of its epoch."""
    ENDED = 2
    """Ended for good; a retry is another session."""


tasks = Table(
    "tasks",
    metadata,
    Column("task_id", String(512), primary_key=True),
    Column("number", BigInteger, nullable=False, unique=True),
    Column("digest", String(64), nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("state", String(16), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("num_samples", Integer, nullable=False),
    Column("required", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("max_staleness", Integer),
    Column("callback", Text),
    Column("finished", Integer, nullable=False),
    Column("usable", Integer, nullable=False),
    Column("grouped", Boolean, nullable=False),
    Column("created", Float, nullable=False),
    Column("updated", Float, nullable=False),
    Column("version", BigInteger),
    Column("started", Float),
    _owner(),
    Column("grace", Float, nullable=False, server_default="0"),
    Column("grace_until", Float),
    Column("stopped", Float),
    Column("cut", Integer, nullable=False, server_default="0"),
    Index("tasks_by_state", "state", "number"),
    Index("tasks_by_owner", "owner", "number"),
    Index("tasks_by_age", "updated"),
    Index(
        "tasks_in_grace",
        "grace_until",
        sqlite_where=text("grace_until IS NOT NULL"),
        postgresql_where=text("grace_until IS NOT NULL"),
    ),
)
"""`grouped`: the group result is published, and further samples do not count for it. `version` and `started`: the policy
version and the time when its first session was claimed. `grace`: the task's `grace_seconds`; `grace_until`: the deadline of
its remaining samples, set only while they have one; `stopped`: when they were stopped early; `cut`: how many ended so."""

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", String(128), primary_key=True),
    Column("task_id", String(512), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("sample", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("strikes", Integer, nullable=False),
    Column("latest", Boolean, nullable=False),
    Column("phase", SmallInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("urgency", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("end_reason", String(32)),
    Column("failure", String(16)),
    Column("stage", String(16)),
    Column("error", Text),
    Column("node", String(128), nullable=False),
    Column("segment", String(256)),
    Column("place", String(64)),
    Column("sha256", String(64)),
    Column("created", Float, nullable=False),
    Column("updated", Float, nullable=False),
    Column("deaths", Integer, nullable=False, server_default="0"),
    Column("company", Integer, nullable=False, server_default="0"),
    _owner(),
    Column("turns", Integer),
    Column("trained_tokens", BigInteger),
    Column("seconds", Float),
    Column("bytes", BigInteger),
    Index("sessions_by_task", "task_id", "sample", "attempt"),
    Index("sessions_in_order", "number", "sample", "attempt"),
    Index("sessions_by_owner", "owner", "number", "sample", "attempt"),
    Index(
        "sessions_by_failure",
        "failure",
        "number",
        "sample",
        "attempt",
        sqlite_where=text("failure IS NOT NULL"),
        postgresql_where=text("failure IS NOT NULL"),
    ),
    Index(
        "sessions_waiting",
        "owner",
        "urgency",
        "number",
        "sample",
        sqlite_where=text("phase = 0"),
        postgresql_where=text("phase = 0"),
    ),
    Index("sessions_by_segment", "segment"),
    Index("sessions_active", "epoch", sqlite_where=text("phase = 1"), postgresql_where=text("phase = 1")),
)
"""`number` is the task's; `urgency` its negated priority; `strikes` the earlier attempts that count against `max_attempts`;
`epoch` the server run that the session belongs to, and which alone may end it; `stage` the last one before the end;
`deaths` the node deaths at which the sample was running, and `company` how many sessions were running at the last one;
`turns`, `trained_tokens` and `seconds` (of its run) its length, known once it has ended at a node; `bytes` the size of its
stored trajectory."""

results = Table(
    "results",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("unit", String(8), nullable=False),
    Column("task_id", String(512), nullable=False),
    Column("session_id", String(128)),
    Column("body", LargeBinary),
    Column("usable", Boolean, nullable=False),
    Column("lowest_version", BigInteger),
    Column("max_staleness", Integer),
    Column("created", Float, nullable=False),
    _owner(),
    Index("results_by_unit", "unit", "seq"),
    Index("results_by_owner", "owner", "unit", "seq"),
    Index("results_by_task", "task_id", "seq"),
)
"""The row of a group has no body: its sessions are the usable earlier results of the task. It is usable if complete."""

consumers = Table(
    "consumers",
    metadata,
    Column("name", String(512), primary_key=True),
    Column("unit", String(8), primary_key=True),
    Column("cursor", BigInteger, nullable=False),
    Column("delivered", BigInteger, nullable=False),
    Column("acked", BigInteger, nullable=False),
    Column("dropped", BigInteger, nullable=False),
    Column("flagged", BigInteger, nullable=False),
    Column("created", Float, nullable=False),
    Column("seen", Float, nullable=False),
    Column("prefix", String(512), nullable=False, server_default=""),
    Column("groups_per_update", Integer),
    Column("max_staleness", Integer),
    Column("used_version", BigInteger, nullable=False, server_default="0"),
    Column("used", BigInteger, nullable=False, server_default="0"),
    _owner(),
)
"""A result at or below the cursor is finished, unless there is a lease for it. `prefix`: of the ids of the tasks that the
consumer follows. A consumer with `groups_per_update` paces admission to `max_staleness`; `used` counts the groups that it
has used under the policy version `used_version`."""

leases = Table(
    "leases",
    metadata,
    Column("consumer", String(512), primary_key=True),
    Column("unit", String(8), primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("until", Float, nullable=False),
    Column("delivery", Integer, nullable=False),
    _owner(),
    Index("leases_by_end", "consumer", "unit", "until"),
)
"""`until`: when the lease expires. `delivery`: how often the result was delivered; `WITHHELD` while pacing withholds it."""

WITHHELD = 0
"""`leases.delivery` of a result that a consumer's cursor has passed and that is not delivered yet."""

events = Table(
    "events",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("body", LargeBinary, nullable=False),
    _owner(),
    Index("events_by_owner", "owner", "seq"),
)

callbacks = Table(
    "callbacks",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("url", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("due", Float, nullable=False),
    _owner(),
    Index("callbacks_by_due", "due"),
)

keys = Table(
    "keys",
    metadata,
    Column("key_id", String(32), primary_key=True),
    Column("name", String(128), nullable=False),
    Column("roles", String(64), nullable=False),
    Column("digest", String(64), nullable=False, unique=True),
    Column("created", Float, nullable=False),
    _owner(),
)

tenants = Table(
    "tenants",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("weight", Float),
    Column("limits", Text, nullable=False, server_default="{}"),
    Column("created", Float, nullable=False),
)
"""Tenants with a key, or set by the operator. `weight` and `limits` (JSON) replace those of the settings."""

files = Table(
    "files",
    metadata,
    Column("owner", String(64), primary_key=True),
    Column("digest", String(64), primary_key=True),
    Column("bytes", BigInteger, nullable=False),
    Column("created", Float, nullable=False),
    Column("used", Float, nullable=False),
    Index("files_by_use", "used"),
    Index("files_by_digest", "digest"),
)
"""Uploaded files by the SHA-256 of their content. Each tenant has rows of its own: only who has uploaded a file has it.
`used`: when it was uploaded, or a task that names it was submitted."""

task_files = Table(
    "task_files",
    metadata,
    Column("task_id", String(512), primary_key=True),
    Column("digest", String(64), primary_key=True),
    Index("task_files_by_digest", "digest"),
)
"""The files that stored tasks name."""

trash = Table("trash", metadata, Column("segment", String(256), primary_key=True), _owner())
"""Segments whose rows are removed and whose files are to be."""

counters = Table(
    "counters",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", BigInteger, nullable=False),
)

meta = Table("meta", metadata, Column("name", String(32), primary_key=True), Column("value", Text, nullable=False))

COUNTERS = ("epoch", "tasks", "results", "events")


_RESULT = re.compile(r"(session|group)-([1-9][0-9]{0,17})-([0-9a-f]{8})")


def session_id(task_id: str, sample: int, attempt: int) -> str:
    """A fresh id that begins with the task's; no two attempts share one."""
    return f"{slug(names.plain(task_id))}-{sample}-{attempt}-{secrets.token_hex(4)}"


def result_id(unit: Unit | str, seq: int, token: str) -> str:
    """The permanent id of a result; the token of the store keeps results of two stores apart."""
    return f"{unit}-{seq}-{token}"


def parse_result_id(name: str, token: str) -> tuple[Unit, int] | None:
    """Unit and number of a result of this store; `None` for any other id."""
    found = _RESULT.fullmatch(name)
    return (Unit(found[1]), int(found[2])) if found and found[3] == token else None


def owned_by(table: Table, tenant: str | None) -> tuple[ColumnElement[bool], ...]:
    """The condition that rows belong to the tenant; none for an admin key that asks for the rows of all (`None`).

    Every query on behalf of a caller has it: a row of another tenant is not found, whatever id the caller sends.
    """
    return () if tenant is None else (table.c.owner == tenant,)


T = TypeVar("T")
CHUNK = 500
"""Maximum number of values in one `IN`."""


def chunks(values: Sequence[T]) -> list[Sequence[T]]:
    return [values[start : start + CHUNK] for start in range(0, len(values), CHUNK)]


def insert_new(tx: AsyncConnection, table: Table) -> Insert:
    """An insert that leaves existing rows alone."""
    made = sqlite.insert(table) if tx.dialect.name == "sqlite" else postgresql.insert(table)
    return made.on_conflict_do_nothing()


async def take_numbers(tx: AsyncConnection, counter: str, count: int = 1) -> int:
    """The last of `count` fresh numbers; the counter stays locked until the transaction ends."""
    grown = update(counters).where(counters.c.name == counter).values(value=counters.c.value + count)
    return int((await tx.execute(grown.returning(counters.c.value))).scalar_one())


NewEvent = tuple[str, str, dict[str, Any]]
"""The tenant that an event belongs to (`SERVICE`: none), its kind and its body."""
SERVICE = ""
"""The owner of events that concern the whole service; every key sees them."""


async def add_events(tx: AsyncConnection, new: Sequence[NewEvent], at: float) -> None:
    """Write events; the last thing in a transaction, since all transactions share the counter."""
    if not new:
        return
    first = await take_numbers(tx, "events", len(new)) - len(new) + 1
    rows = [
        {"seq": seq, "at": at, "kind": kind, "body": dump_json(body), "owner": owner}
        for seq, (owner, kind, body) in enumerate(new, first)
    ]
    await tx.execute(insert(events), rows)


async def get_meta(tx: AsyncConnection, name: str) -> str | None:
    found = await tx.scalar(select(meta.c.value).where(meta.c.name == name))
    return None if found is None else str(found)


async def put_meta(tx: AsyncConnection, name: str, value: str) -> None:
    await tx.execute(insert_new(tx, meta).values(name=name, value=value))
    await tx.execute(update(meta).where(meta.c.name == name).values(value=value))
