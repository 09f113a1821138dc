"""Starting Python so that no file of the working folder hides a module. Only what is frozen into Python is imported.

`from __future__` is an import too, of a file that the working folder could have.
"""

import os
import sys

SAFE = "-P"  # Python then puts neither the working folder nor a script's on its search path


def python(*words: str) -> list[str]:
    """The command that starts this Python with these words."""
    return [sys.executable, SAFE, *words]


def environment(*first: str) -> dict[str, str]:
    """This process's variables for a Python that it starts; `first` are folders to import from before all others.

    An empty entry of PYTHONPATH, which Python reads as the working folder, is left out.
    """
    entries = [*first, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    given = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, entries))}
    if not given["PYTHONPATH"]:
        del given["PYTHONPATH"]
    return given


def leave_working_folder() -> None:
    """Take the working folder off the search path; where Tether itself lies in it, it comes last."""
    try:
        here = os.path.realpath(os.getcwd())  # noqa: PTH109 (pathlib could be a file of the working folder)
    except OSError:  # it is gone, and nothing can be imported from it
        return
    home = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))  # noqa: PTH120
    kept = [entry for entry in sys.path if entry and os.path.realpath(entry) != here]
    sys.path[:] = [*kept, here] if home == here else kept
