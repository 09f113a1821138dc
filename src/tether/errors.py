"""Errors, grouped by who can repair them, and how a command ends: safe streams, one message, an exit code.

Each kind of error has its own exit code, so that scripts can tell them apart. 0 is success. 1 is a bug in Tether, and
the only case that shows a traceback by default.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar

# -- kinds of errors ----------------------------------------------------------------------------------------------


class TetherError(Exception):
    """Base of every error that Tether raises on purpose; the message says what is wrong and how to repair it."""

    exit_code: ClassVar[int] = 1


class UsageError(TetherError):
    """The command line is wrong."""

    exit_code: ClassVar[int] = 2


class ConfigError(UsageError, ValueError):
    """A recipe or a flag is wrong."""


class Stopped(TetherError):  # noqa: N818 (the run's state, not a fault)
    """The run was stopped early and can be resumed. `run` is its object in the Python API."""

    exit_code: ClassVar[int] = 3
    run: Any = None


class Diverged(TetherError):  # noqa: N818 (the run's state, not a fault)
    """Training cannot continue: losses or gradients are no longer finite."""

    exit_code: ClassVar[int] = 4


class DataError(TetherError, ValueError):
    """Records, prompts or rewards are missing or wrong."""

    exit_code: ClassVar[int] = 5


class StorageError(TetherError):
    """Memory or disk is full, or cannot be written."""

    exit_code: ClassVar[int] = 6


class Stalled(TetherError):  # noqa: N818 (the run's state, not a fault)
    """The watchdog ended the run because it made no progress for `run.hang_timeout`."""

    exit_code: ClassVar[int] = 7


class RankLost(TetherError):  # noqa: N818 (the run's state, not a fault)
    """One of the processes that train together ended; the run can be resumed from its last checkpoint."""

    exit_code: ClassVar[int] = 8


class WorkersLost(RankLost):
    """No rollout worker is left; the run can be resumed from its last checkpoint."""


# -- how a command ends -------------------------------------------------------------------------------------------

STORAGE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO}
INPUT_ERRNOS = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EEXIST, errno.ENXIO),
    *(errno.EINVAL, errno.ESPIPE, errno.ENODEV, errno.ENOTEMPTY, errno.EXDEV),
}
# Messages by which torch, the library loader and Python report that memory is short, in errors of other types.
NO_MEMORY = (
    *("allocate memory", "bad_alloc", "out of memory", "start new thread", "failed to map segment", "allocate thread"),
    *("Resource temporarily unavailable", "no memory", "memory exhausted"),
)


def prepare_streams() -> None:
    """Open standard input, output and error if they are closed, and make them able to write any text.

    The next file to be opened, such as the run's database, would otherwise take a closed descriptor's number, and
    messages to standard error would be written into that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # it was closed when Python started
            with suppress(OSError):
                setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            with suppress(OSError, ValueError):
                reconfigure(errors="backslashreplace")  # a lone surrogate, or a locale without this character


def silence(stream: Any) -> None:
    """Redirect a broken stream to /dev/null, so that Python's final flush succeeds."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    with suppress(OSError, ValueError, AttributeError):
        stream.flush()


def flush_output() -> None:
    """Flush standard output; raises StorageError if that fails, and BrokenPipeError if the reader is gone."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence(sys.stdout)
        raise StorageError(f"standard output could not be written: {error.strerror or error}") from error


def judge(error: BaseException) -> tuple[str, int]:
    """The message and the exit code of an error."""
    if isinstance(error, TetherError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C", Stopped.exit_code
    if is_memory(error):
        advice = "lower optimizer.micro_batch_tokens or rollout.max_num_seqs, or give the process more memory"
        return f"out of memory: {advice} ({first_line(error)})", StorageError.exit_code
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
        return f"storage: {error}", StorageError.exit_code
    if isinstance(error, OSError) and error.errno in INPUT_ERRNOS:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror or error}", UsageError.exit_code
    if isinstance(error, RecursionError):
        return "the input is nested too deeply to be read", UsageError.exit_code
    if isinstance(error, ValueError):
        return f"{error} (TETHER_DEBUG=1 shows where)", UsageError.exit_code
    if not isinstance(error, Exception):
        return f"code that the recipe names raised {type(error).__name__}: {first_line(error)}", DataError.exit_code
    return f"this is a bug in Tether, or in code that the recipe names: {type(error).__name__}: {error}", 1


def is_memory(error: BaseException) -> bool:
    """Whether an error, of any type, means that memory is short."""
    # torch's out-of-memory error is recognized by its name, which avoids importing torch.
    for each in _chain(error):
        if isinstance(each, MemoryError) or type(each).__name__ == "OutOfMemoryError":
            return True
        if isinstance(each, OSError) and each.errno in (errno.ENOMEM, errno.EAGAIN):
            return True
        # A Rust library such as tokenizers panics if it cannot start its threads.
        if isinstance(each, (RuntimeError, ImportError, SystemError)) or type(each).__name__ == "PanicException":
            said = str(each)
            if any(words.lower() in said.lower() for words in NO_MEMORY):
                return True
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return str(error).partition("\n")[0] or type(error).__name__
