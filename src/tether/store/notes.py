"""A run's note, tags and group, and how the settings of several runs differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import update
from sqlalchemy.exc import SQLAlchemyError

from tether.config.notes import MAX_GROUP, MAX_NOTE, MAX_TAGS, TAG
from tether.errors import ConfigError, StorageError
from tether.store.database.schema import runs
from tether.store.read import OpenWorkspace, RunSummary

NOT_COMPARED = ("run.name", "run.directory", "run.note", "run.tags", "run.group")
"""Settings in which any two runs differ, or that say nothing about training."""
MISSING = "(not a setting)"


@dataclass(frozen=True)
class RunNotes:
    """What people say about a run."""

    note: str = ""
    tags: tuple[str, ...] = ()
    group: str = ""


def change_notes(opened: OpenWorkspace, run: RunSummary, changes: Mapping[str, Any]) -> RunNotes:
    """Change the note, the tags or the group of a run, and leave the others as they are."""
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
    """Each tag once, in the order given."""
    found = tuple(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))
    wrong = next((tag for tag in found if not TAG.fullmatch(tag)), None)
    if wrong is not None:
        raise ConfigError(
            f"tags: {wrong[:60]!r} is not a tag; use up to 40 letters, digits, dots, dashes and underscores"
        )
    if len(found) > MAX_TAGS:
        raise ConfigError(f"tags: at most {MAX_TAGS} tags a run; these are {len(found)}")
    return found


# -- settings side by side ----------------------------------------------------------------------------------------


def config_diff(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The dotted keys in which the settings differ, each with its value in every run; MISSING where a run has none."""
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
