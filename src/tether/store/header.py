"""`run.json`: what a run is, sealed when it begins; and checks that a run writes only into its folder.

Whether what a run writes stays in its folder: a link or a named pipe under one of its names would lead elsewhere.

Somebody who sends a run's folder could let `records.jsonl` lead to a file of yours, which going on would add lines to,
or `checkpoints` to another run's, of which old ones would be removed.

`run.json`: what a run is, sealed when it begins: its id, the recipe it was begun with, the run it branched off from.

`recipe.json` says the same to people. A recipe that is not what `run.json` says was damaged or edited, and training on
with it would end with other weights than the run that was begun; so it is refused, with the command that repairs it and
the one that goes on with other settings on purpose. Each checkpoint holds the header as well, for a `run.json` that is
damaged itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from tether.errors import ConfigError
from tether.files import read_plain_json, sealed, unsealed, what_else
from tether.store.folder import FORKED, HEADER, RECIPE, write_whole

FOLDERS = frozenset(("checkpoints", "model", "best", "spool", "faults", "tensorboard"))
KINDS_OF_FILE = (".json", ".jsonl", ".html", ".md")


def stray_file(run_folder: Path) -> str | None:
    """What leads out of a run's folder under a name that Tether writes to, as a sentence; None where nothing does."""
    for folder in (run_folder, *(run_folder / name for name in sorted(FOLDERS))):
        if folder.is_symlink() and folder != run_folder:
            return _linked(folder)
        if not folder.is_dir():
            if folder != run_folder and folder.exists():
                return f"{folder} is no folder: remove it, or put the folder back from a copy"
            continue
        for path in sorted(folder.iterdir()):
            its_own = folder != run_folder or path.name.startswith(".") or path.suffix in KINDS_OF_FILE
            if its_own and (trouble := _trouble(path)):
                return trouble
    return None


def check_own_files(run_folder: Path) -> None:
    """Raise where going on with a run would write, wait or remove elsewhere. The run's folder itself may be a link."""
    try:
        trouble = stray_file(run_folder)
    except OSError as error:
        raise ConfigError(f"{run_folder} cannot be looked through: {error.strerror}") from error
    if trouble:
        raise ConfigError(trouble)


def _trouble(path: Path) -> str | None:
    if path.is_symlink():
        return _linked(path)
    other = what_else(path)
    if other in (None, "a folder"):
        return None
    return f"{path} is {other}, and a plain file is expected: remove it, or put the file back from a copy"


def _linked(path: Path) -> str:
    return (
        f"{path} is a link to {path.readlink()}, and a run writes to its own folder alone: put what it leads to in its "
        "place, or move the run's whole folder there and link that"
    )


FORMAT = 1
ID = re.compile(r"[0-9a-zA-Z_-]{1,64}")
MAX_BYTES = 20_000_000  # of a file that describes a run
MAX_NAMED = 4  # settings that a sentence names


@dataclass(frozen=True)
class RunHeader:
    """What a run was begun as."""

    uid: str  # the run's own, in whatever folder it lies and whatever it is called
    recipe: Mapping[str, Any]  # as `recipe.json` had it
    forked: Mapping[str, Any] = field(default_factory=dict[str, Any])  # as `forked.json` had it; empty: no fork

    def record(self) -> dict[str, Any]:
        """As `run.json` and checkpoints hold it."""
        return {"format": FORMAT, "id": self.uid, "recipe": dict(self.recipe), "forked": dict(self.forked)}

    def write(self, folder: Path) -> None:
        """Write `run.json`."""
        write_whole(folder / HEADER, sealed(self.record()))


def header_from(record: Any) -> RunHeader:
    """The header of a record. Raises ValueError where it is none."""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError("it is of another version")
    uid, recipe, forked = record.get("id"), record.get("recipe"), record.get("forked")
    if (
        not isinstance(uid, str)
        or not ID.fullmatch(uid)
        or not isinstance(recipe, dict)
        or not isinstance(forked, dict)
    ):
        raise ValueError("it is no header of a run")
    if forked and not (isinstance(forked.get("step"), int) and isinstance(forked.get("folder"), str)):
        raise ValueError("it does not say where the run branched off")
    return RunHeader(uid, recipe, forked)


