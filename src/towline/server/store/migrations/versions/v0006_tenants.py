"""Tenants: their weights and limits, and an owner on every row that users see.

Rows of earlier versions belong to the tenant `default`. Events of the whole service (the policy, circuit breakers) keep the
empty owner.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

OWNED = ("tasks", "sessions", "results", "consumers", "leases", "callbacks", "keys", "trash")


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("weight", sa.Float(), nullable=True),
        sa.Column("limits", sa.Text(), nullable=False, server_default="{}"),
        sa.Column("created", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    for table in OWNED:
        op.execute(sa.text(f"UPDATE {table} SET owner = 'default' WHERE owner = ''"))
    op.execute(sa.text("UPDATE events SET owner = 'default' WHERE owner = '' AND kind NOT IN ('policy', 'breaker')"))
    op.create_index("tasks_by_owner", "tasks", ["owner", "number"], unique=False)
    op.create_index("sessions_by_owner", "sessions", ["owner", "number", "sample", "attempt"], unique=False)
    op.create_index("results_by_owner", "results", ["owner", "unit", "seq"], unique=False)
    op.create_index("events_by_owner", "events", ["owner", "seq"], unique=False)
    op.drop_index("sessions_waiting", table_name="sessions")
    op.create_index(
        "sessions_waiting",
        "sessions",
        ["owner", "urgency", "number", "sample"],
        unique=False,
        sqlite_where=sa.text("phase = 0"),
        postgresql_where=sa.text("phase = 0"),
    )
