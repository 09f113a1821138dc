"""Tables for labels: queues, raters, items, votes, and an audit of every change."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the tables."""
    _queues_and_raters()
    op.create_table(
        "items",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("queue_id", sa.Integer, sa.ForeignKey("queues.id", ondelete="CASCADE"), nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("prompt", sa.Text, nullable=False),
        sa.Column("answers", sa.Text, nullable=False),
        sa.Column("meta", sa.Text, nullable=False),
        sa.Column("repeat_of", sa.Integer, sa.ForeignKey("items.id", ondelete="CASCADE"), index=True),
        sa.Column("priority", sa.Double, nullable=False),
    )
    op.create_index("items_of_a_queue", "items", ["queue_id", "priority"])
    op.create_table(
        "votes",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("client_uid", sa.Text, nullable=False, unique=True),
        sa.Column("item_id", sa.Integer, sa.ForeignKey("items.id", ondelete="CASCADE"), nullable=False),
        sa.Column("rater_id", sa.Integer, sa.ForeignKey("raters.id", ondelete="CASCADE"), nullable=False),
        sa.Column("order", sa.Text, nullable=False),
        sa.Column("choice", sa.Text, nullable=False),
        sa.Column("seconds", sa.Double),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("undone", sa.Boolean, nullable=False),
    )
    op.create_index("votes_of_a_rater", "votes", ["rater_id", "created"])
    standing = sa.column("undone", sa.Boolean) == sa.false()
    op.create_index(
        "one_vote_a_rater_and_item",
        "votes",
        ["item_id", "rater_id"],
        unique=True,
        sqlite_where=standing,
        postgresql_where=standing,
    )
    op.create_table(
        "label_audits",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("workspace", sa.Text, nullable=False),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("rater_id", sa.Integer, sa.ForeignKey("raters.id", ondelete="SET NULL"), index=True),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("subject", sa.Integer),
        sa.Column("data", sa.Text, nullable=False),
    )
    op.create_index("audits_by_time", "label_audits", ["workspace", "time"])


def _queues_and_raters() -> None:
    op.create_table(
        "queues",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("workspace", sa.Text, nullable=False, index=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("guidelines", sa.Text, nullable=False),
        sa.Column("meta", sa.Text, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("open", sa.Boolean, nullable=False),
    )
    op.create_table(
        "raters",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("workspace", sa.Text, nullable=False, index=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("token_hash", sa.Text, unique=True),
        sa.Column("queue_id", sa.Integer, sa.ForeignKey("queues.id", ondelete="CASCADE"), index=True),
        sa.Column("created", sa.Double, nullable=False),
    )
