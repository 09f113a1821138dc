"""Keep a run's records with the run: find them after its folder was moved or copied, check them, restore missing ones.

A run is identified by the id in `run.json`, and in the store by its name. Before a run resumes, `take_over` renames its
records if its folder was moved, or copies them if its folder was copied. Once its checkpoint is loaded,
`settle_history` compares the store with the run's own log, step by step and event by event. Whatever one of them lacks
is restored from the other and reported.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, func, insert, literal, select, update
from sqlalchemy.exc import SQLAlchemyError

from tether.errors import TetherError
from tether.store.database.apply import put_event_back, put_step_back
from tether.store.database.open import Workspace, is_inside, open_engine
from tether.store.database.records import FILE as LOG
from tether.store.database.records import Logged, read_log, write_log
from tether.store.database.schema import (
    COVERED,
    events,
    lineage,
    metrics,
    rollouts,
    row_digest,
    runs,
    step_digest,
    steps,
)
from tether.store.database.verify_rows import (
    CHECKED_AT_RESUME,
    StoredHistory,
    file_faults,
    is_whole,
    read_history,
    reason,
    spans,
)
from tether.store.folder import HEADER
from tether.store.header import RunHeader, header_file, read_header

DEPTHS = ("*", "*/*", "*/*/*")  # where run folders may lie within a workspace


@dataclass(frozen=True)
class Identity:
    """The identity of a resumed run. `told` are messages for the user."""

    header: RunHeader
    moved: Mapping[str, str]  # the current names of the other runs of the workspace, by id
    told: tuple[str, ...] = ()


@dataclass
class Settled:
    """What was found and what was restored. `told` are messages for the user."""

    told: list[str] = field(default_factory=list[str])
    faults: list[str] = field(default_factory=list[str])  # faults found, repaired or not
    missing: list[int] = field(default_factory=list[int])  # steps that were missing in the store


def runs_by_id(directory: Path, besides: Path) -> dict[str, str]:
    """The names of the runs in a workspace by id, except for the run in `besides`."""
    found: dict[str, str] = {}
    for path in (path for depth in DEPTHS for path in directory.glob(f"{depth}/{HEADER}")):
        if path.parent.resolve() == besides.resolve():
            continue
        try:
            header = header_file(path.parent)
        except (ValueError, KeyError):
            continue
        if header is not None:
            found.setdefault(header.uid, path.parent.relative_to(directory).as_posix())
    return found


# -- the owner of the records -------------------------------------------------------------------------------------


def take_over(workspace: Workspace, folder: Path, header: RunHeader, *, is_new: bool) -> Identity:
    """Enter a run in the store under its folder's current name; a copied run becomes a separate run.

    `is_new`: the header was created just now, for a run of an older version whose records have only a name.
    """
    moved = runs_by_id(workspace.directory, folder)
    if workspace.file is not None and not workspace.file.is_file():
        return Identity(header, moved)
    try:
        engine = open_engine(workspace)
    except (SQLAlchemyError, OSError, TetherError):
        return Identity(header, moved)  # the recorder reports it
    try:
        with engine.begin() as connection:
            return _take_over(connection, workspace, folder, header, moved, is_new)
    except (SQLAlchemyError, OSError, ValueError, TypeError):
        return Identity(header, moved)
    finally:
        engine.dispose()


def follow_folder(workspace: Workspace, folder: Path) -> tuple[str, ...]:
    """Enter a finished run under its folder's current name, as resuming does for others; returns notices."""
    told: list[str] = []
    header = read_header(folder, told.append)
    if header is None:
        return tuple(told)
    identity = take_over(workspace, folder, header, is_new=False)
    if identity.header != header:
        with suppress(OSError):  # it cannot be written: the copy keeps its original's id
            identity.header.write(folder)
    return (*told, *identity.told)


def _take_over(
    connection: Connection, workspace: Workspace, folder: Path, header: RunHeader, moved: dict[str, str], is_new: bool
) -> Identity:
    name = workspace.name_of(folder)
    own = _row(connection, runs.c.workspace == workspace.key, runs.c.name == name)
    is_ours = own is not None and (own.uid == header.uid or is_new or not is_whole(runs, own))
    if own is not None and is_ours:
        adopted = RunHeader(own.uid, header.recipe, header.forked) if is_new else header
        return Identity(adopted, moved)
    named = select(runs.c.id, runs.c.workspace, runs.c.name).where(runs.c.uid == header.uid)
    others = connection.execute(named.order_by(runs.c.id)).all()
    told: list[str] = []
    if own is not None:  # another run had this name, and its folder was moved or deleted
        place = moved.get(own.uid) or f"{name}-{own.uid[:8]}"
        connection.execute(update(runs).where(runs.c.id == own.id).values(name=place))
        told.append(f"The store had another run named {name}: it is now listed as {place}.")
    for row in others:
        if not _still_there(workspace, row, folder, header.uid):
            values = {"workspace": workspace.key, "name": name}
            connection.execute(update(runs).where(runs.c.id == row.id).values(**values))
            told.append(
                f"The run was recorded as {_shown(row, workspace)} and continues as {name}, with all its records."
            )
            return Identity(header, moved, tuple(told))
    if others or header.uid in moved:
        copy = RunHeader(secrets.token_hex(8), header.recipe, header.forked)
        if others:
            _copy_rows(connection, others[0].id, {"workspace": workspace.key, "name": name, "uid": copy.uid})
        source = _shown(others[0], workspace) if others else moved[header.uid]
        told.append(
            f"This is a copy of the run {source}: it continues as {name}, a separate run, with a copy of its records."
        )
        return Identity(copy, moved, tuple(told))
    return Identity(header, moved, tuple(told))


