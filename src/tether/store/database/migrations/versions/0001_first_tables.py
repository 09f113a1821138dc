"""The first tables: runs, lineage, steps, metrics, rollouts, events."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("workspace", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("uid", sa.Text, nullable=False),
        sa.Column("method", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("updated", sa.Double, nullable=False),
        sa.Column("steps_target", sa.Integer, nullable=False),
        sa.Column("steps_done", sa.Integer, nullable=False),
        sa.Column("config", sa.Text, nullable=False),
        sa.Column("environment", sa.Text, nullable=False),
        sa.UniqueConstraint("workspace", "name"),
    )
    op.create_table(
        "lineage",
        _run_id(),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("source_run_id", sa.Integer, sa.ForeignKey("runs.id", ondelete="SET NULL"), index=True),
        sa.Column("sha256", sa.Text),
    )
    op.create_table(
        "steps",
        _run_id(),
        sa.Column("step", sa.Integer, primary_key=True),
        sa.Column("recorded", sa.Double, nullable=False),
    )
    op.create_table(
        "metrics",
        sa.Column("run_id", sa.Integer, primary_key=True),
        sa.Column("step", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.Double),
        _of_a_step(),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "rollouts",
        sa.Column("run_id", sa.Integer, primary_key=True),
        sa.Column("step", sa.Integer, primary_key=True),
        sa.Column("place", sa.Integer, primary_key=True),
        sa.Column("group_id", sa.BigInteger, nullable=False),
        sa.Column("sample_id", sa.BigInteger, nullable=False),
        sa.Column("finish", sa.Text, nullable=False),
        sa.Column("score", sa.Double),
        sa.Column("tokens", sa.Integer, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        _of_a_step(),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.Integer, sa.ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
        sa.Column("uid", sa.Text, nullable=False, unique=True),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("step", sa.Integer),
        sa.Column("data", sa.Text, nullable=False),
    )
    op.create_index("events_of_a_run", "events", ["run_id", "time"])


def _run_id() -> sa.Column[int]:
    return sa.Column("run_id", sa.Integer, sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)


def _of_a_step() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["run_id", "step"], ["steps.run_id", "steps.step"], ondelete="CASCADE")
