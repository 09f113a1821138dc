"""Run trials in processes of their own, several at once, and report what becomes of each."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tether.errors import StorageError
from tether.processes import environment, python
from tether.redact import redact
from tether.store.database.journal import is_being_recorded
from tether.sweeps.manifest import Trial
from tether.sweeps.trial_process import TrialRequest

LOGS = "logs"
PATIENCE = 30.0  # seconds that a trial of a killed sweep gets to end
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class TrialReply:
    """What became of a trial process: done, paused (at its step, or because it was asked to stop) or error."""

    trial: Trial
    ended: str
    steps: int
    reason: str = ""
    exit_code: int = 0


@dataclass
class _Running:
    trial: Trial
    process: subprocess.Popen[str]
    steps: int = 0
    last: dict[str, Any] = field(default_factory=dict[str, Any])


class TrialPool:
    """Up to `jobs` trials at a time. `advance(trial, steps)` is called as they go on."""

    def __init__(
        self, folder: Path, jobs: int, stop: Callable[[], bool], advance: Callable[[Trial, int], None]
    ) -> None:
        self.folder, self.jobs = folder, jobs
        self._stop, self._advance = stop, advance
        self._lines: queue.Queue[tuple[_Running, str | None]] = queue.Queue()
        self._running: list[_Running] = []

    def run(
        self,
        trials: Sequence[Trial],
        request_of: Callable[[Trial], TrialRequest],
        ended: Callable[[TrialReply], bool],
    ) -> bool:
        """Run every trial; `ended` is called with each reply, and returns whether to go on.

        Returns whether all of them ran. On a stop, and where `ended` says so, the running trials write a checkpoint.
        """
        waiting = list(trials)
        going = True
        try:
            while waiting or self._running:
                if going and self._stop():
                    going = False
                    self._ask_to_stop()
                while going and waiting and len(self._running) < self.jobs:
                    self._start(waiting[0], request_of(waiting.pop(0)))
                if not self._running:
                    break
                reply = self._next_reply()
                if reply is not None and not ended(reply) and going:
                    going = False
                    self._ask_to_stop()
        finally:
            self._end_all()
        return going and not waiting

    def _start(self, trial: Trial, request: TrialRequest) -> None:
        _wait_for_the_last_attempt(self.folder / trial.name)
        try:
            (self.folder / LOGS).mkdir(parents=True, exist_ok=True)
            with (self.folder / LOGS / f"{trial.name}.log").open("ab") as log:
                process = subprocess.Popen(  # noqa: S603 (a list of arguments, without a shell)
                    python("-m", "tether.sweeps.trial_process"),
                    env=environment() | {name: str(request.threads) for name in THREADS},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,  # Ctrl-C reaches the sweep alone, which asks its trials to stop
                )
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(request)) + "\n")
            process.stdin.flush()
        except OSError as error:
            raise StorageError(f"a trial could not be started ({error.strerror or error})") from error
        running = _Running(trial, process)
        self._running.append(running)
        threading.Thread(target=self._read, args=(running,), daemon=True, name=trial.name).start()

    def _read(self, running: _Running) -> None:
        assert running.process.stdout is not None
        for line in running.process.stdout:
            self._lines.put((running, line))
        self._lines.put((running, None))

    def _next_reply(self) -> TrialReply | None:
        """Handle the next line of a trial; returns its reply where it was the last."""
        try:
            running, line = self._lines.get(timeout=0.2)
        except queue.Empty:
            return None
        if line is None:
            self._running.remove(running)
            return _reply(running)
        with suppress(ValueError):  # a reward may print to standard output
            said = json.loads(line)
            if isinstance(said, dict) and "step" in said:
                running.steps = int(said["step"])
                self._advance(running.trial, running.steps)
            elif isinstance(said, dict) and "ended" in said:
                running.last = said
        return None

    def _ask_to_stop(self) -> None:
        for running in self._running:
            with suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGTERM)

    def _end_all(self) -> None:
        """Close what is left: only after an exception; a closed standard input ends a trial at once."""
        for running in self._running:
            with suppress(OSError):
                if running.process.stdin is not None:
                    running.process.stdin.close()
            running.process.wait()
        self._running.clear()


def _reply(running: _Running) -> TrialReply:
    code = running.process.wait()
    with suppress(OSError):
        if running.process.stdin is not None:
            running.process.stdin.close()
    last = running.last
    if last.get("ended") in ("done", "paused"):
        return TrialReply(running.trial, last["ended"], int(last["steps"]), exit_code=code)
    if last.get("ended") == "error":  # whatever happened to the process while it shut down
        return TrialReply(running.trial, "error", running.steps, redact(str(last["reason"])), int(last["exit_code"]))
    died = f"its process was killed by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
    return TrialReply(running.trial, "error", running.steps, died, code)


def _wait_for_the_last_attempt(folder: Path) -> None:
    """A trial of a sweep that was killed ends by itself; it may take a moment."""
    until = time.monotonic() + PATIENCE
    while is_being_recorded(folder):
        if time.monotonic() > until:
            raise StorageError(f"another process is training {folder}: wait for it, or stop it, and resume the sweep")
        time.sleep(0.2)
