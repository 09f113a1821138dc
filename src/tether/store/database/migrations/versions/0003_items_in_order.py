"""The items of a queue in the order in which they are asked, so that the next one is found without sorting them all."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make the index that has the order, in place of the one that has not."""
    op.drop_index("items_of_a_queue", "items")
    op.create_index("items_in_order", "items", ["queue_id", sa.text("priority DESC"), "id"])
