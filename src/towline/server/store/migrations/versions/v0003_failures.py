"""Why sessions failed, and at how many node deaths they were running.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sessions", sa.Column("failure", sa.String(length=16), nullable=True))
    op.add_column("sessions", sa.Column("stage", sa.String(length=16), nullable=True))
    op.add_column("sessions", sa.Column("deaths", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("sessions", sa.Column("company", sa.Integer(), nullable=False, server_default="0"))
    op.create_index("sessions_in_order", "sessions", ["number", "sample", "attempt"], unique=False)
    op.create_index(
        "sessions_by_failure",
        "sessions",
        ["failure", "number", "sample", "attempt"],
        unique=False,
        sqlite_where=sa.text("failure IS NOT NULL"),
        postgresql_where=sa.text("failure IS NOT NULL"),
    )
