"""The user's permissions in this process: the folder that they ran from, and the code that they allowed."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Consent:
    """What the user agreed to. `folder` is the one that they ran from, even if the working folder changes."""

    folder: Path | None = None  # None: the current working folder
    given: tuple[str, ...] = ()  # by --allow-code
    tell: Callable[[str], None] | None = None  # None in a program that uses Tether: it announces nothing
    ask: Callable[[str], bool] | None = None  # None: there is no terminal to ask on
    agreed: set[str] = field(default_factory=set[str])  # in this process

    @property
    def root(self) -> Path:
        """The folder below which code counts as the user's."""
        return (self.folder or Path.cwd()).resolve()

    @property
    def allowed(self) -> tuple[str, ...]:
        """Packages, modules and files that the user allowed, on the command line or in their config file."""
        from tether.config.allowed_code import allowed_by_user

        return (*self.given, *allowed_by_user())


_current = Consent()


def current() -> Consent:
    """The consent of this process."""
    return _current


def begin(given: Sequence[str] = ()) -> Consent:
    """Announce from now on what runs, and ask where there is a terminal. Returns the previous consent."""
    global _current
    before = _current
    asked = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    try:
        folder = Path.cwd().resolve()
    except OSError:  # the folder is gone; locating code in it reports that
        folder = None
    _current = Consent(folder, tuple(given), _tell, _ask_on_terminal if asked else None)
    return before


def restore(before: Consent) -> None:
    """Restore an earlier consent."""
    global _current
    _current = before


@contextmanager
def consenting(**changes: object) -> Iterator[Consent]:
    """Use a changed consent within a `with` block."""
    global _current
    before = _current
    _current = dataclasses.replace(before, **changes)  # pyright: ignore[reportArgumentType]
    try:
        yield _current
    finally:
        _current = before


def _tell(text: str) -> None:
    from tether.reports.safe_text import clean

    print(f"tether: {clean(text)}", file=sys.stderr, flush=True)


def _ask_on_terminal(question: str) -> bool:
    from tether.reports.safe_text import clean

    print(f"tether: {clean(question)} Allow it? [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except (OSError, ValueError):
        return False
