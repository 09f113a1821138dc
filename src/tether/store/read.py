"""Read the run store: the list of runs, the records of one run, and its note, tags and group.

This module needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import Any

from sqlalchemy import Connection, Engine, Row, and_, select, update
from sqlalchemy.exc import SQLAlchemyError

from tether.config.base import MAX_GROUP, MAX_NOTE, MAX_TAGS, TAG
from tether.errors import ConfigError, StorageError
from tether.redact import redact_url
from tether.store.database.journal import FOLDER, Journal, is_being_recorded, recording_lock
from tether.store.database.open import FILE, Workspace, absolute, is_inside, open_engine, workspace_at
from tether.store.database.schema import events, lineage, metrics, rollouts, runs, step_digest, steps
from tether.store.database.verify_rows import is_whole, spans
from tether.store.folder import is_run
from tether.store.header import kept_recipe
from tether.store.recorded import MAX_STEP_BYTES, Event, RecordedRun, StoredRollout, decode_rollout, inflated_size

LATEST = ("score", "kl_ref_k3", "loss", "accuracy", "held_out/score")
"""The metrics that a list of runs shows, from the last step."""


@dataclass(frozen=True)
class Ancestor:
    """Something a run was made from; `run` is its name if it is a run of the same workspace."""

    role: str
    source: str
    run: str | None
    sha256: str | None


@dataclass(frozen=True)
class RunSummary:
    """A run without its steps. `state` is running, done, stopped, failed, or interrupted (no process trains it)."""

    id: int
    name: str
    method: str
    state: str
    created: float
    updated: float
    steps_target: int
    steps_done: int
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    latest: Mapping[str, float]
    lineage: Sequence[Ancestor]
    folder: Path
    note: str = ""
    tags: Sequence[str] = ()
    group: str = ""


@dataclass(frozen=True)
class OpenWorkspace:
    """A workspace whose database is open for reading. Use it in a `with` statement, or close it."""

    workspace: Workspace
    engine: Engine

    def close(self) -> None:
        """Close the database."""
        self.engine.dispose()

    def __enter__(self) -> OpenWorkspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection with one consistent snapshot of the database."""
        try:
            with self.engine.connect().execution_options(reads_only=True) as connection, connection.begin():
                yield connection
        except SQLAlchemyError as error:
            reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
            raise StorageError(f"the run store {self.workspace.place} cannot be read ({reason})") from error


def open_workspace(directory: str | Path = "runs", url: str | None = None) -> OpenWorkspace:
    """Open an existing workspace. Records that an ended run left in its spool are written to the store first."""
    workspace = workspace_at(directory, url)
    waiting = _runs_with_pending(workspace)
    if workspace.file is not None and not workspace.file.is_file() and not waiting:
        raise ConfigError(
            f"--workspace: there are no recorded runs in {workspace.directory} ({workspace.place} does not exist); "
            "name the folder that runs were written to"
        )
    engine = open_store(workspace)
    for folder in waiting:
        _take_in(workspace, folder)
    return OpenWorkspace(workspace, engine)


def open_store(workspace: Workspace, **options: Any) -> Engine:
    """Open a workspace's database like `open_engine`; raises StorageError with a message for the user."""
    try:
        return open_engine(workspace, **options)
    except (SQLAlchemyError, OSError) as error:
        reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
        raise StorageError(f"the run store {workspace.place} cannot be opened ({reason})") from error


def _runs_with_pending(workspace: Workspace) -> list[Path]:
    found = [path for depth in ("*", "*/*", "*/*/*") for path in workspace.directory.glob(f"{depth}/{FOLDER}")]
    waiting = [path.parent for path in found if any(path.glob("*.record"))]
    return [folder for folder in waiting if _meant_for(workspace, folder)]


def _meant_for(workspace: Workspace, folder: Path) -> bool:
    """Whether a run's spooled records belong to this store: the run's recipe may name another."""
    url = recipe_url(folder)
    return url is None or workspace_at(workspace.directory, url).place == workspace.place


