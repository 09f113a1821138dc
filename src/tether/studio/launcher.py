"""Runs that the page starts: separate processes, which continue after the server ends.

Each process leads a new process group and writes to a log file, so a closed terminal or a dead server does not affect
it. The server can stop only the processes that it started itself.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.errors import StorageError
from tether.processes import environment, python
from tether.redact import redact
from tether.rewards import consent
from tether.studio.replies import Refused

FOLDER = ".studio"  # in the workspace: logs and plans
TAIL = 4000  # characters of a log that are shown
MAX_RUNNING = 8


@dataclass(frozen=True)
class RunProcess:
    """A process that this server started; `name` is the run that it starts or resumes."""

    id: str
    name: str
    kind: str
    started: float
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def is_running(self) -> bool:
        """Whether the process is still running."""
        return self.process.poll() is None

    def as_json(self) -> dict[str, Any]:
        """As JSON for the page. Exit code 3 means that the run was stopped and can be resumed."""
        code = self.process.poll()
        state = "running" if code is None else "done" if code == 0 else "stopped" if code == 3 else "failed"
        shown = {"id": self.id, "name": self.name, "kind": self.kind, "state": state, "exit_code": code}
        return shown | {"started": self.started, "log": _tail(self.log)}


class Launcher:
    """Starts and stops processes in a workspace."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._jobs: dict[str, RunProcess] = {}
        self._lock = threading.Lock()

    def tether(self, name: str, kind: str, words: Sequence[str]) -> RunProcess:
        """Start `tether WORDS`, with the --allow-code of this server."""
        return self.python(name, kind, ["-m", "tether", *words, *allowed_words()])

    def python(self, name: str, kind: str, words: Sequence[str]) -> RunProcess:
        """Start this Python with the given arguments."""
        with self._lock:
            self._check_room(name)
            job_id = secrets.token_hex(6)
            log = self.folder() / f"{job_id}.log"
            try:
                with log.open("wb") as file:
                    process = subprocess.Popen(  # noqa: S603 (a list of arguments, without a shell)
                        python(*words),
                        env=environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
            except OSError as error:
                raise StorageError(f"a process could not be started ({error})") from error
            job = RunProcess(job_id, name, kind, time.time(), log, process)
            self._jobs[job_id] = job
            return job

    def stop(self, name: str) -> RunProcess:
        """Stop the process of a run with a signal: it writes a checkpoint first."""
        for job in self._jobs.values():
            if job.is_running and (job.name == name or name.startswith(f"{job.name}/")):
                os.killpg(job.process.pid, signal.SIGTERM)
                return job
        raise Refused(409, f"{name} is not running, or was not started from this page: stop it where it was started")

    def jobs(self) -> list[RunProcess]:
        """The started processes, the newest first."""
        return list(self._jobs.values())[::-1]

    def folder(self) -> Path:
        """The folder of logs and plans."""
        folder = self.directory / FOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot write to {folder} ({error.strerror})") from error
        return folder

    def _check_room(self, name: str) -> None:
        running = [job for job in self._jobs.values() if job.is_running]
        if any(job.name == name for job in running):
            raise Refused(409, f"another process is already working on {name}")
        if len(running) >= MAX_RUNNING:
            raise Refused(409, f"{MAX_RUNNING} processes are running already: wait for one, or stop one")


def allowed_words() -> list[str]:
    """The --allow-code arguments of `tether studio`, for the commands that it starts."""
    return [f"--allow-code={name}" for name in consent.current().given]


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL))
            return redact(file.read().decode("utf-8", "replace"))
    except OSError:
        return ""