def _row(connection: Connection, *conditions: Any) -> Any:
    return connection.execute(select(runs).where(*conditions)).first()


def _shown(row: Any, workspace: Workspace) -> str:
    return row.name if row.workspace == workspace.key else f"{row.workspace}/{row.name}"


def _still_there(workspace: Workspace, row: Any, folder: Path, uid: str) -> bool:
    """Whether the run is still in the folder that the store has for it, and that is a different folder.

    A folder on another machine is assumed to exist.
    """
    root = workspace.directory
    if row.workspace != workspace.key:
        host, _, place = row.workspace.partition(":")
        if row.workspace and host != socket.gethostname():
            return True
        root = Path(place) if place else root
    if not is_inside(row.name):
        return True
    other = root / row.name
    if other.resolve() == folder.resolve():
        return False
    try:
        header = header_file(other)
    except (ValueError, KeyError):
        return True
    return header is not None and header.uid == uid


def _copy_rows(connection: Connection, source: int, changes: Mapping[str, Any]) -> None:
    """Copy the rows of a run under another name and id."""
    row = connection.execute(select(runs).where(runs.c.id == source)).one()._mapping
    values = {name: row[name] for name in row if name not in ("id", "digest")} | dict(changes)
    made = connection.execute(insert(runs).values(**values, digest=row_digest("runs", values)).returning(runs.c.id))
    run_id = made.scalar_one()
    for table in (steps, metrics, rollouts, lineage):
        columns = [column for column in table.c if column.name != "run_id"]
        chosen = select(literal(run_id), *columns).where(table.c.run_id == source)
        connection.execute(insert(table).from_select(["run_id", *(column.name for column in columns)], chosen, False))
    told = connection.execute(select(events).where(events.c.run_id == source)).all()
    for event in told:
        content = {name: event._mapping[name] for name in COVERED["events"]}
        connection.execute(insert(events).values(run_id=run_id, **content | {"uid": secrets.token_hex(8)}))


# -- comparing the store with the log -----------------------------------------------------------------------------


def settle_history(workspace: Workspace, folder: Path, first: int, done: int, *, repair: bool = True) -> Settled:
    """Compare the store with the run's log over the steps from `first` to `done` - 1.

    With `repair`, each gets what it lacks from the other. Otherwise the differences are only reported.
    """
    found = Settled()
    logged = read_log(folder)
    try:
        engine = open_engine(workspace)
        try:
            with engine.begin() as connection:
                _settle(connection, workspace, folder, logged, range(first, done), found, repair)
        finally:
            engine.dispose()
    except (SQLAlchemyError, OSError, TetherError, ValueError, TypeError) as error:
        text = (
            f"The run store {workspace.place} cannot be checked ({reason(error)}): restore it from a copy, or move it "
            f"away and resume; metrics and events are restored from {folder / LOG}."
        )
        found.told.append(text)
        found.faults.append(text)
    return found


def _settle(
    connection: Connection,
    workspace: Workspace,
    folder: Path,
    logged: Logged | None,
    expected: range,
    found: Settled,
    repair: bool,
) -> None:
    for fault in file_faults(connection, workspace, most_bytes=CHECKED_AT_RESUME if repair else None):
        text = (
            f"{workspace.place} fails SQLite's own check ({fault}): restore it from a copy, or `sqlite3 .recover` it."
        )
        found.told.append(text)
        found.faults.append(text)
    name = workspace.name_of(folder)
    run = _row(connection, runs.c.workspace == workspace.key, runs.c.name == name)
    if run is None:
        stored = StoredHistory()
        found.faults.append(f"{workspace.place} has no run {name}")
        if not repair:
            return
        raise ValueError(f"it has no run {name}")
    stored = read_history(connection, run.id)
    found.faults += [f"{workspace.place}: {fault}" for fault in stored.faults]
    log = logged or Logged()
    is_new = logged is None or (log.start or {}).get("resumes", False)  # started by a version that wrote no log
    pair = _Pair(connection, workspace, folder / LOG, run.id, stored, log, found, repair)
    _settle_steps(pair, expected, is_new=is_new)
    _settle_events(pair)
    if logged is not None and log.damaged:
        found.faults.append(f"{folder / LOG}: {len(log.damaged)} lines are not what was written")
        found.told.append(f"{folder / LOG} had {len(log.damaged)} damaged lines, which were left out.")
    if repair:
        _finish(connection, run.id, folder, log, logged is None or bool(log.damaged))
    _tell_tokens(workspace, stored, log, found)


