"""Brings the schema of a store up to date, step by step, inside one transaction."""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import text
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.server.errors import StoreError

_SCRIPTS = "towline.server:migrations"


async def migrate(tx: AsyncConnection, *, lock: int | None) -> None:
    """Apply the steps that are missing. On PostgreSQL the advisory lock keeps a second server from doing the same."""
    if lock is not None:
        await tx.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": lock})
    await tx.run_sync(_upgrade)


def _upgrade(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", _SCRIPTS)
    config.attributes["connection"] = connection
    newest = ScriptDirectory.from_config(config).get_current_head()
    if MigrationContext.configure(connection).get_current_revision() == newest:
        return
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise StoreError(f"this store was written by a newer Towline; start that one: {error}") from error
