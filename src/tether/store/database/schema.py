"""The tables of the run store, the same for SQLite and PostgreSQL, and the digests of their rows.

    runs ─┬─ steps ─┬─ metrics     one number by run, step and name
          │         └─ rollouts    one row per rollout, its tokens as one compressed blob
          ├─ events
          └─ lineage

    queues ─ items ─ votes ─ raters    the questions to people, and their answers
                └─ assignments ─┘      the only raters who see an item
    label_audits                       every change to those

A row belongs to the row on its left and is deleted with it. The migrations beside this file create the tables, and a
test checks that the two agree.

A row's digest covers the columns in `COVERED`, in order, with one encoding for both databases. Keys that a database
assigns, such as `run_id`, are not covered, so that a run's rows can be copied to another store unchanged. Foreign keys
and counts check that the rows belong together.
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
"""The columns that a digest covers, by table. `undone` of a vote may change later, with an audit row."""

LENGTH = 32  # hexadecimal digits that are kept: 128 bits


def _spelt(kind: str, value: Any) -> Any:
    if value is None:
        return None
    if kind == "number":
        return (float(value) + 0.0).hex()  # SQLite stores -0.0 as 0.0
    if kind == "count":
        return int(value)
    if kind == "bytes":
        return hashlib.sha256(value).hexdigest()
    return without_infinities(value) if kind == "json" else str(value)


def row_digest(table: str, values: Mapping[str, Any]) -> str:
    """The digest of a row of a table; JSON columns are passed as values."""
    return _digest([_spelt(kind, values.get(name)) for name, kind in COVERED[table].items()])


def step_digest(step: int, metrics: Mapping[str, float | None]) -> str:
    """The digest of a step: all its metrics, by name, with their exact bits."""
    return _digest([step, sorted((name, _spelt("number", value)) for name, value in metrics.items())])


def _digest(values: Any) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False, default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:LENGTH]


def on_insert(table: str) -> Callable[[Any], str]:
    """A column default that computes the digest of a new row."""

    def of_row(context: Any) -> str:
        return row_digest(table, context.get_current_parameters())

    return of_row


# -- tables -------------------------------------------------------------------------------------------------------

HEAD = "0007"
"""The migration that creates the tables as they are below."""


class JSONText(TypeDecorator[Any]):
    """JSON in ASCII, so that any text from a model fits into any database; a number that is not finite becomes null."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:  # noqa: ARG002
        """Encode for the database."""
        return None if value is None else json.dumps(without_infinities(value), allow_nan=False, default=str)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002
        """Decode from the database."""
        return None if value is None else json.loads(value)


tables = MetaData()


def _run_id() -> Column[int]:
    return Column("run_id", Integer, ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)


def _digest_column(table: str) -> Column[str]:
    """The digest of a row, filled in when the row is written."""
    return Column("digest", Text, default=on_insert(table))


runs = Table(
    "runs",
    tables,
    Column("id", Integer, primary_key=True),
    Column("workspace", Text, nullable=False),  # empty if the database is in the workspace's own folder
    Column("name", Text, nullable=False),  # the run's folder, relative to the workspace
    Column("uid", Text, nullable=False),  # distinguishes a run from an earlier one of that name
    Column("method", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("created", Double, nullable=False),  # seconds since 1970
    Column("updated", Double, nullable=False),
    Column("steps_target", Integer, nullable=False),
    Column("steps_done", Integer, nullable=False),
    Column("config", JSONText, nullable=False),
    Column("environment", JSONText, nullable=False),
    Column("note", JSONText, nullable=False, server_default='""'),  # written by people
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
    Column("source", Text, nullable=False),  # a path or a name, as in the recipe
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
    Column("rollouts", Integer),  # how many are kept; null in records of older versions
)


def _of_a_step() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["run_id", "step"], ["steps.run_id", "steps.step"], ondelete="CASCADE")


metrics = Table(
    "metrics",
    tables,
    Column("run_id", Integer, primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("value", Double),  # null: measured, but not finite
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
    Column("tokens", Integer, nullable=False),  # number of tokens, prompt and answer
    Column("content", LargeBinary, nullable=False),  # see tether.store.recorded
    _digest_column("rollouts"),  # null in records of older versions
    _of_a_step(),
)

events = Table(
    "events",
    tables,
    Column("id", Integer, primary_key=True),
    Column("run_id", Integer, ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("uid", Text, nullable=False, unique=True),  # prevents duplicates
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
    Column("workspace", Text, nullable=False, index=True),  # as in runs
    Column("name", JSONText, nullable=False),
    Column("kind", Text, nullable=False),  # pair, ranking, demonstration
    Column("guidelines", JSONText, nullable=False),
    Column("meta", JSONText, nullable=False),  # for an arena: the two runs
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
    Column("token_hash", Text, unique=True),  # null: signs in with the server's own token, or not at all
    Column("queue_id", Integer, ForeignKey("queues.id", ondelete="CASCADE"), index=True),  # the only one they see
    Column("created", Double, nullable=False),
    Column("excluded", Boolean, nullable=False, server_default=false()),  # their votes are not exported or trained on
)

items = Table(
    "items",
    tables,
    Column("id", Integer, primary_key=True),
    Column("queue_id", Integer, ForeignKey("queues.id", ondelete="CASCADE"), nullable=False),
    Column("kind", Text, nullable=False),
    Column("prompt", JSONText, nullable=False),  # messages
    Column("answers", JSONText, nullable=False),  # {text, source, ended, ids}; votes refer to this order
    Column("meta", JSONText, nullable=False),
    Column("repeat_of", Integer, ForeignKey("items.id", ondelete="CASCADE"), index=True),
    Column("priority", Double, nullable=False),  # higher ones are asked first
    Column("gold", JSONText),  # the known ranks of the answers, if the item tests annotators
    _digest_column("items"),
)
Index("items_in_order", items.c.queue_id, items.c.priority.desc(), items.c.id)

votes = Table(
    "votes",
    tables,
    Column("id", Integer, primary_key=True),
    Column("client_uid", Text, nullable=False, unique=True),  # a vote that is sent twice is stored once
    Column("item_id", Integer, ForeignKey("items.id", ondelete="CASCADE"), nullable=False),
    Column("rater_id", Integer, ForeignKey("raters.id", ondelete="CASCADE"), nullable=False),
    Column("order", JSONText, nullable=False),  # the order in which the answers were shown
    Column("choice", JSONText, nullable=False),  # left, right, tie, both_bad, skip; places, best first; a text
    Column("seconds", Double),  # time taken by the rater
    Column("created", Double, nullable=False),
    Column("undone", Boolean, nullable=False),
    Column("comment", JSONText),
    Column("ratings", JSONText),  # of each answer as shown, {axis: 1 to 7}
    _digest_column("votes"),
    Index("votes_of_a_rater", "rater_id", "id"),  # in the order they were stored
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
    Column("subject", Integer),  # the id of the vote, queue or rater that changed
    Column("data", JSONText, nullable=False),
    Index("audits_by_time", "workspace", "time"),
)