def _take_in(workspace: Workspace, folder: Path) -> None:
    """Write the spooled records of a run that no process is writing."""
    with recording_lock(folder) as free:
        if free:
            journal = Journal(workspace, workspace.name_of(folder), None, lambda text: None)  # noqa: ARG005
            journal.close()


# -- the list of runs ---------------------------------------------------------------------------------------------


def list_runs(opened: OpenWorkspace) -> list[RunSummary]:
    """Every run of the workspace, the most recently written first."""
    with opened.reading() as connection:
        mine = runs.c.workspace == opened.workspace.key
        rows = connection.execute(select(runs).where(mine).order_by(runs.c.updated.desc(), runs.c.id.desc())).all()
        latest = _latest(connection)
        ancestors = _ancestors(connection)
    rows = [row for row in rows if is_inside(row.name)]  # Tether writes no other names: somebody else added the row
    return [_summary(opened, row, latest.get(row.id, {}), ancestors.get(row.id, [])) for row in rows]


def _summary(opened: OpenWorkspace, row: Row[Any], latest: dict[str, float], ancestors: list[Ancestor]) -> RunSummary:
    folder, state = opened.workspace.folder(row.name), state_now(opened, row)
    names = ("id", "name", "method", "created", "updated", "steps_target", "steps_done", "config", "environment")
    fields = {name: getattr(row, name) for name in names} | {"config": _shown_config(row.config)}
    said = {"note": row.note, "tags": tuple(row.tags), "group": row.run_group}
    return RunSummary(**fields, **said, state=state, latest=latest, lineage=ancestors, folder=folder)


def _shown_config(config: Any) -> Any:
    """A recipe from the store, with secrets hidden: older versions stored the password of the database's URL."""
    store = config.get("store") if isinstance(config, dict) else None
    if isinstance(store, dict) and isinstance(store.get("url"), str):
        return config | {"store": store | {"url": redact_url(store["url"])}}
    return config


def state_now(opened: OpenWorkspace, row: Any) -> str:
    """The state of a run's row (id, name, state); "running" without a living process becomes "interrupted".

    A run may end between reading its row and looking for its process, so the row is then read again.
    """
    if row.state != "running" or is_being_recorded(opened.workspace.folder(row.name)):
        return row.state
    with opened.reading() as connection:
        state = connection.execute(select(runs.c.state).where(runs.c.id == row.id)).scalar()
    return "interrupted" if state == "running" else str(state)


def _latest(connection: Connection) -> dict[int, dict[str, float]]:
    """Use an outer join from the runs to their metrics; in the other direction SQLite would read all metrics."""
    last = and_(metrics.c.run_id == runs.c.id, metrics.c.step == runs.c.steps_done - 1, metrics.c.name.in_(LATEST))
    chosen = select(runs.c.id, metrics.c.name, metrics.c.value).select_from(runs.outerjoin(metrics, last))
    found: dict[int, dict[str, float]] = {}
    for run_id, name, value in connection.execute(chosen):
        if name is not None:
            found.setdefault(run_id, {})[name] = _number(value)
    return found


def _ancestors(connection: Connection) -> dict[int, list[Ancestor]]:
    chosen = select(lineage, runs.c.name.label("run")).outerjoin(runs, lineage.c.source_run_id == runs.c.id)
    found: dict[int, list[Ancestor]] = {}
    for row in connection.execute(chosen.order_by(lineage.c.run_id, lineage.c.position)):
        found.setdefault(row.run_id, []).append(Ancestor(row.role, row.source, row.run, row.sha256))
    return found


def find_run(opened: OpenWorkspace, words: str) -> RunSummary:
    """Find a run by its name or by the path of its folder."""
    known = {run.name: run for run in list_runs(opened)}
    name = words.strip("/")
    if name not in known:
        with suppress(ConfigError):  # it may not be a path
            name = opened.workspace.name_of(Path(words).expanduser())
    if name in known:
        return known[name]
    close = get_close_matches(name, known, n=1)
    advice = f"did you mean {close[0]}?" if close else "`tether runs` lists all runs"
    raise ConfigError(f"no run called {words} is recorded in {opened.workspace.place}: {advice}")