@dataclass(frozen=True)
class _Pair:
    """A run's rows in the store and its log, which are compared; with `repair`, each gets what it lacks."""

    connection: Connection
    workspace: Workspace
    log_file: Path
    run_id: int
    stored: StoredHistory
    log: Logged
    found: Settled
    repair: bool


def _settle_steps(pair: _Pair, expected: Iterable[int], *, is_new: bool) -> None:
    stored, log, found, repair = pair.stored, pair.log, pair.found, pair.repair
    place = pair.workspace.place
    missing, damaged, lost, unlogged, other = [], [], [], [], []
    for step in expected:
        in_store, in_log = step in stored.steps, step in log.steps
        if in_log and not in_store:
            (damaged if step in stored.damaged_steps else missing).append(step)
        elif in_store and not in_log:
            unlogged.append(step)
        elif not in_store:
            lost.append(step)
        elif _digest(stored.steps[step]) != log.digest(step):
            other.append(step)
    found.missing = missing
    if repair:
        for step in (*missing, *damaged, *other):
            put_step_back(pair.connection, pair.run_id, log.steps[step])
            stored.steps[step] = log.steps[step]
        for step in unlogged:
            log.steps[step] = stored.steps[step]
    command = "they were restored from" if repair else "`tether resume` or --repair restores them from"
    for what, at in (("lacked", missing), ("had damaged", damaged), ("had other", other)):
        if at:
            if not repair and at is not damaged:  # the digests of the rows already reported those
                found.faults.append(f"{place} {what} metrics of {spans(at)}")
            found.told.append(f"The run store {place} {what} metrics of {spans(at)}: {command} {pair.log_file}.")
    if unlogged and not is_new:
        found.told.append(f"{pair.log_file} lacked {spans(unlogged)}: {command} {place}.")
        found.faults += [] if repair else [f"{pair.log_file} lacks {spans(unlogged)}"]
    if lost:
        text = f"The metrics of {spans(lost)} are neither in {place} nor in {pair.log_file}: they are lost."
        found.told.append(text)
        found.faults.append(text)
    stored.damaged_steps = [step for step in stored.damaged_steps if step not in stored.steps]


def _digest(data: Mapping[str, Any]) -> str:
    return step_digest(data["step"], data["metrics"])


def _settle_events(pair: _Pair) -> None:
    stored, log, found, repair = pair.stored, pair.log, pair.found, pair.repair
    absent = [uid for uid in log.events if uid not in stored.events]
    if absent:  # the events of a copied run have other ids, so compare their content
        said = {(row["time"], row["kind"]) for row in stored.events.values()}
        absent = [uid for uid in absent if (log.events[uid]["time"], log.events[uid]["kind"]) not in said]
    if repair and stored.damaged_events:
        mine = events.c.run_id == pair.run_id
        pair.connection.execute(delete(events).where(mine, events.c.id.in_(stored.damaged_events)))
    if repair:
        for uid in absent:
            put_event_back(pair.connection, pair.run_id, log.events[uid])
    for uid, row in stored.events.items():
        log.events.setdefault(uid, row)
    if absent or stored.damaged_events:
        count = max(len(absent), len(stored.damaged_events))
        command = "they were restored from" if repair else "--repair restores them from"
        text = f"The run store {pair.workspace.place} lacked or had damaged {count} events: {command} {pair.log_file}."
        found.told.append(text)
        found.faults += [] if repair else [text]


def _finish(connection: Connection, run_id: int, folder: Path, log: Logged, rewrites: bool) -> None:
    """Update the run's own row, and rewrite its log if that lacked something."""
    last = connection.execute(select(func.max(steps.c.step)).where(steps.c.run_id == run_id)).scalar()
    begun = {"steps_done": 0 if last is None else last + 1}
    row = connection.execute(select(runs).where(runs.c.id == run_id)).one()._mapping
    if log.start is not None and not log.start["resumes"] and log.start["time"] != row["created"]:
        created = {"created": log.start["time"]}
        begun |= created | {"digest": row_digest("runs", {**row, **created})}
    connection.execute(update(runs).where(runs.c.id == run_id).values(**begun))
    logged = read_log(folder)
    if rewrites or logged is None or set(logged.steps) != set(log.steps) or set(logged.events) != set(log.events):
        write_log(folder, log)


def _tell_tokens(workspace: Workspace, stored: StoredHistory, log: Logged, found: Settled) -> None:
    """Report damaged or missing tokens: only the store holds them, so they cannot be restored."""
    if stored.damaged_rollouts or stored.missing_rollouts:
        at = sorted({step for step, _ in stored.damaged_rollouts} | set(stored.missing_rollouts))
        found.told.append(
            f"The run store {workspace.place} has damaged or missing tokens of {spans(at)}, and there is no other "
            "copy: they are not shown or exported. The other steps are undamaged, and training does not read tokens."
        )
        return
    gone = [step for step in found.missing if log.steps[step]["rollouts"] and not stored.rollouts.get(step)]
    if gone:
        found.told.append(
            f"The tokens of {spans(gone)} were only in the run store, and {workspace.place} does not have them."
        )