def header_file(folder: Path) -> RunHeader | None:
    """What `run.json` says; None where there is none. Raises ValueError where it is damaged."""
    try:
        content = read_plain_json(folder / HEADER, MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(error.strerror or "it cannot be read") from None
    return header_from(unsealed(content))


def read_header(folder: Path, tell: Callable[[str], None] = lambda text: None) -> RunHeader | None:  # noqa: ARG005
    """What a run was begun as: by `run.json`, else by its newest whole checkpoint.

    None for a run that was begun before there were headers. `tell` hears of a `run.json` that is damaged or gone.
    """
    try:
        found, trouble = header_file(folder), "is missing"
    except ValueError as error:
        found, trouble = None, f"is damaged ({error})"
    if found is not None:
        return found
    found = _from_checkpoints(folder)
    if found is not None:
        tell(f"{folder / HEADER} {trouble}; the newest checkpoint holds the same, and it is used.")
    elif (folder / HEADER).exists():
        tell(
            f"{folder / HEADER} {trouble}, and no checkpoint holds the same: whether {RECIPE} is what the run was "
            "begun with cannot be checked."
        )
    return found


def _from_checkpoints(folder: Path) -> RunHeader | None:
    if not (folder / "checkpoints").is_dir():
        return None
    from tether.store.checkpoints import newest_values

    record = (newest_values(folder / "checkpoints") or {}).get("run")
    try:
        return None if record is None else header_from(record)
    except (ValueError, KeyError):
        return None


def protected_recipe(
    folder: Path,
    tell: Callable[[str], None] = lambda text: None,  # noqa: ARG005
    *,
    original: bool = False,
) -> dict[str, Any]:
    """The recipe that a run was begun with, as it was kept. Raises ConfigError where `recipe.json` is another.

    With `original` another one is told and passed over, for whoever branches off with settings of their own.
    """
    header = read_header(folder, tell)
    try:
        found = read_plain_json(folder / RECIPE, MAX_BYTES)
        trouble = "" if isinstance(found, dict) else "it is not a mapping of keys"
    except OSError as error:
        found, trouble = None, f"it cannot be read: {error.strerror}"
    except ValueError as error:
        found, trouble = None, f"it is damaged: {str(error).partition(chr(10))[0]}"
    if header is None:
        if trouble:
            raise ConfigError(f"{folder / RECIPE} cannot be used ({trouble}): put it back from a copy")
        assert isinstance(found, dict)
        return found
    if trouble or found != header.recipe:
        text = changed_sentence(folder, header.recipe, found if isinstance(found, dict) else None, trouble)
        if not original:
            raise ConfigError(text)
        tell(text.partition(": to go on")[0] + ": the settings it was begun with are used.")
    return dict(header.recipe)


def changed_sentence(folder: Path, began: Mapping[str, Any], now: Mapping[str, Any] | None, trouble: str) -> str:
    """What differs, how to go on with it on purpose, and how to undo it."""
    place, undo = quote(str(folder)), "`tether doctor {} --verify --repair`"
    if now is None:
        return (
            f"{folder / RECIPE} is not what the run was begun with ({trouble}): put it back with {undo.format(place)}"
        )
    before, after = flat(began), flat(now)
    keys = [key for key in {**before, **after} if key not in before or key not in after or before[key] != after[key]]
    words = ", ".join(_difference(key, before, after) for key in keys[:MAX_NAMED])
    words += f" and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else ""
    flags = [f"--{key} {quote(_flag(after[key]))}" for key in keys if key in before and key in after]
    known = flags if len(flags) == len(keys) <= MAX_NAMED else ["--KEY VALUE"]
    return (
        f"{folder / RECIPE} is not what the run was begun with ({words}): to go on with other settings, branch off "
        f"with `tether fork {place} {' '.join(known)}`; to undo the change, {undo.format(place)}"
    )


def _difference(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    if key not in before:
        return f"{key} was not there"
    if key not in after:
        return f"{key} is gone"
    return f"{key} is {json.dumps(after[key])}, was {json.dumps(before[key])}"


def _flag(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def flat(record: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key; a list is one value."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def kept_recipe(folder: Path) -> dict[str, Any]:
    """The recipe of a run, to find its way by: the sealed one where it is whole. Empty where none can be read."""
    try:
        header = header_file(folder)
        return dict(header.recipe) if header is not None else read_plain_json(folder / RECIPE, MAX_BYTES)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        return read_plain_json(folder / RECIPE, MAX_BYTES)
    except (OSError, ValueError):
        return {}


def origin_trouble(folder: Path, header: RunHeader) -> str | None:
    """What is wrong with `forked.json`; None where it is what the run was begun with."""
    try:
        found = read_plain_json(folder / FORKED, MAX_BYTES) if (folder / FORKED).exists() else {}
    except (OSError, ValueError):
        found = None
    if found == dict(header.forked):
        return None
    return (
        f"{folder / FORKED} is not what the run was begun with; run.json says where it branched off, and that is used. "
        f"Put it back with `tether doctor {quote(str(folder))} --verify --repair`."
    )