def store_of(words: str, directory: str | None = None) -> tuple[str, str | None]:
    """The workspace of a run, and the URL of its store if the run's recipe names one."""
    workspace = workspace_of(words, directory)
    for folder in (Path(words).expanduser(), Path(workspace) / words):
        if words and is_run(folder):
            return workspace, recipe_url(folder)
    return workspace, None


def recipe_url(folder: Path) -> str | None:
    """`store.url` of the recipe in a run's folder."""
    store = kept_recipe(folder).get("store")
    return store.get("url") if isinstance(store, dict) else None


def workspace_of(words: str, directory: str | None = None) -> str:
    """The workspace folder of a run: `directory` if given, else the one around the run's folder, else `runs`."""
    if directory is not None:
        return directory
    folder = Path(words).expanduser()
    if not is_run(folder):
        return "runs"
    around = [*absolute(folder).parents, *folder.resolve().parents]
    nearest = next((place for place in around if (place / FILE).is_file()), None)
    return str(nearest or _named_workspace(folder.resolve()))


def _named_workspace(folder: Path) -> Path:
    """The workspace of a run folder, found by the run's own name, which may have several parts."""
    run = kept_recipe(folder).get("run")
    name = run.get("name") if isinstance(run, dict) else None
    parts = Path(name).parts if name else ()
    return folder.parents[len(parts) - 1] if parts and folder.parts[-len(parts) :] == parts else folder.parent


# -- the records of a run -----------------------------------------------------------------------------------------


def read_run(opened: OpenWorkspace, words: str) -> RecordedRun:
    """Everything that a run recorded; rollouts are read on demand, one step at a time."""
    return recorded(opened, find_run(opened, words))


def recorded(
    opened: OpenWorkspace, run: RunSummary, metrics: Sequence[Mapping[str, float]] | None = None
) -> RecordedRun:
    """Like `read_run`, for a run that was found; `metrics`, one mapping per step, if they are already read."""
    with opened.reading() as connection:
        return RecordedRun(
            name=run.name,
            method=run.method,
            config=run.config,
            metrics=_metrics(connection, run) if metrics is None else metrics,
            events=_events(connection, run.id),
            rollout_steps=_rollout_steps(connection, run.id),
            rollouts=lambda step: read_rollouts(opened, run.id, step),
        )


def _metrics(connection: Connection, run: RunSummary) -> list[dict[str, float]]:
    """The metrics of every step. Raises StorageError if those of a step are damaged."""
    taken = select(steps.c.step, steps.c.digest).where(steps.c.run_id == run.id).order_by(steps.c.step)
    sealed: dict[int, str | None] = {row.step: row.digest for row in connection.execute(taken)}
    rows: dict[int, dict[str, float | None]] = {step: {} for step in sealed}
    measured = select(metrics.c.step, metrics.c.name, metrics.c.value).where(metrics.c.run_id == run.id)
    for step, name, value in connection.execute(measured.order_by(metrics.c.step, metrics.c.name)):
        rows.setdefault(step, {})[name] = value
    damaged = [step for step, values in rows.items() if sealed.get(step) != _careful_digest(step, values)]
    if damaged:
        raise StorageError(
            f"the metrics of {spans(damaged)} of {run.name} are damaged in the run store: restore them from the run's "
            f"folder with `tether doctor {quote(str(run.folder))} --verify --repair`"
        )
    return [{"step": step, **{name: _number(value) for name, value in row.items()}} for step, row in rows.items()]


def _careful_digest(step: int, values: Mapping[str, float | None]) -> str | None:
    """The digest of a step; None if a value is not one that a metric can have."""
    try:
        return step_digest(step, values)
    except (TypeError, ValueError):
        return None


def _events(connection: Connection, run_id: int) -> list[Event]:
    chosen = select(events).where(events.c.run_id == run_id).order_by(events.c.id)
    return [Event(row.time, row.kind, row.text, row.step, row.data) for row in connection.execute(chosen)]


