"""The tables of the store. Trajectories are not in them: a session's row names its segment, the place in it, and its hash.

Two counters give `results.seq` and `events.seq`. The row of a counter is locked from the moment a number is taken until
the transaction ends, so numbers are committed in their own order and without gaps: whoever has read up to n will never
see a number at or below n appear later. That is what lets a consumer be one cursor and not a list.
"""

from __future__ import annotations

from enum import IntEnum

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    text,
)

metadata = MetaData()


class Phase(IntEnum):
    """Where a session is for the scheduler."""

    WAITING = 0
    ACTIVE = 1
    ENDED = 2


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
    Index("tasks_by_state", "state", "number"),
    Index("tasks_by_age", "updated"),
)
"""`grouped`: the group's result is published, and no sample counts for it any more. `version` and `started`: the policy
version and the time when its first session was taken from the queue."""

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
    Index("sessions_by_task", "task_id", "sample", "attempt"),
    Index("sessions_in_order", "number", "sample", "attempt"),
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
        "urgency",
        "number",
        "sample",
        sqlite_where=text("phase = 0"),
        postgresql_where=text("phase = 0"),
    ),
    Index("sessions_by_segment", "segment"),
    Index("sessions_active", "epoch", sqlite_where=text("phase = 1"), postgresql_where=text("phase = 1")),
)
"""`number` is the task's; `urgency` its priority, least first; `strikes` the attempts before this one that count against
`max_attempts`; `epoch` the run of the server that the session belongs to, without which nobody may end it; `stage` the
last one before the end; `deaths` the node deaths at which the sample was running, and `company` how many sessions were
running at the last of them."""

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
    Index("results_by_unit", "unit", "seq"),
    Index("results_by_task", "task_id", "seq"),
)
"""A group's row has no body: its sessions are the usable results of the task before it. It is usable if complete."""

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
)
"""A result at or below the cursor is done with, unless there is a lease for it. `prefix` is how the ids of those tasks begin
that the consumer follows. A consumer with `groups_per_update` paces admission to `max_staleness`; `used` counts the groups
that it has used under the policy version `used_version`."""

leases = Table(
    "leases",
    metadata,
    Column("consumer", String(512), primary_key=True),
    Column("unit", String(8), primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("until", Float, nullable=False),
    Column("delivery", Integer, nullable=False),
    Index("leases_by_end", "consumer", "unit", "until"),
)
"""`delivery` 0: the consumer's cursor has passed the result, and it was not handed out yet (pacing)."""

events = Table(
    "events",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("body", LargeBinary, nullable=False),
)

callbacks = Table(
    "callbacks",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("url", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("due", Float, nullable=False),
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
)

trash = Table("trash", metadata, Column("segment", String(256), primary_key=True))
"""Segments whose rows are gone and whose files are to go."""

counters = Table(
    "counters",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", BigInteger, nullable=False),
)

meta = Table("meta", metadata, Column("name", String(32), primary_key=True), Column("value", Text, nullable=False))

COUNTERS = ("epoch", "tasks", "results", "events")
