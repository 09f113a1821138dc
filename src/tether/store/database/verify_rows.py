"""Check the rows of a store against their digests and counts, and the file with SQLite's own check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Table, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from tether.store.database.open import Workspace
from tether.store.database.schema import (
    COVERED,
    events,
    items,
    label_audits,
    lineage,
    metrics,
    queues,
    raters,
    rollouts,
    row_digest,
    runs,
    step_digest,
    steps,
    votes,
)

MAX_TOLD = 5  # maximum number of faults that a message names
AT_ONCE = 64  # rollouts in memory
CHECKED_AT_RESUME = 2**28  # maximum bytes of a SQLite file that is checked completely before a run resumes


@dataclass
class StoredHistory:
    """The rows of one run in the store, each checked."""

    run_is_whole: bool = True
    steps: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])  # undamaged: time, metrics
    damaged_steps: list[int] = field(default_factory=list[int])
    damaged_rollouts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # step, place
    missing_rollouts: list[int] = field(default_factory=list[int])  # steps with fewer rollouts than their count
    rollouts: dict[int, int] = field(default_factory=dict[int, int])  # number of rollouts, by step
    events: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    damaged_events: list[int] = field(default_factory=list[int])  # their ids
    damaged_lineage: bool = False
    unsealed: int = 0  # rollouts of older versions, which have no digest

    @property
    def faults(self) -> list[str]:
        """The faults as messages."""
        found = [] if self.run_is_whole else ["the run's own row is not what was written"]
        if self.damaged_lineage:
            found.append("its lineage is not what was written")
        if self.damaged_steps:
            found.append(f"the metrics of {spans(self.damaged_steps)} are not what was written")
        if self.damaged_rollouts:
            told = ", ".join(f"step {step} sample {place}" for step, place in self.damaged_rollouts[:MAX_TOLD])
            more = len(self.damaged_rollouts) - MAX_TOLD
            found.append(f"the tokens of {told}{f' and {more} more' if more > 0 else ''} are not what was written")
        if self.missing_rollouts:
            found.append(f"tokens of {spans(self.missing_rollouts)} are missing")
        if self.damaged_events:
            found.append(f"{len(self.damaged_events)} events are not what was written")
        return found


def spans(numbers: list[int]) -> str:
    """Format steps: `step 3`, `steps 0 to 7, 9`."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    words = ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in parts)
    return f"step{'s' if len(set(numbers)) > 1 else ''} {words}"


def is_whole(table: Table, row: Any) -> bool:
    """Whether a row matches its digest; a missing digest counts as damage."""
    if row.digest is None:
        return False
    try:
        return row.digest == row_digest(table.name, row._mapping)
    except (ValueError, TypeError, AttributeError):  # a value of the wrong type
        return False


def read_history(connection: Connection, run_id: int) -> StoredHistory:
    """Read and check everything that a run recorded."""
    found = StoredHistory()
    columns = (*(runs.c[name] for name in COVERED["runs"]), runs.c.digest)
    found.run_is_whole = any(
        is_whole(runs, row) for row in _rows(connection, select(*columns).where(runs.c.id == run_id))
    )
    found.damaged_lineage = not all(
        is_whole(lineage, row) for row in _rows(connection, select(lineage).where(lineage.c.run_id == run_id))
    )
    said = _read_steps(connection, run_id, found)
    _read_rollouts(connection, run_id, found, said)
    for row in _rows(connection, select(events).where(events.c.run_id == run_id)):
        if not is_whole(events, row):
            found.damaged_events.append(row.id)
        else:
            found.events[row.uid] = {name: row._mapping[name] for name in COVERED["events"]}
    return found


def _rows(connection: Connection, statement: Any) -> Iterator[Any]:
    """The rows of a statement; an `_Unreadable` for a row whose values cannot be parsed."""
    result = connection.execute(statement.execution_options(yield_per=AT_ONCE))
    while True:
        try:
            row = result.fetchone()
        except (ValueError, TypeError):  # such as invalid JSON
            yield _Unreadable()
            continue
        if row is None:
            return
        yield row


class _Unreadable:
    """A row that cannot be read, and so counts as damaged."""

    digest = None
    id = -1
    step = place = -1
    uid = ""


