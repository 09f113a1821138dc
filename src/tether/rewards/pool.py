"""Worker processes and threads for reward calls, with an enforced time limit.

A worker is `python -m tether.rewards.worker`; its first request names the function to import. Requests and replies are
lines of JSON over its pipes. A worker that is lost is replaced. Each worker leads its own process group: Ctrl-C in the
terminal does not reach it, and processes that the function started are killed with it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tether.errors import ConfigError, DataError
from tether.processes import environment, python
from tether.rewards import consent

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(function: Callable[[Item], Result], items: Sequence[Item], at_once: int) -> list[Result]:
    """`[function(item) for item in items]` on up to `at_once` threads.

    The first exception is raised here, and no further item is started. The threads are daemons: neither an exception
    nor Ctrl-C waits for running calls.
    """
    if at_once <= 1 or len(items) <= 1:
        return [function(item) for item in items]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for place in range(len(items)):
        waiting.put(place)
    done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            try:
                place = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((place, function(items[place]), None))
            except BaseException as error:
                done.put((place, None, error))

    for number in range(min(at_once, len(items))):
        threading.Thread(target=work, daemon=True, name=f"tether-reward-{number}").start()
    results: dict[int, Any] = {}
    try:
        while len(results) < len(items):
            place, result, error = done.get()
            if error is not None:
                raise error
            results[place] = result
    finally:
        over.set()
    return [results[place] for place in range(len(items))]


START_SECONDS = 300.0  # time limit for a worker to import the function
ROOT = str(Path(__file__).parents[2])  # the folder from which `tether` is imported
_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class LostError(Exception):
    """A worker gave no reply: `timeout`, or `worker_died` with its exit status."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason, self.text = reason, text


class Worker:
    """One process, used by one thread at a time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(  # noqa: S603 (this Python and a constant)
            python("-m", "tether.rewards.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(ROOT),
            start_new_session=True,
        )

    def ask(self, request: Mapping[str, Any], seconds: float | None) -> dict[str, Any]:
        """The reply to a request. Raises LostError where none arrives in time."""
        line = json.dumps(request).encode() + b"\n"
        expired = threading.Event()

        def cut() -> None:
            expired.set()
            self.kill()

        timer = threading.Timer(seconds, cut) if seconds is not None else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        answer = b""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except (OSError, ValueError):  # the process ended, or another thread closed the pipe
            pass
        finally:
            if timer is not None:
                timer.cancel()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        if expired.is_set():
            raise LostError("timeout", f"the function took more than timeout_seconds = {seconds:g}")
        self.kill()
        raise LostError("worker_died", f"the process that ran the function {ending(self.process.wait())}")

    def kill(self) -> None:
        """Kill the process and everything that it started."""
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg") and self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)  # it leads its group
        self.process.kill()

    def close(self) -> None:
        """Kill it and close its pipes."""
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()


class WorkerPool:
    """Up to `size` workers for one function, started on demand."""

    def __init__(self, setup: Mapping[str, Any], size: int, seconds: float | None, grace: float = 0.0) -> None:
        """`setup` is a worker's first request; `seconds` limits each later one, and `grace` is added to it."""
        now = consent.current()
        self.setup = {**setup, "path": sys.path, "seconds": seconds}
        self.setup |= {"folder": str(now.root), "allowed": list(now.given)}
        self.size, self.seconds, self.grace = size, seconds, grace
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        for _ in range(size):
            self._idle.put(None)
        self._workers: set[Worker] = set()
        self._lock = threading.Lock()
        self._closed = False
        _pools.add(self)

    def describe(self) -> dict[str, Any]:
        """The worker's description of the function; starts a worker where there is none."""
        self._closed = False
        worker = self._idle.get()
        try:
            if worker is None:
                worker = self._start()
            return worker.ask({"describe": True}, START_SECONDS)
        finally:
            self._idle.put(worker)

    def map(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | LostError]:
        """A reply to each request, in order; LostError where the worker was lost, which is then replaced."""
        self._closed = False
        try:
            return in_order(self._ask, requests, self.size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every worker; a later call starts new ones."""
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, set()
        for worker in workers:
            worker.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any] | LostError:
        worker = self._idle.get()
        if worker is not None and worker.process.poll() is not None:
            self._forget(worker)  # it ended between two steps, before this request
            worker = None
        try:
            worker = worker or self._start()
            return worker.ask(request, None if self.seconds is None else self.seconds + self.grace)
        except LostError as lost:
            if worker is not None:
                self._forget(worker)
            worker = None
            return lost
        finally:
            self._idle.put(worker)

    def _start(self) -> Worker:
        worker = Worker()
        with self._lock:
            self._workers.add(worker)
            closed = self._closed
        if closed:
            self._forget(worker)
            raise LostError("worker_died", "the workers are being closed")
        try:
            reply = worker.ask(self.setup, START_SECONDS)
        except LostError as lost:
            self._forget(worker)
            text = f"{self.setup['function']} could not be started in its own process: {lost.text}"
            raise DataError(text) from lost
        if "refused" in reply:
            self._forget(worker)
            raise ConfigError(reply["refused"])
        return worker

    def _forget(self, worker: Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.close()


def close_workers() -> None:
    """End the workers of every pool in this process."""
    for pool in list(_pools):
        pool.close()


atexit.register(close_workers)


def ending(code: int) -> str:
    """A description of how a process ended."""
    if code >= 0:
        return f"ended by itself with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
