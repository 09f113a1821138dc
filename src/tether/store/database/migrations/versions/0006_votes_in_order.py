"""An index of a rater's votes in the order they were stored, not by time."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Replace the index."""
    op.drop_index("votes_of_a_rater", "votes")
    op.create_index("votes_of_a_rater", "votes", ["rater_id", "id"])
