"""An exception of a user's code in one line: its type, its text, and the line of the user's file that raised it."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

MAX_TEXT = 300  # characters of an exception's own text
TETHER = str(Path(__file__).parents[1])
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def explain(error: BaseException) -> str:
    """Such as `KeyError: '11' (mine.py, line 9, in score: return table[answer])`."""
    said = _text(error)
    said = f"{said[:MAX_TEXT]}..." if len(said) > MAX_TEXT else said
    if isinstance(error, SystemExit):
        said = f"the code called sys.exit({said})"
    words = f"{type(error).__name__}: {said}" if said else type(error).__name__
    frame = _frame(error)
    if frame is None:
        return words
    source = (frame.line or "").strip()
    return f"{words} ({_shown(frame.filename)}, line {frame.lineno}, in {frame.name}{f': {source}' if source else ''})"


def _text(error: BaseException) -> str:
    try:
        return " ".join(str(error)[: 2 * MAX_TEXT].split())
    except Exception:  # an exception of the user's own may have any `__str__`
        return ""


def _frame(error: BaseException) -> traceback.FrameSummary | None:
    """The deepest line of the user's own code; without one, the deepest of a library."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((TETHER, "<frozen"))
    ]
    own = [frame for frame in frames if not frame.filename.startswith(INSTALLED)]
    return (own or frames or [None])[-1]


def _shown(filename: str) -> str:
    """Relative to the working folder, where the file is in it."""
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except ValueError:
        return filename
