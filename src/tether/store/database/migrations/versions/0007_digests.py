"""A digest for each important row, so that a flipped bit is detected, and the number of rollouts that a step keeps.

Existing rows get the digest of their current values. Existing rollouts get none: they are most of a store, and reading
and writing all of them would take as long as copying the file.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import sqlalchemy as sa
from alembic import op

from tether.store.database.schema import COVERED, row_digest, step_digest

revision = "0007"
down_revision = "0006"

TABLES = ("runs", "lineage", "steps", "rollouts", "events", "items", "votes")
KEYS = {"runs": ("id",), "lineage": ("run_id", "position"), "events": ("id",), "items": ("id",), "votes": ("id",)}
TYPES = {"text": sa.Text, "json": sa.Text, "number": sa.Double, "count": sa.BigInteger}


def upgrade() -> None:
    """Add the columns and fill them."""
    for name in TABLES:
        op.add_column(name, sa.Column("digest", sa.Text))
    op.add_column("steps", sa.Column("rollouts", sa.Integer))
    connection = op.get_bind()
    for name, keys in KEYS.items():
        _fill_rows(connection, name, keys)
    _fill_steps(connection)


def _fill_rows(connection: Any, name: str, keys: tuple[str, ...]) -> None:
    columns = {column: sa.column(column, TYPES[kind]()) for column, kind in COVERED[name].items()}
    columns |= {key: sa.column(key, sa.Integer) for key in keys}
    table = sa.table(name, sa.column("digest", sa.Text), *columns.values())
    rows = connection.execute(sa.select(*columns.values())).mappings().all()
    put = sa.update(table).where(*(columns[key] == sa.bindparam(f"at_{key}") for key in keys))
    put = put.values(digest=sa.bindparam("found"))
    given = [
        {f"at_{key}": row[key] for key in keys} | {"found": row_digest(name, _parsed(COVERED[name], row))}
        for row in rows
    ]
    if given:
        connection.execute(put, given)


def _parsed(kinds: dict[str, str], row: Any) -> dict[str, Any]:
    def value(name: str) -> Any:
        found = row[name]
        return json.loads(found) if kinds[name] == "json" and found is not None else found

    return {name: value(name) for name in kinds}


def _place() -> tuple[Any, Any]:
    return sa.column("run_id", sa.Integer), sa.column("step", sa.Integer)


def _fill_steps(connection: Any) -> None:
    steps = sa.table("steps", *_place(), sa.column("digest", sa.Text), sa.column("rollouts", sa.Integer))
    metrics = sa.table("metrics", *_place(), sa.column("name", sa.Text), sa.column("value", sa.Double))
    measured = sa.select(metrics).order_by(metrics.c.run_id, metrics.c.step)
    said: dict[tuple[int, int], str] = {}
    for key, rows in groupby(connection.execute(measured), lambda row: (row.run_id, row.step)):
        said[key] = step_digest(key[1], {row.name: row.value for row in rows})
    kept = sa.table("rollouts", *_place())
    counted = sa.select(kept.c.run_id, kept.c.step, sa.func.count()).group_by(kept.c.run_id, kept.c.step)
    counts = {(run, step): count for run, step, count in connection.execute(counted)}
    taken = [(row.run_id, row.step) for row in connection.execute(sa.select(steps.c.run_id, steps.c.step))]
    put = sa.update(steps).where(steps.c.run_id == sa.bindparam("at_run"), steps.c.step == sa.bindparam("at_step"))
    put = put.values(digest=sa.bindparam("found"), rollouts=sa.bindparam("kept"))
    given = [
        {
            "at_run": run,
            "at_step": step,
            "found": said.get((run, step)) or step_digest(step, {}),
            "kept": counts.get((run, step), 0),
        }
        for run, step in taken
    ]
    if given:
        connection.execute(put, given)
