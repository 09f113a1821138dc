"""`run.json`, the identity of a run with a digest, and checks that a run writes only into its own folder.

`run.json` holds the run's id, the recipe it started with and the run it was forked from. `recipe.json` is the same
recipe for people to read. If the two differ, the recipe was damaged or edited, and resuming would train other weights
than the run that was started. So resuming is refused, with the command that undoes the change and the one that forks
with the new settings. Each checkpoint also holds the header, in case `run.json` itself is damaged.

A run's folder may come from somebody else. A link could make `records.jsonl` lead to one of your files, which resuming
would append to, or `checkpoints` to another run, whose old checkpoints would be removed. Links and named pipes under
the names that Tether writes to are therefore refused.
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


# -- files that lead out of the folder ----------------------------------------------------------------------------


def stray_file(run_folder: Path) -> str | None:
    """Describe a link or special file under a name that Tether writes to; None if there is none."""
    for folder in (run_folder, *(run_folder / name for name in sorted(FOLDERS))):
        if folder.is_symlink() and folder != run_folder:
            return _linked(folder)
        if not folder.is_dir():
            if folder != run_folder and folder.exists():
                return f"{folder} is not a folder: remove it, or restore the folder from a copy"
            continue
        for path in sorted(folder.iterdir()):
            its_own = folder != run_folder or path.name.startswith(".") or path.suffix in KINDS_OF_FILE
            if its_own and (trouble := _trouble(path)):
                return trouble
    return None


def check_own_files(run_folder: Path) -> None:
    """Raise if resuming a run would write, wait or remove outside its folder. The folder itself may be a link."""
    try:
        trouble = stray_file(run_folder)
    except OSError as error:
        raise ConfigError(f"{run_folder} cannot be read: {error.strerror}") from error
    if trouble:
        raise ConfigError(trouble)


def _trouble(path: Path) -> str | None:
    if path.is_symlink():
        return _linked(path)
    other = what_else(path)
    if other in (None, "a folder"):
        return None
    return f"{path} is {other}, and a plain file is expected: remove it, or restore the file from a copy"


def _linked(path: Path) -> str:
    return (
        f"{path} is a link to {path.readlink()}, and a run may write only to its own folder: replace the link by its "
        "target, or move the run's whole folder there and link that"
    )


# -- the header ---------------------------------------------------------------------------------------------------

FORMAT = 1
ID = re.compile(r"[0-9a-zA-Z_-]{1,64}")
MAX_BYTES = 20_000_000  # of a file that describes a run
MAX_NAMED = 4  # settings that a message names


@dataclass(frozen=True)
class RunHeader:
    """The identity of a run, fixed when it starts."""

    uid: str  # unique, and independent of the run's folder and name
    recipe: Mapping[str, Any]  # the content of `recipe.json` at the start
    forked: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the content of `forked.json`; empty: no fork

    def record(self) -> dict[str, Any]:
        """The header as a mapping, as `run.json` and checkpoints hold it."""
        return {"format": FORMAT, "id": self.uid, "recipe": dict(self.recipe), "forked": dict(self.forked)}

    def write(self, folder: Path) -> None:
        """Write `run.json`."""
        write_whole(folder / HEADER, sealed(self.record()))


def header_from(record: Any) -> RunHeader:
    """Parse a header. Raises ValueError if the record is not one."""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError("it is of another version")
    uid, recipe, forked = record.get("id"), record.get("recipe"), record.get("forked")
    if (
        not isinstance(uid, str)
        or not ID.fullmatch(uid)
        or not isinstance(recipe, dict)
        or not isinstance(forked, dict)
    ):
        raise ValueError("it is not the header of a run")
    if forked and not (isinstance(forked.get("step"), int) and isinstance(forked.get("folder"), str)):
        raise ValueError("it does not say where the run was forked")
    return RunHeader(uid, recipe, forked)


def header_file(folder: Path) -> RunHeader | None:
    """Read `run.json`; None if there is none. Raises ValueError if it is damaged."""
    try:
        content = read_plain_json(folder / HEADER, MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(error.strerror or "it cannot be read") from None
    return header_from(unsealed(content))


def read_header(folder: Path, tell: Callable[[str], None] = lambda text: None) -> RunHeader | None:  # noqa: ARG005
    """The header of a run: from `run.json`, else from its newest undamaged checkpoint.

    None for a run of an older version, which wrote no header. `tell` is called if `run.json` is damaged or missing.
    """
    try:
        found, trouble = header_file(folder), "is missing"
    except ValueError as error:
        found, trouble = None, f"is damaged ({error})"
    if found is not None:
        return found
    found = _from_checkpoints(folder)
    if found is not None:
        tell(f"{folder / HEADER} {trouble}; the copy in the newest checkpoint is used.")
    elif (folder / HEADER).exists():
        tell(
            f"{folder / HEADER} {trouble}, and no checkpoint holds a copy: Tether cannot check that {RECIPE} is what "
            "the run started with."
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
    """The recipe that a run started with. Raises ConfigError if `recipe.json` differs from it.

    With `original`, a difference is only reported: a fork uses its own settings anyway.
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
            raise ConfigError(f"{folder / RECIPE} cannot be used ({trouble}): restore it from a copy")
        assert isinstance(found, dict)
        return found
    if trouble or found != header.recipe:
        text = changed_sentence(folder, header.recipe, found if isinstance(found, dict) else None, trouble)
        if not original:
            raise ConfigError(text)
        tell(text.partition(": to train")[0] + ": the settings it started with are used.")
    return dict(header.recipe)


def changed_sentence(folder: Path, began: Mapping[str, Any], now: Mapping[str, Any] | None, trouble: str) -> str:
    """Describe what differs, how to train with the changes, and how to undo them."""
    place, undo = quote(str(folder)), "`tether doctor {} --verify --repair`"
    if now is None:
        return f"{folder / RECIPE} is not what the run started with ({trouble}): restore it with {undo.format(place)}"
    before, after = flat(began), flat(now)
    keys = [key for key in {**before, **after} if key not in before or key not in after or before[key] != after[key]]
    words = ", ".join(_difference(key, before, after) for key in keys[:MAX_NAMED])
    words += f" and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else ""
    flags = [f"--{key} {quote(_flag(after[key]))}" for key in keys if key in before and key in after]
    known = flags if len(flags) == len(keys) <= MAX_NAMED else ["--KEY VALUE"]
    return (
        f"{folder / RECIPE} is not what the run started with ({words}): to train with other settings, fork the run "
        f"with `tether fork {place} {' '.join(known)}`; to undo the change, run {undo.format(place)}"
    )


def _difference(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    if key not in before:
        return f"{key} was added"
    if key not in after:
        return f"{key} was removed"
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
    """The recipe of a run for display: the one in `run.json` if it is undamaged. Empty if none can be read."""
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
    """Describe the damage of `forked.json`; None if it is unchanged."""
    try:
        found = read_plain_json(folder / FORKED, MAX_BYTES) if (folder / FORKED).exists() else {}
    except (OSError, ValueError):
        found = None
    if found == dict(header.forked):
        return None
    return (
        f"{folder / FORKED} is not what the run started with; the origin in run.json is used. "
        f"Restore it with `tether doctor {quote(str(folder))} --verify --repair`."
    )
