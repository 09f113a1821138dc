"""A launcher whose ranks are forked from this process: everything is imported, so a restart takes a second."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import alembic.command  # noqa: F401 (imported when a store is made: here it is, once)
import torch

from tether.cli import main
from tether.distributed.launch import RankProcesses, Supervisor, free_port

PIDS = "TETHER_TEST_PIDS"  # the folder where each rank writes its process id


class ForkedRank:
    """A forked process, with what a launcher asks of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(9)


def forked_ranks(words: Sequence[str], count: int, variables: Mapping[str, str]) -> list[ForkedRank]:
    """The `Start` of a supervisor: ranks of this very program."""
    port = free_port()
    return [ForkedRank(_forked(words, rank, count, port, variables)) for rank in range(count)]


def _forked(words: Sequence[str], rank: int, count: int, port: int, variables: Mapping[str, str]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads: none of ours compute
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), **variables}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if folder := os.environ.get(PIDS):
            place = Path(folder) / str(rank)
            place.with_suffix(".new").write_text(str(os.getpid()))
            place.with_suffix(".new").rename(place)
        if rank:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = main(list(words))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def launched(words: Sequence[str], count: int, restarts: int, least: int, pids: Path) -> tuple[ForkedRank, int]:
    """A launcher in a forked process of its own, and where its output and that of its ranks is read."""
    pids.mkdir(parents=True, exist_ok=True)
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.close(write)
        return ForkedRank(child), read
    code = 1
    try:
        os.environ[PIDS] = str(pids)
        os.close(read)
        os.dup2(write, 1)
        os.dup2(write, 2)
        sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115 (a test may have its own)
        code = Supervisor(RankProcesses(forked_ranks)).run(words, count, restarts, least)
    finally:
        os._exit(code)