def _rollout_steps(connection: Connection, run_id: int) -> list[int]:
    chosen = select(rollouts.c.step).where(rollouts.c.run_id == run_id).distinct().order_by(rollouts.c.step)
    return list(connection.execute(chosen).scalars())


def read_rollouts(opened: OpenWorkspace, run_id: int, step: int, row: int | None = None) -> list[StoredRollout]:
    """The rollouts of one step, or one row of it, in batch order; empty if they were not kept."""
    chosen = select(rollouts).where(rollouts.c.run_id == run_id, rollouts.c.step == step)
    if row is not None:
        chosen = chosen.where(rollouts.c.place == row)
    with opened.reading() as connection:
        rows = connection.execute(chosen.order_by(rollouts.c.place)).all()
    found: list[StoredRollout] = []
    size = 0
    for one in rows:
        if one.digest is not None and not is_whole(rollouts, one):
            raise StorageError(
                f"step {step}, sample {one.place} is damaged in the run store {opened.workspace.place}, and there is "
                "no other copy of its tokens; the other samples and steps can be read"
            )
        fields = {"group_id": one.group_id, "sample_id": one.sample_id, "finish": one.finish}
        found.append(decode_rollout(one.content, step=one.step, row=one.place, score=_number(one.score), **fields))
        size += inflated_size(found[-1])
        if size > MAX_STEP_BYTES:
            raise StorageError(f"the tokens of step {step} decompress to more than {MAX_STEP_BYTES >> 30} GiB")
    return found


def _number(value: float | None) -> float:
    return math.nan if value is None else value


# -- notes, tags and groups ---------------------------------------------------------------------------------------

NOT_COMPARED = ("run.name", "run.directory", "run.note", "run.tags", "run.group")
"""Settings that differ between any two runs, or that do not affect training."""
MISSING = "(not a setting)"


@dataclass(frozen=True)
class RunNotes:
    """A run's note, tags and group."""

    note: str = ""
    tags: tuple[str, ...] = ()
    group: str = ""


def change_notes(opened: OpenWorkspace, run: RunSummary, changes: Mapping[str, Any]) -> RunNotes:
    """Change the note, the tags or the group of a run; those not in `changes` stay."""
    now = replace(RunNotes(run.note, tuple(run.tags), run.group), **changes)
    checked = RunNotes(now.note.strip(), clean_tags(now.tags), now.group.strip())
    if len(checked.note) > MAX_NOTE:
        raise ConfigError(f"note: at most {MAX_NOTE} characters; this one has {len(checked.note)}")
    if len(checked.group) > MAX_GROUP:
        raise ConfigError(f"group: at most {MAX_GROUP} characters; this one has {len(checked.group)}")
    values = {"note": checked.note, "tags": list(checked.tags), "run_group": checked.group}
    try:
        with opened.engine.begin() as connection:
            connection.execute(update(runs).where(runs.c.id == run.id).values(**values))
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
        raise StorageError(f"the run store {opened.workspace.place} cannot be written ({reason})") from error
    return checked


def clean_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """The tags without duplicates, in the given order."""
    found = tuple(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))
    wrong = next((tag for tag in found if not TAG.fullmatch(tag)), None)
    if wrong is not None:
        raise ConfigError(
            f"tags: {wrong[:60]!r} is not a tag; use up to 40 letters, digits, dots, dashes and underscores"
        )
    if len(found) > MAX_TAGS:
        raise ConfigError(f"tags: at most {MAX_TAGS} tags per run; this one has {len(found)}")
    return found


# -- comparing settings -------------------------------------------------------------------------------------------


def config_diff(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The dotted keys whose values differ, each with its value in every run; MISSING if a run does not have it."""
    flat = [flatten(config) for config in configs]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = {key: [one.get(key, MISSING) for one in flat] for key in keys if key not in NOT_COMPARED}
    return {key: values for key, values in sorted(rows.items()) if any(value != values[0] for value in values[1:])}


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key; a list is one value."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
