"""Ending a run that hangs: a deadlock, a reward that never answers, a device that went away."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tether.errors import Stalled
from tether.protocols import StepHook
from tether.user_code import end_process

GRACE = 5.0  # seconds that writing the traces may take: a disk that hangs is one more way to stall


class Watchdog(StepHook):
    """Ends the process when there is no heartbeat for `seconds`; with 0 seconds it does nothing.

    On expiry the stacks of all threads go to `stall-<time>.txt` in the run's folder and to standard error, below what
    was last being done. Then the process exits with the code of `Stalled`, at once and without cleaning up: a main
    thread that is stuck cannot be asked to do that.

    Code that never lets go of Python's lock would stop the watching thread too. For that case the C timer of
    `faulthandler` stands behind it: stacks to standard error and exit code 1, two graces later.
    """

    def __init__(self, seconds: float, folder: Path | None = None, *, grace: float = GRACE) -> None:
        self.seconds = seconds
        self.folder = None if folder is None else folder.absolute()
        self.grace = grace
        self._phase = "start"
        self._last_beat = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tether-watchdog", daemon=True)

    def begin(self, run: Any = None) -> None:  # noqa: ARG002
        """Start to watch."""
        if self.seconds > 0:
            self.heartbeat(self._phase)
            self._thread.start()

    def __enter__(self) -> Watchdog:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None) -> None:  # noqa: ARG002
        """Stop watching."""
        self._over.set()
        if self.seconds > 0:
            faulthandler.cancel_dump_traceback_later()
            self._thread.join()

    def heartbeat(self, phase: str) -> None:
        """There is progress; `phase` says what comes next, such as `rollout, step 12`."""
        self._phase = phase
        self._last_beat = time.monotonic()
        if self.seconds > 0:
            with suppress(OSError, ValueError, RuntimeError):  # standard error may be closed, or not a file at all
                faulthandler.dump_traceback_later(self.seconds + 2 * self.grace, exit=True)

    def _watch(self) -> None:
        while True:
            left = self._last_beat + self.seconds - time.monotonic()
            if left <= 0.0:
                break
            if self._over.wait(left):
                return
        timer = threading.Timer(self.grace, end_process, (Stalled.exit_code,))
        timer.daemon = True
        timer.start()
        with suppress(Exception):  # nothing may keep a process alive that is known to be stuck
            self._tell()
        end_process(Stalled.exit_code)

    def _tell(self) -> None:
        words = (
            f"no progress for {self.seconds:g} seconds (run.hang_timeout); last: {self._phase}. The stacks of all "
            f"threads follow; the run ends with exit code {Stalled.exit_code}.\n"
        )
        with suppress(OSError):
            if self.folder is not None:
                path = self.folder / f"stall-{time.strftime('%Y%m%d-%H%M%S')}.txt"
                with path.open("w", encoding="utf-8") as file:
                    _dump(file, words)
                    os.fsync(file.fileno())
        _dump(sys.stderr, f"tether: {words}")


def _dump(file: TextIO, words: str) -> None:
    file.write(words)
    file.flush()
    faulthandler.dump_traceback(file=file, all_threads=True)
