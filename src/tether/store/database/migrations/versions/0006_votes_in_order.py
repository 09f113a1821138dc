"""The votes of a rater in the order in which they were kept, instead of by the clock."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Exchange the index; what is there stays as it is."""
    op.drop_index("votes_of_a_rater", "votes")
    op.create_index("votes_of_a_rater", "votes", ["rater_id", "id"])
