"""`tether doctor --verify`: check that every record of a run is what was written; `--repair` restores what it can."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from tether.errors import ConfigError, TetherError
from tether.files import files_damage, read_plain, read_plain_json, recover
from tether.store.database.apply import apply_record
from tether.store.database.journal import Spool, is_being_recorded
from tether.store.database.open import Workspace, open_engine
from tether.store.database.records import StoreRecord, read_log
from tether.store.database.verify_rows import duplicate_ids, file_faults, reason, vote_faults
from tether.store.folder import FINISHED, FORKED, HEADER, RECIPE, RunFolder, write_whole
from tether.store.header import (
    RunHeader,
    changed_sentence,
    check_own_files,
    header_file,
    origin_trouble,
    read_header,
    stray_file,
)
from tether.store.history import DEPTHS, settle_history, take_over


@dataclass
class Verified:
    """What was checked, what is wrong, and what was repaired."""

    name: str
    checked: list[str] = field(default_factory=list[str])
    faults: list[str] = field(default_factory=list[str])
    repaired: list[str] = field(default_factory=list[str])

    def as_json(self) -> dict[str, Any]:
        """The result as plain data."""
        return {"name": self.name, "checked": self.checked, "faults": self.faults, "repaired": self.repaired}


def run_folders(directory: Path) -> list[Path]:
    """Every run's folder in a workspace."""
    found = {path.parent for depth in DEPTHS for name in (HEADER, RECIPE) for path in directory.glob(f"{depth}/{name}")}
    return sorted(found)


def verify_run(workspace: Workspace, folder: Path, *, repair: bool = False) -> Verified:
    """Check everything in a run's folder and its records in the store."""
    found = Verified(workspace.name_of(folder))
    if repair and is_being_recorded(folder):
        raise ConfigError(f"--repair: {folder} is being trained by another process; wait for it, or stop it")
    if repair:
        check_own_files(folder)
    elif trouble := stray_file(folder):
        found.faults.append(trouble)
    _check_header(folder, found, repair)
    _check_finish(folder, found, repair)
    done = _check_checkpoints(folder, found)
    for place in (folder / "best", folder / "model"):
        if repair:
            recover(place)
        if place.is_dir():
            found.checked.append(place.name)
            if damage := files_damage(place):
                found.faults.append(f"{damage}: restore it from a copy, or save it again with `tether export`")
    _check_pending(folder, found)
    _check_history(workspace, folder, done, found, repair)
    return found


def verify_store(workspace: Workspace) -> Verified:
    """Check the rest of a store: the file itself, items and votes, and that no two runs have one id."""
    found = Verified(workspace.place, ["the file", "ids of runs", "items and votes"])
    if workspace.file is not None and not workspace.file.is_file():
        found.faults.append(f"{workspace.place} does not exist: resuming a run or --repair creates it again")
        return found
    try:
        engine = open_engine(workspace)
        try:
            with engine.connect().execution_options(reads_only=True) as connection, connection.begin():
                found.faults += file_faults(connection, workspace)
                found.faults += duplicate_ids(connection, workspace.key)
                found.faults += vote_faults(connection, workspace.key)
        finally:
            engine.dispose()
    except (SQLAlchemyError, OSError, TetherError) as error:
        found.faults.append(f"{workspace.place} cannot be read ({reason(error)}): restore it from a copy")
    return found


# -- the run's folder ---------------------------------------------------------------------------------------------


def _check_header(folder: Path, found: Verified, repair: bool) -> None:
    found.checked += [HEADER, RECIPE]
    try:
        header, trouble = header_file(folder), None
    except (ValueError, KeyError) as error:
        header, trouble = None, f"{folder / HEADER} is damaged ({error})"
    if header is None:
        header = read_header(folder)
        if header is None and trouble is not None:
            header = _header_by_recipe(folder)
        if header is not None:
            _put_back(found, trouble or f"{folder / HEADER} is missing", HEADER, repair, lambda: header.write(folder))
    if header is None:
        _check_old_recipe(folder, found)
        return
    now = _json(folder / RECIPE)
    if now != header.recipe:
        text = changed_sentence(folder, header.recipe, now if isinstance(now, dict) else None, "it cannot be read")
        _put_back(found, text, RECIPE, repair, lambda: write_whole(folder / RECIPE, dict(header.recipe)))
    if trouble := origin_trouble(folder, header):
        _put_back(found, trouble, FORKED, repair, lambda: _write_origin(folder, header))


