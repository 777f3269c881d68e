"""The first schema.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "callbacks",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("due", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("callbacks_by_due", "callbacks", ["due"], unique=False)
    op.create_table(
        "consumers",
        sa.Column("name", sa.String(length=512), nullable=False),
        sa.Column("unit", sa.String(length=8), nullable=False),
        sa.Column("cursor", sa.BigInteger(), nullable=False),
        sa.Column("delivered", sa.BigInteger(), nullable=False),
        sa.Column("acked", sa.BigInteger(), nullable=False),
        sa.Column("dropped", sa.BigInteger(), nullable=False),
        sa.Column("flagged", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("seen", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", "unit"),
    )
    op.create_table(
        "counters",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "events",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_table(
        "keys",
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("roles", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("key_id"),
        sa.UniqueConstraint("digest"),
    )
    op.create_table(
        "leases",
        sa.Column("consumer", sa.String(length=512), nullable=False),
        sa.Column("unit", sa.String(length=8), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("until", sa.Float(), nullable=False),
        sa.Column("delivery", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("consumer", "unit", "seq"),
    )
    op.create_index("leases_by_end", "leases", ["consumer", "unit", "until"], unique=False)
    op.create_table(
        "meta",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "results",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("unit", sa.String(length=8), nullable=False),
        sa.Column("task_id", sa.String(length=512), nullable=False),
        sa.Column("session_id", sa.String(length=128), nullable=True),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("usable", sa.Boolean(), nullable=False),
        sa.Column("lowest_version", sa.BigInteger(), nullable=True),
        sa.Column("max_staleness", sa.Integer(), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("results_by_task", "results", ["task_id", "seq"], unique=False)
    op.create_index("results_by_unit", "results", ["unit", "seq"], unique=False)
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.Column("task_id", sa.String(length=512), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("sample", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("strikes", sa.Integer(), nullable=False),
        sa.Column("latest", sa.Boolean(), nullable=False),
        sa.Column("phase", sa.SmallInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("urgency", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("end_reason", sa.String(length=32), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("node", sa.String(length=128), nullable=False),
        sa.Column("segment", sa.String(length=256), nullable=True),
        sa.Column("place", sa.String(length=64), nullable=True),
        sa.Column("sha256", sa.String(length=64), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("updated", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("session_id"),
    )
    op.create_index(
        "sessions_active",
        "sessions",
        ["epoch"],
        unique=False,
        sqlite_where=sa.text("phase = 1"),
        postgresql_where=sa.text("phase = 1"),
    )
    op.create_index("sessions_by_segment", "sessions", ["segment"], unique=False)
    op.create_index("sessions_by_task", "sessions", ["task_id", "sample", "attempt"], unique=False)
    op.create_index(
        "sessions_waiting",
        "sessions",
        ["urgency", "number", "sample"],
        unique=False,
        sqlite_where=sa.text("phase = 0"),
        postgresql_where=sa.text("phase = 0"),
    )
    op.create_table(
        "tasks",
        sa.Column("task_id", sa.String(length=512), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("num_samples", sa.Integer(), nullable=False),
        sa.Column("required", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("max_staleness", sa.Integer(), nullable=True),
        sa.Column("callback", sa.Text(), nullable=True),
        sa.Column("finished", sa.Integer(), nullable=False),
        sa.Column("usable", sa.Integer(), nullable=False),
        sa.Column("grouped", sa.Boolean(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("updated", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("task_id"),
        sa.UniqueConstraint("number"),
    )
    op.create_index("tasks_by_age", "tasks", ["updated"], unique=False)
    op.create_index("tasks_by_state", "tasks", ["state", "number"], unique=False)
    op.create_table(
        "trash", sa.Column("segment", sa.String(length=256), nullable=False), sa.PrimaryKeyConstraint("segment")
    )
