"""Uploaded files, and the size of stored trajectories.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sessions", sa.Column("bytes", sa.BigInteger(), nullable=True))
    op.create_table(
        "files",
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("used", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "digest"),
    )
    op.create_index("files_by_use", "files", ["used"], unique=False)
    op.create_index("files_by_digest", "files", ["digest"], unique=False)
    op.create_table(
        "task_files",
        sa.Column("task_id", sa.String(length=512), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("task_id", "digest"),
    )
    op.create_index("task_files_by_digest", "task_files", ["digest"], unique=False)
