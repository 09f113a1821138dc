"""Runs of several ranks, forked from this process: each begins with everything imported, so a test takes seconds."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from in_process import attempt

from tether.config.recipes import Recipe
from tether.distributed.launch import free_port
from tether.distributed.start import run_as_rank
from tether.errors import judge
from tether.store.folder import run_path

LIMIT = 60.0  # seconds that a run of several ranks may take


def on_ranks(count: int, command: Callable[[], int]) -> list[int]:
    """Fork `count` ranks, of which rank 0 runs the command; their exit codes."""
    return wait_for(fork_ranks(count, command))


def fork_ranks(count: int, command: Callable[[], int]) -> list[int]:
    """The process ids of `count` forked ranks."""
    port = free_port()
    sys.stdout.flush()
    sys.stderr.flush()
    return [_forked(rank, count, port, command) for rank in range(count)]


def _forked(rank: int, count: int, port: int, command: Callable[[], int]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads: none of ours compute
        process = os.fork()
    if process:
        return process
    code = 1
    try:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        code = run_as_rank(command)
    except BaseException as error:
        message, code = judge(error)
        print(f"tether: rank {rank}: {message}", file=sys.stderr)
        if code == 1:
            traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait_for(processes: list[int]) -> list[int]:
    """Their exit codes; those that do not end within `LIMIT` are killed."""
    codes: dict[int, int] = {}
    until = time.monotonic() + LIMIT
    while len(codes) < len(processes) and time.monotonic() < until:
        for process in processes:
            if process not in codes:
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    codes[process] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for process in processes:
        if process not in codes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            codes[process] = -1000  # hung
    return [codes[process] for process in processes]


def trained(recipe: Recipe, count: int, *, steps: int | None = None) -> Path:
    """Begin the run, or go on with it, on `count` ranks; at most `steps` of its steps. Where it is."""
    if count == 1:
        attempt(recipe, stop_after=steps)
        return run_path(recipe)

    def command() -> int:
        attempt(recipe, stop_after=steps)
        return 0

    codes = on_ranks(count, command)
    assert codes == [0] * count, codes
    return run_path(recipe)
