"""Digests of rows: what the run store hands out is what was written, or it is said that it is not.

A row's digest is over the columns below, in this order, in one spelling for both databases. `run_id` and other keys
that a database gives out are left out, so that a run's rows can be copied or moved to another store as they are; that
they belong together is held by foreign keys, and by counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from tether.store.database.values import without_infinities

COVERED: dict[str, dict[str, str]] = {
    "runs": {
        "uid": "text",
        "method": "text",
        "created": "number",
        "steps_target": "count",
        "config": "json",
        "environment": "json",
    },
    "lineage": {"position": "count", "role": "text", "source": "text", "sha256": "text"},
    "rollouts": {
        "step": "count",
        "place": "count",
        "group_id": "count",
        "sample_id": "count",
        "finish": "text",
        "score": "number",
        "tokens": "count",
        "content": "bytes",
    },
    "events": {"uid": "text", "time": "number", "kind": "text", "text": "json", "step": "count", "data": "json"},
    "items": {"queue_id": "count", "kind": "text", "prompt": "json", "answers": "json", "repeat_of": "count"},
    "votes": {
        "client_uid": "text",
        "item_id": "count",
        "rater_id": "count",
        "order": "json",
        "choice": "json",
        "seconds": "number",
        "created": "number",
        "comment": "json",
        "ratings": "json",
    },
}
"""The columns that a digest covers, by table. Of a vote, `undone` changes later: the audits tell of it."""

LENGTH = 32  # hexadecimal digits that are kept: 128 bits


def _spelt(kind: str, value: Any) -> Any:
    if value is None:
        return None
    if kind == "number":
        return (float(value) + 0.0).hex()  # SQLite keeps -0.0 as 0.0
    if kind == "count":
        return int(value)
    if kind == "bytes":
        return hashlib.sha256(value).hexdigest()
    return without_infinities(value) if kind == "json" else str(value)


def row_digest(table: str, values: Mapping[str, Any]) -> str:
    """The digest of a row of a table; JSON columns are given as values."""
    return _digest([_spelt(kind, values.get(name)) for name, kind in COVERED[table].items()])


def step_digest(step: int, metrics: Mapping[str, float | None]) -> str:
    """The digest of a step: all its metrics, by name, to the bit."""
    return _digest([step, sorted((name, _spelt("number", value)) for name, value in metrics.items())])


def _digest(values: Any) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False, default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:LENGTH]


def on_insert(table: str) -> Callable[[Any], str]:
    """What fills the digest of a new row in."""

    def of_row(context: Any) -> str:
        return row_digest(table, context.get_current_parameters())

    return of_row
