"""What alembic runs: the changes that are missing, over the connection that `tether.runs.store.migrate` gives it."""

from __future__ import annotations

from alembic import context

from tether.runs.store.schema import tables

context.configure(connection=context.config.attributes["connection"], target_metadata=tables, render_as_batch=True)
context.run_migrations()
