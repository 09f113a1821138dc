"""Start Python so that a file in the working folder cannot hide a module.

This module imports only modules that are frozen into Python. It has no `from __future__` import either, because the
working folder could contain a file of that name.
"""

import os
import sys

SAFE = "-P"  # keeps the working folder and the script's folder off Python's search path


def python(*words: str) -> list[str]:
    """The command that starts this Python with these arguments."""
    return [sys.executable, SAFE, *words]


def environment(*first: str) -> dict[str, str]:
    """Environment variables for a Python started by this process; `first` are folders to put first on its path.

    Empty entries of PYTHONPATH are left out, because Python reads them as the working folder.
    """
    entries = [*first, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    given = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, entries))}
    if not given["PYTHONPATH"]:
        del given["PYTHONPATH"]
    return given


def ranks_of_machine(count: int) -> int:
    """How many of `count` ranks a machine has: torchrun says it, and without it all are on this one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", count))


def leave_working_folder() -> None:
    """Remove the working folder from the search path, or move it to the end if Tether itself lies in it."""
    try:
        here = os.path.realpath(os.getcwd())  # noqa: PTH109 (pathlib could be a file of the working folder)
    except OSError:  # the folder was deleted, so nothing can be imported from it
        return
    home = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))  # noqa: PTH120
    kept = [entry for entry in sys.path if entry and os.path.realpath(entry) != here]
    sys.path[:] = [*kept, here] if home == here else kept
