"""Whether what a run writes stays in its folder: a link or a named pipe under one of its names would lead elsewhere.

Somebody who sends a run's folder could let `records.jsonl` lead to a file of yours, which going on would add lines to,
or `checkpoints` to another run's, of which old ones would be removed.
"""

from __future__ import annotations

from pathlib import Path

from tether.errors import ConfigError
from tether.plain_file import what_else

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
