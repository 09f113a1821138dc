"""An index of a queue's items in the order they are asked, so that the next one is found without sorting."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Replace the index by an ordered one."""
    op.drop_index("items_of_a_queue", "items")
    op.create_index("items_in_order", "items", ["queue_id", sa.text("priority DESC"), "id"])
