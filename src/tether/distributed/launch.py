"""`tether train ... --nproc N`: starts N ranks on this machine, passes on signals, and ends with one exit code.

`torchrun --nproc-per-node N -m tether train ...` does the same by PyTorch's own launcher, also over several machines.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from tether.errors import RankLost, UsageError
from tether.processes import environment, python

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what a launcher tells a rank
LAUNCHER = "TETHER_LAUNCHER"  # the process that started the ranks, where that is `tether` itself
GRACE = 15.0  # seconds in which rank 0 ends by itself once another rank is gone
POLL = 0.05


def started_as_rank() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return all(name in os.environ for name in ENVIRONMENT) and int(os.environ["WORLD_SIZE"]) > 1


def launch(words: Sequence[str], count: int) -> int:
    """Run `tether` with these words as `count` ranks on this machine; returns rank 0's exit code."""
    if count < 1:
        raise UsageError(f"--nproc is {count}: it must be at least 1")
    ranks = RankProcesses(words, count)
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, ranks.pass_on) for number in signals}
    try:
        return ranks.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        ranks.kill()


class RankProcesses:
    """The processes. Each is in a session of its own, so that Ctrl-C reaches rank 0 once, through the launcher."""

    def __init__(self, words: Sequence[str], count: int) -> None:
        shared = environment() | {
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            LAUNCHER: str(os.getpid()),
        }
        shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
        self.processes = [
            subprocess.Popen(  # noqa: S603 (our own command line)
                python("-m", "tether", *words),
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=None if rank == 0 else subprocess.DEVNULL,
                start_new_session=True,
            )
            for rank in range(count)
        ]

    def pass_on(self, number: int, _: object) -> None:
        """Rank 0 stops after the step at hand, or at once when it is asked again."""
        with suppress(ProcessLookupError):
            self.processes[0].send_signal(number)

    def wait(self) -> int:
        """Until rank 0 has ended, or cannot go on without a rank that has."""
        first, *others = self.processes
        while first.poll() is None:
            lost = next((rank for rank, each in enumerate(others, 1) if each.poll() not in (None, 0)), None)
            if lost is not None:
                return self._wait_for_first(lost)
            time.sleep(POLL)
        if first.returncode >= 0:
            return first.returncode
        _say(f"rank 0 was killed by signal {-first.returncode}: resume the run")
        return RankLost.exit_code

    def _wait_for_first(self, lost: int) -> int:
        """Rank 0 notices that its connection is gone, and says so; if it cannot, this does."""
        with suppress(subprocess.TimeoutExpired):
            if (code := self.processes[0].wait(GRACE)) >= 0:
                return code
        _say(f"rank {lost} ended (exit code {self.processes[lost].returncode}), and rank 0 cannot go on without it")
        return RankLost.exit_code

    def kill(self) -> None:
        """End every rank that is left; they write nothing, so nothing is half written."""
        for process in self.processes[1:]:
            with suppress(subprocess.TimeoutExpired):
                process.wait(2.0 if self.processes[0].poll() is not None else 0.0)
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _say(text: str) -> None:
    print(f"tether: {text}", file=sys.stderr, flush=True)


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]
