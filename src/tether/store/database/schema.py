"""The tables of the run store, for SQLite and PostgreSQL alike.

JSON values as the store writes them.

Digests of rows: what the run store hands out is what was written, or it is said that it is not.

A row's digest is over the columns below, in this order, in one spelling for both databases. `run_id` and other keys
that a database gives out are left out, so that a run's rows can be copied or moved to another store as they are; that
they belong together is held by foreign keys, and by counts.

The tables of the run store, for SQLite and PostgreSQL alike.

    runs ─┬─ steps ─┬─ metrics     one number by run, step and name
          │         └─ rollouts    one row a rollout, its tokens as one compressed blob
          ├─ events
          └─ lineage

    queues ─ items ─ votes ─ raters    what people are asked, and what they said
                └─ assignments ─┘      who alone is asked an item
    label_audits                       every change to those

A row belongs to the one on its left and goes when that goes. Rows have a digest of what they say. The tables
are made by the migrations beside this file; a test holds that the two agree.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator


def without_infinities(value: Any) -> Any:
    """The same JSON value with null for every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): without_infinities(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(inner) for inner in value]
    return value


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


HEAD = "0007"
"""The migration that makes the tables as they are below."""


class JSONText(TypeDecorator[Any]):
    """JSON written in ASCII, so that any text a model can write fits into any database; not finite is null."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:  # noqa: ARG002
        """To the database."""
        return None if value is None else json.dumps(without_infinities(value), allow_nan=False, default=str)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002
        """From the database."""
        return None if value is None else json.loads(value)


tables = MetaData()


def _run_id() -> Column[int]:
    return Column("run_id", Integer, ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)


def _digest_column(table: str) -> Column[str]:
    """Of the row, filled in when it is written: see tether.store.database.schema."""
    return Column("digest", Text, default=on_insert(table))


runs = Table(
    "runs",
    tables,
    Column("id", Integer, primary_key=True),
    Column("workspace", Text, nullable=False),  # empty where the database lies in the workspace's own folder
    Column("name", Text, nullable=False),  # the run's folder, as seen from the workspace
    Column("uid", Text, nullable=False),  # tells a run from an earlier one of that name
    Column("method", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("created", Double, nullable=False),  # seconds since 1970
    Column("updated", Double, nullable=False),
    Column("steps_target", Integer, nullable=False),
    Column("steps_done", Integer, nullable=False),
    Column("config", JSONText, nullable=False),
    Column("environment", JSONText, nullable=False),
    Column("note", JSONText, nullable=False, server_default='""'),  # what people say about it
    Column("tags", JSONText, nullable=False, server_default="[]"),
    Column("run_group", JSONText, nullable=False, server_default='""'),
    _digest_column("runs"),
    UniqueConstraint("workspace", "name"),
)

lineage = Table(
    "lineage",
    tables,
    _run_id(),
    Column("position", Integer, primary_key=True),
    Column("role", Text, nullable=False),  # model, reward, critic, data, fork, ...
    Column("source", Text, nullable=False),  # a path or a name, as the recipe has it
    Column("source_run_id", Integer, ForeignKey("runs.id", ondelete="SET NULL"), index=True),
    Column("sha256", Text),  # of a data file
    _digest_column("lineage"),
)

steps = Table(
    "steps",
    tables,
    _run_id(),
    Column("step", Integer, primary_key=True),
    Column("recorded", Double, nullable=False),
    Column("digest", Text),  # of all its metrics
    Column("rollouts", Integer),  # how many are kept; null where an older Tether recorded it
)


def _of_a_step() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["run_id", "step"], ["steps.run_id", "steps.step"], ondelete="CASCADE")


metrics = Table(
    "metrics",
    tables,
    Column("run_id", Integer, primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("value", Double),  # null: it was measured and was not finite
    _of_a_step(),
    sqlite_with_rowid=False,
)

rollouts = Table(
    "rollouts",
    tables,
    Column("run_id", Integer, primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("place", Integer, primary_key=True),  # its row in the step's batch
    Column("group_id", BigInteger, nullable=False),
    Column("sample_id", BigInteger, nullable=False),
    Column("finish", Text, nullable=False),
    Column("score", Double),
    Column("tokens", Integer, nullable=False),  # how many, prompt and answer
    Column("content", LargeBinary, nullable=False),  # see tether.store.recorded
    _digest_column("rollouts"),  # null where an older Tether recorded it
    _of_a_step(),
)

events = Table(
    "events",
    tables,
    Column("id", Integer, primary_key=True),
    Column("run_id", Integer, ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("uid", Text, nullable=False, unique=True),  # so that one written twice is there once
    Column("time", Double, nullable=False),
    Column("kind", Text, nullable=False),
    Column("text", JSONText, nullable=False),
    Column("step", Integer),
    Column("data", JSONText, nullable=False),
    _digest_column("events"),
    Index("events_of_a_run", "run_id", "time"),
)

queues = Table(
    "queues",
    tables,
    Column("id", Integer, primary_key=True),
    Column("workspace", Text, nullable=False, index=True),  # as of runs
    Column("name", JSONText, nullable=False),
    Column("kind", Text, nullable=False),  # pair, ranking, demonstration
    Column("guidelines", JSONText, nullable=False),
    Column("meta", JSONText, nullable=False),  # of an arena: the two runs
    Column("created", Double, nullable=False),
    Column("open", Boolean, nullable=False),
)

raters = Table(
    "raters",
    tables,
    Column("id", Integer, primary_key=True),
    Column("workspace", Text, nullable=False, index=True),
    Column("name", JSONText, nullable=False),
    Column("role", Text, nullable=False),  # owner, annotator
    Column("token_hash", Text, unique=True),  # none: enters by the server's own token, or not at all
    Column("queue_id", Integer, ForeignKey("queues.id", ondelete="CASCADE"), index=True),  # the only one they see
    Column("created", Double, nullable=False),
    Column("excluded", Boolean, nullable=False, server_default=false()),  # their votes are not exported or learned from
)

items = Table(
    "items",
    tables,
    Column("id", Integer, primary_key=True),
    Column("queue_id", Integer, ForeignKey("queues.id", ondelete="CASCADE"), nullable=False),
    Column("kind", Text, nullable=False),
    Column("prompt", JSONText, nullable=False),  # messages
    Column("answers", JSONText, nullable=False),  # {text, source, ended, ids}, in the order that votes count from
    Column("meta", JSONText, nullable=False),
    Column("repeat_of", Integer, ForeignKey("items.id", ondelete="CASCADE"), index=True),
    Column("priority", Double, nullable=False),  # higher ones are asked first
    Column("gold", JSONText),  # the known right ranks of the answers, where the item tests annotators
    _digest_column("items"),
)
Index("items_in_order", items.c.queue_id, items.c.priority.desc(), items.c.id)

votes = Table(
    "votes",
    tables,
    Column("id", Integer, primary_key=True),
    Column("client_uid", Text, nullable=False, unique=True),  # so that one sent twice is there once
    Column("item_id", Integer, ForeignKey("items.id", ondelete="CASCADE"), nullable=False),
    Column("rater_id", Integer, ForeignKey("raters.id", ondelete="CASCADE"), nullable=False),
    Column("order", JSONText, nullable=False),  # which answer stood where
    Column("choice", JSONText, nullable=False),  # left, right, tie, both_bad, skip; places, best first; a text
    Column("seconds", Double),  # that it took
    Column("created", Double, nullable=False),
    Column("undone", Boolean, nullable=False),
    Column("comment", JSONText),
    Column("ratings", JSONText),  # of each answer as shown, {axis: 1 to 7}
    _digest_column("votes"),
    Index("votes_of_a_rater", "rater_id", "id"),  # in the order in which they were kept
)
Index(
    "one_vote_a_rater_and_item",
    votes.c.item_id,
    votes.c.rater_id,
    unique=True,
    sqlite_where=votes.c.undone == false(),
    postgresql_where=votes.c.undone == false(),
)

assignments = Table(
    "assignments",
    tables,
    Column("item_id", Integer, ForeignKey("items.id", ondelete="CASCADE"), primary_key=True),
    Column("rater_id", Integer, ForeignKey("raters.id", ondelete="CASCADE"), primary_key=True),
    Index("assignments_of_a_rater", "rater_id"),
)

label_audits = Table(
    "label_audits",
    tables,
    Column("id", Integer, primary_key=True),
    Column("workspace", Text, nullable=False),
    Column("time", Double, nullable=False),
    Column("rater_id", Integer, ForeignKey("raters.id", ondelete="SET NULL"), index=True),
    Column("action", Text, nullable=False),  # vote, undo, add-queue, ...
    Column("subject", Integer),  # the vote, queue or rater that it was done to
    Column("data", JSONText, nullable=False),
    Index("audits_by_time", "workspace", "time"),
)
