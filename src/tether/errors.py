"""What can go wrong, by who can repair it. Each kind has an exit code of its own, so that scripts can tell them apart.

0 is success and 1 is a bug in Tether (the only case in which a traceback is shown unasked).
"""

from __future__ import annotations

from typing import Any, ClassVar


class TetherError(Exception):
    """Base of every error that Tether raises on purpose; its message says what is wrong and how to repair it."""

    exit_code: ClassVar[int] = 1


class UsageError(TetherError):
    """The command line makes no sense."""

    exit_code: ClassVar[int] = 2


class ConfigError(UsageError, ValueError):
    """A recipe or a flag is wrong."""


class Stopped(TetherError):  # noqa: N818 (the run's state, not a fault)
    """The run was stopped before its end, and can be resumed. `run` is the Python API's object of it."""

    exit_code: ClassVar[int] = 3
    run: Any = None


class Diverged(TetherError):  # noqa: N818 (the run's state, not a fault)
    """Training cannot go on: losses or gradients are no longer finite."""

    exit_code: ClassVar[int] = 4


class DataError(TetherError, ValueError):
    """Records, prompts or rewards are missing or wrong."""

    exit_code: ClassVar[int] = 5


class StorageError(TetherError):
    """Memory or disk is full, or cannot be written."""

    exit_code: ClassVar[int] = 6


class Stalled(TetherError):  # noqa: N818 (the run's state, not a fault)
    """The run made no progress for `run.hang_timeout`, and was ended by its watchdog."""

    exit_code: ClassVar[int] = 7
