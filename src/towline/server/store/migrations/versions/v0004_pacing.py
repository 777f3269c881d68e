"""Pacing: what consumers declare and have used, and the policy version that a task's first session started under.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tasks", sa.Column("version", sa.BigInteger(), nullable=True))
    op.add_column("tasks", sa.Column("started", sa.Float(), nullable=True))
    op.add_column("consumers", sa.Column("groups_per_update", sa.Integer(), nullable=True))
    op.add_column("consumers", sa.Column("max_staleness", sa.Integer(), nullable=True))
    op.add_column("consumers", sa.Column("used_version", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("consumers", sa.Column("used", sa.BigInteger(), nullable=False, server_default="0"))
