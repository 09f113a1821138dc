"""A rollout worker of Tether's own (`tether worker`), as the run sees it: over HTTP, or started here as a process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

from tether.errors import WorkersLost
from tether.http_client import Body, PostError, post
from tether.processes import environment, python
from tether.rollout.messages import (
    ChunkRequest,
    ModelToLoad,
    Sampler,
    WorkerGone,
    error_from,
    unpack_rollouts,
)
from tether.rollout.weights import VERSION, Snapshot, unpack
from tether.types import Rollout

TOKEN_VARIABLE = "TETHER_WORKER_TOKEN"  # noqa: S105 (the variable's name, not a secret)
HEALTH_SECONDS = 10.0
LOAD_SECONDS = 3600.0  # for a model that the worker may have to fetch first
START_SECONDS = 300.0  # for a process to import what it needs
MAX_BYTES = 1 << 32  # of a response
ROOT = str(Path(__file__).parents[2])  # the folder from which `tether` is imported
OTHER_WEIGHTS = "status_409"
REFUSED = ("status_400", "status_422")


class NativeWorker(Sampler):
    """A worker at a URL. What it holds is known from its answers, never assumed."""

    def __init__(self, url: str, token: str, model: ModelToLoad, timeout: float, *, shares_files: bool = False) -> None:
        """`timeout` is for one chunk; with `shares_files` the worker reads weights from the file of the snapshot."""
        self.url, self.token, self.timeout, self.shares_files = url.rstrip("/"), token, timeout, shares_files
        self.name = f"the rollout worker at {self.url}"
        self.model, self.model_digest = model, model.digest()
        self.held: tuple[str, int] | None = None  # digest and version of the weights that it was given last
        self.healed = 0  # how often it held other weights than it should

    def connect(self) -> None:
        """See whether it is up, and is a worker."""
        self.held = None
        try:
            answer = json.loads(self._ask("/health", None, HEALTH_SECONDS))
        except PostError as error:
            raise WorkerGone(f"{self.name} cannot be reached ({error.reason})") from error
        except ValueError as error:
            raise WorkerGone(f"{self.name} is no rollout worker: its answer is not JSON") from error
        if not isinstance(answer, dict) or answer.get("worker") != VERSION:
            raise WorkerGone(f"{self.name} is no rollout worker of this version: start it with `tether worker`")

    def sample(self, request: ChunkRequest, snapshot: Snapshot) -> list[Rollout]:
        """Sample, giving the worker its model and weights where it does not hold them. A wrong answer is not used."""
        asked = {
            **request.record(),
            "version": VERSION,
            "model": self.model_digest,
            "policy_version": snapshot.version,
            "weights": snapshot.digest,
        }
        wrong = ""
        for _ in range(2):  # a worker that was started again between two calls is given the weights once more
            if self.held != (snapshot.digest, snapshot.version):
                self._give(snapshot)
            about, columns = self._generate(asked)
            if about is None:
                wrong = "it says that it holds other weights right after it was given them"
            elif (about.get("weights"), about.get("policy_version")) != (snapshot.digest, snapshot.version):
                wrong = (
                    f"it sampled with version {about.get('policy_version')}, weights {str(about.get('weights'))[:12]}, "
                    f"where version {snapshot.version}, weights {snapshot.digest[:12]}, were asked for"
                )
            else:
                return unpack_rollouts(about.get("rollouts"), columns, request.prompts)
            self.held = None
            self.healed += 1
        raise WorkersLost(
            f"{self.name} answered with wrong weights twice ({wrong}), and its rollouts were not used: end it, start "
            "`tether worker` again, and resume the run"
        )

    def _generate(self, asked: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """The answer; None where it holds other weights."""
        try:
            return unpack(self._ask("/generate", json.dumps(asked).encode(), self.timeout))
        except PostError as error:
            if error.reason == OTHER_WEIGHTS:
                return None, {}
            raise self._failure(error, "sampling") from error
        except ValueError as error:
            raise WorkerGone(f"{self.name} sent an answer that cannot be read ({error})") from error

    def _give(self, snapshot: Snapshot) -> None:
        """Have it hold the model and these weights."""
        try:
            model = {"version": VERSION, "model": self.model.record()}
            self._ask("/model", json.dumps(model).encode(), LOAD_SECONDS)
            if self.shares_files:
                held = self._ask("/weights-file", json.dumps({"file": snapshot.path.name}).encode(), LOAD_SECONDS)
            else:
                held = self._ask("/weights", snapshot.path.read_bytes(), LOAD_SECONDS)
            found = json.loads(held).get("weights")
        except PostError as error:
            raise self._failure(error, "loading") from error
        except ValueError as error:
            raise WorkerGone(f"{self.name} sent an answer that cannot be read ({error})") from error
        if found != snapshot.digest:
            raise WorkersLost(
                f"{self.name} holds other weights ({str(found)[:12]}) than it was given ({snapshot.digest[:12]}): its "
                f"base model is not the run's, though it has the same path, {self.model.path}; copy the run's there"
            )
        self.held = (snapshot.digest, snapshot.version)

    def _ask(self, path: str, body: Body, seconds: float) -> bytes:
        return post(f"{self.url}{path}", body, token=self.token, timeout_seconds=seconds, max_bytes=MAX_BYTES)

    def _failure(self, error: PostError, doing: str) -> Exception:
        if error.reason in REFUSED:
            with contextlib.suppress(ValueError):
                return error_from(json.loads(error.body), self.name)
        if error.reason == "status_401":
            return WorkersLost(f"{self.name} refuses the token: set {TOKEN_VARIABLE} to the one it was started with")
        said = f": {error.body[:300].decode(errors='replace')}" if error.body else ""
        return WorkerGone(f"{self.name} failed while {doing} ({error.reason}{said})")


class LocalWorker(NativeWorker):
    """A worker process on this machine. It is started again where it died, and ends when this process ends."""

    def __init__(self, number: int, token: str, model: ModelToLoad, timeout: float, folder: Path) -> None:
        super().__init__("http://127.0.0.1", token, model, timeout, shares_files=True)
        self.name = f"rollout worker {number}"
        self.folder = folder  # of the snapshots
        self.process: subprocess.Popen[bytes] | None = None

    def connect(self) -> None:
        """Start it where it does not run, or does not answer."""
        try:
            if self.process is None or self.process.poll() is not None:
                raise WorkerGone(f"{self.name} does not run")
            super().connect()
        except WorkerGone:
            self.close()
            self._start()
            super().connect()

    def _start(self) -> None:
        # Its standard input is a pipe whose other end closes with this process, however that ends.
        process = subprocess.Popen(  # noqa: S603 (this Python and our own words)
            python(
                *("-m", "tether", "worker", "--listen", "127.0.0.1:0", "--json"),
                *("--weights-dir", str(self.folder), "--exit-with-stdin"),
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(ROOT) | {TOKEN_VARIABLE: self.token},
            start_new_session=True,  # Ctrl-C is for the run, which ends its workers
        )
        self.process = process
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
        line = process.stdout.readline() if ready else b""
        try:
            self.url = str(json.loads(line)["url"])
        except (ValueError, KeyError, TypeError):
            self.close()
            raise WorkerGone(f"{self.name} ended as it started (exit code {process.returncode})") from None

    def close(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # it leads its group, and writes nothing
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
