"""Schema migrations: one step per version, applied by `migrate` inside one transaction."""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import text
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.errors import StoreError

_SCRIPTS = "towline.server.store:migrations"


async def migrate(tx: AsyncConnection, *, lock: int | None) -> None:
    """Apply the missing steps. On PostgreSQL the advisory lock keeps a second server from doing the same."""
    if lock is not None:
        await tx.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": lock})
    await tx.run_sync(upgrade)


def upgrade(connection: Connection, to: str = "") -> None:
    """Apply the missing steps up to a revision, by default the newest."""
    config = _config()
    config.attributes["connection"] = connection
    newest = ScriptDirectory.from_config(config).get_current_head()
    if MigrationContext.configure(connection).get_current_revision() == newest:
        return
    try:
        command.upgrade(config, to or "head")
    except CommandError as error:
        raise StoreError(f"this store was written by a newer Towline; use that version: {error}") from error


def revisions() -> list[str]:
    """Every revision of the schema, newest first."""
    return [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()]


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", _SCRIPTS)
    return config
