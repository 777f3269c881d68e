"""How alembic runs the steps: on the connection that the store gives, inside the store's own transaction."""

from __future__ import annotations

from alembic import context

from towline.server.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
