"""Run by alembic: applies the missing migrations over the connection that `tether.store.database.open` opens."""

from __future__ import annotations

from alembic import context

from tether.store.database.schema import tables

context.configure(connection=context.config.attributes["connection"], target_metadata=tables, render_as_batch=True)
context.run_migrations()
