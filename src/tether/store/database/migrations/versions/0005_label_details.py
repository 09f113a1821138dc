"""Details of a vote, gold items, assignments of items to raters, and excluded annotators."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the columns and the table; existing rows stay as they are."""
    op.add_column("votes", sa.Column("comment", sa.Text))
    op.add_column("votes", sa.Column("ratings", sa.Text))
    op.add_column("items", sa.Column("gold", sa.Text))
    op.add_column("raters", sa.Column("excluded", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_table(
        "assignments",
        sa.Column("item_id", sa.Integer, sa.ForeignKey("items.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("rater_id", sa.Integer, sa.ForeignKey("raters.id", ondelete="CASCADE"), primary_key=True),
    )
    op.create_index("assignments_of_a_rater", "assignments", ["rater_id"])
