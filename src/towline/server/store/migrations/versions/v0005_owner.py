"""An owner on every row of users, the grace period of tasks, and the length of sessions.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

OWNED = ("tasks", "sessions", "results", "consumers", "leases", "events", "callbacks", "keys", "trash")


def upgrade() -> None:
    for table in OWNED:
        op.add_column(table, sa.Column("owner", sa.Text(), nullable=False, server_default=""))
    op.add_column("tasks", sa.Column("grace", sa.Float(), nullable=False, server_default="0"))
    op.add_column("tasks", sa.Column("grace_until", sa.Float(), nullable=True))
    op.add_column("tasks", sa.Column("stopped", sa.Float(), nullable=True))
    op.add_column("tasks", sa.Column("cut", sa.Integer(), nullable=False, server_default="0"))
    op.create_index(
        "tasks_in_grace",
        "tasks",
        ["grace_until"],
        unique=False,
        sqlite_where=sa.text("grace_until IS NOT NULL"),
        postgresql_where=sa.text("grace_until IS NOT NULL"),
    )
    op.add_column("sessions", sa.Column("turns", sa.Integer(), nullable=True))
    op.add_column("sessions", sa.Column("trained_tokens", sa.BigInteger(), nullable=True))
    op.add_column("sessions", sa.Column("seconds", sa.Float(), nullable=True))
