"""The note, tags and group of a run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the three columns; they are empty for existing runs."""
    op.add_column("runs", sa.Column("note", sa.Text(), nullable=False, server_default='""'))
    op.add_column("runs", sa.Column("tags", sa.Text(), nullable=False, server_default="[]"))
    op.add_column("runs", sa.Column("run_group", sa.Text(), nullable=False, server_default='""'))
