"""What the user agreed to in this process: the folder that they ran from, and what they allowed. Nothing heavy here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Consent:
    """What the user agreed to. `folder` is the one that they ran from, whatever the working folder becomes."""

    folder: Path | None = None  # None: the working folder of the moment
    given: tuple[str, ...] = ()  # by --allow-code
    tell: Callable[[str], None] | None = None  # None, in a program that uses Tether: its own code is its own affair
    ask: Callable[[str], bool] | None = None  # None: there is nobody to ask
    agreed: set[str] = field(default_factory=set[str])  # in this process

    @property
    def root(self) -> Path:
        """The folder below which code is the user's."""
        return (self.folder or Path.cwd()).resolve()

    @property
    def allowed(self) -> tuple[str, ...]:
        """Packages, modules and files that the user allowed, on the command line or in their config."""
        from tether.config.allowed_code import allowed_by_user

        return (*self.given, *allowed_by_user())


_current = Consent()


def current() -> Consent:
    """What holds in this process."""
    return _current


def begin(given: Sequence[str] = ()) -> Consent:
    """From now on the user is told what runs, and asked where there is a terminal. Returns what held before."""
    global _current
    before = _current
    asked = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    try:
        folder = Path.cwd().resolve()
    except OSError:  # it is gone; who looks for code in it says so
        folder = None
    _current = Consent(folder, tuple(given), _tell, _ask_on_terminal if asked else None)
    return before


def restore(before: Consent) -> None:
    """Let hold again what held before."""
    global _current
    _current = before


@contextmanager
def consenting(**changes: object) -> Iterator[Consent]:
    """Another consent for a while."""
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