def _read_steps(connection: Connection, run_id: int, found: StoredHistory) -> dict[int, int | None]:
    """Read the steps; returns the number of rollouts that each should have."""
    measured: dict[int, dict[str, float | None]] = {}
    for row in _rows(connection, select(metrics).where(metrics.c.run_id == run_id)):
        if not isinstance(row, _Unreadable):
            measured.setdefault(row.step, {})[row.name] = row.value
    said: dict[int, int | None] = {}
    for row in _rows(connection, select(steps).where(steps.c.run_id == run_id)):
        if isinstance(row, _Unreadable):
            continue
        values = measured.get(row.step, {})
        said[row.step] = row.rollouts
        if row.digest == _careful_step(row.step, values):
            data = {"step": row.step, "time": row.recorded, "metrics": values, "rollouts": row.rollouts or 0}
            found.steps[row.step] = data
        else:
            found.damaged_steps.append(row.step)
    return said


def _careful_step(step: Any, values: dict[str, Any]) -> str | None:
    """The digest of a step; None if a value is not a number."""
    try:
        return step_digest(step, values)
    except (ValueError, TypeError):
        return None


def _read_rollouts(connection: Connection, run_id: int, found: StoredHistory, said: dict[int, int | None]) -> None:
    whole: dict[int, list[bool]] = {}
    for row in _rows(connection, select(rollouts).where(rollouts.c.run_id == run_id)):
        found.rollouts[row.step] = found.rollouts.get(row.step, 0) + 1
        whole.setdefault(row.step, []).append(row.digest is not None)
        if row.digest is None and not isinstance(row, _Unreadable):
            found.unsealed += 1
        elif not is_whole(rollouts, row):
            found.damaged_rollouts.append((row.step, row.place))
    for step, digests in whole.items():
        if any(digests) and not all(digests):  # in one step, all rollouts have a digest or none has
            found.damaged_rollouts.append((step, digests.index(False)))
    for step, count in said.items():
        if count is not None and count != found.rollouts.get(step, 0):
            found.missing_rollouts.append(step)


# -- votes and the file itself ------------------------------------------------------------------------------------


def vote_faults(connection: Connection, workspace: str) -> list[str]:
    """The faults of a workspace's items and votes, as messages."""
    of_items = select(items).join(queues, queues.c.id == items.c.queue_id).where(queues.c.workspace == workspace)
    found = [
        f"item {row.id} is not what was written" for row in _rows(connection, of_items) if not is_whole(items, row)
    ]
    of_votes = select(votes).join(raters, raters.c.id == votes.c.rater_id).where(raters.c.workspace == workspace)
    undone = {
        row.subject
        for row in connection.execute(
            select(label_audits.c.subject).where(label_audits.c.workspace == workspace, label_audits.c.action == "undo")
        )
    }
    for row in _rows(connection, of_votes):
        if not is_whole(votes, row):
            found.append(f"vote {row.id} is not what was written")
        elif row.undone != (row.id in undone):
            found.append(f"vote {row.id} is {'' if row.undone else 'not '}undone, and the audit says otherwise")
    return found


def duplicate_ids(connection: Connection, workspace: str) -> list[str]:
    """Runs of a workspace that have the same id, as messages."""
    chosen = select(runs.c.uid, func.count()).where(runs.c.workspace == workspace)
    counted = connection.execute(chosen.group_by(runs.c.uid).having(func.count() > 1)).all()
    found = []
    for uid, _ in counted:
        named = select(runs.c.name).where(runs.c.workspace == workspace, runs.c.uid == uid).order_by(runs.c.name)
        names = ", ".join(connection.execute(named).scalars())
        found.append(f"{names} have the same id {uid}: resuming a copy gives it a new id")
    return found


def file_faults(connection: Connection, workspace: Workspace, *, most_bytes: int | None = None) -> list[str]:
    """The result of SQLite's own check; empty for a server, or for a file of more than `most_bytes`."""
    if workspace.file is None:
        return []
    if most_bytes is not None and workspace.file.stat().st_size > most_bytes:
        return []
    said = connection.execute(text(f"PRAGMA integrity_check({MAX_TOLD})")).scalars().all()
    found = [str(line) for line in said if line != "ok"]
    orphans = connection.execute(text("PRAGMA foreign_key_check")).all()
    if orphans:
        names = ", ".join(sorted({str(row[0]) for row in orphans}))
        found.append(f"{len(orphans)} rows of {names} have no parent row")
    return found


def reason(error: BaseException) -> str:
    """Why a store cannot be read, in one line."""
    cause = getattr(error, "orig", None) if isinstance(error, SQLAlchemyError) else None
    return str(cause or error).strip().partition("\n")[0][:300] or type(error).__name__
