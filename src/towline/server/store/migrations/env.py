"""How alembic runs the steps: on the store's connection, inside its transaction."""

from __future__ import annotations

from alembic import context

from towline.server.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