def _header_by_recipe(folder: Path) -> RunHeader | None:
    """Rebuild a header that is damaged and in no checkpoint: only `recipe.json` and the log are left."""
    recipe, log = _json(folder / RECIPE), read_log(folder)
    if not isinstance(recipe, dict) or log is None or log.start is None:
        return None
    return RunHeader(str(log.start["uid"]), recipe, _json(folder / FORKED) or {})


def _check_old_recipe(folder: Path, found: Verified) -> None:
    if not isinstance(_json(folder / RECIPE), dict):
        found.faults.append(f"{folder / RECIPE} is damaged: restore it from a copy")


def _write_origin(folder: Path, header: RunHeader) -> None:
    if header.forked:
        write_whole(folder / FORKED, dict(header.forked))
    else:
        (folder / FORKED).unlink(missing_ok=True)


def _put_back(found: Verified, text: str, name: str, repair: bool, write: Any) -> None:
    if not repair:
        found.faults.append(text)
        return
    write()
    found.repaired.append(f"{name} was restored")


def _json(path: Path) -> Any:
    try:
        return read_plain_json(path)
    except (OSError, ValueError):
        return None


def _check_finish(folder: Path, found: Verified, repair: bool) -> None:
    run = RunFolder(folder)
    if run.finish_is_damaged:
        text = f"{folder / FINISHED} is damaged and is ignored: `tether resume {folder}` writes it again"
        _put_back(found, text, f"{FINISHED}: the damaged one", repair, (folder / FINISHED).unlink)
    elif run.is_finished:
        found.checked.append(FINISHED)


def _check_checkpoints(folder: Path, found: Verified) -> int:
    """Check every checkpoint byte by byte; returns the step of the newest undamaged one."""
    from tether.store import checkpoints

    run = RunFolder(folder)
    done = run.steps_taken if run.is_finished else 0
    for step, path in checkpoints.listed(run.checkpoints):
        found.checked.append(path.name)
        damage = checkpoints.damage(path)
        if damage is None:
            done = max(done, step)
        else:
            found.faults.append(f"{damage}: resuming skips it and uses an older one")
    return done


def _check_pending(folder: Path, found: Verified) -> None:
    for path in Spool(folder).files():
        found.checked.append(path.name)
        try:
            StoreRecord.from_bytes(read_plain(path))
        except (OSError, ValueError) as error:
            found.faults.append(f"{path} waits for the store and is damaged ({error}): it will be set aside")


def _check_history(workspace: Workspace, folder: Path, done: int, found: Verified, repair: bool) -> None:
    found.checked.append("records")
    header = read_header(folder)
    if repair:
        _enter(workspace, folder, header)
    if not repair and workspace.file is not None and not workspace.file.is_file():
        found.faults.append(f"{workspace.place} does not exist: `tether resume {folder}` or --repair creates it again")
        return
    first = int((header.forked if header is not None else {}).get("step", 0))
    settled = settle_history(workspace, folder, first, done, repair=repair)
    if not repair:
        found.faults += settled.faults
        return
    found.repaired += [text for text in settled.told if "were restored" in text]
    found.faults += [text for text in settled.told if "were restored" not in text]


def _enter(workspace: Workspace, folder: Path, header: RunHeader | None) -> None:
    """Enter the run in the store, from the start record of the run's log."""
    if header is not None:
        identity = take_over(workspace, folder, header, is_new=False)
        if identity.header != header:
            identity.header.write(folder)
    log = read_log(folder)
    if log is None or log.last_start is None:
        return
    name, state = workspace.name_of(folder), "done" if RunFolder(folder).is_finished else "stopped"
    start = StoreRecord("start", {**log.last_start, "name": name, "resumes": True})
    try:
        engine = open_engine(workspace)
        with engine.begin() as connection:
            for record in (start, StoreRecord("state", {"state": state, "time": log.last_start["time"]})):
                apply_record(connection, workspace.key, name, record)
        engine.dispose()
    except (SQLAlchemyError, OSError, TetherError, LookupError):
        pass  # settle_history reports what is wrong


def summary_lines(results: Iterable[Verified]) -> list[str]:
    """The lines to print."""
    lines: list[str] = []
    for one in results:
        verdict = "whole" if not one.faults else f"{len(one.faults)} faults"
        lines.append(f"{one.name}: {len(one.checked)} things checked, {verdict}")
        lines += [f"  repaired: {text}" for text in one.repaired]
        lines += [f"  fault: {text}" for text in one.faults]
    return lines
