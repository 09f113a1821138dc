"""`tether train ... --nproc N`: starts N ranks on this machine, passes on signals, and ends with one exit code.

With `--restarts M` it starts all ranks again when one is lost; they resume the run that they began. `torchrun
--nproc-per-node N -m tether train ...` does the same by PyTorch's own launcher, also over several machines.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from tether.errors import RankLost, Stalled, UsageError
from tether.processes import environment, python

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what a launcher tells a rank
LAUNCHER = "TETHER_LAUNCHER"  # the process that started the ranks, where that is `tether` itself
LAUNCH = "TETHER_LAUNCH"  # an id that stays the same when the ranks are started again
FAULT = "TETHER_FAULT"  # why they were started again
LEASH = "TETHER_LEASH"  # set to stdin: the rank ends when its standard input does
RESTARTS_LEFT = "TETHER_RESTARTS_LEFT"
GRACE = 15.0  # seconds in which rank 0 ends by itself once another rank is gone
LAST_WORDS = 2.0  # seconds in which the ranks that are left end, so that the one that was lost is known
POLL = 0.05


@dataclass(frozen=True)
class RanksEnded:
    """How ranks ended. `fault` says which rank was lost, if one was: then they may be started again."""

    code: int
    fault: str = ""


def started_as_rank() -> bool:
    """Whether a launcher started this process as a rank."""
    return all(name in os.environ for name in ENVIRONMENT)


def starts_again() -> bool:
    """Whether the launcher starts the ranks again when one is lost."""
    if RESTARTS_LEFT in os.environ:
        return int(os.environ[RESTARTS_LEFT]) > 0
    done, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return done < most


def launch(words: Sequence[str], count: int, restarts: int = 0, least: int | None = None) -> int:
    """Run `tether` with these words as `count` ranks on this machine; returns rank 0's exit code.

    When a rank is lost, all are started again, at most `restarts` times. With `least`, each time without the rank that
    was lost, down to that many.
    """
    if count < 1 or not 1 <= (least or count) <= count:
        raise UsageError(f"--nproc is {count} and --min-nproc {least}: both must be at least 1, and the first not less")
    return supervise(Supervisor(RankProcesses(local_ranks)), words, count, restarts, least)


def supervise(supervisor: Supervisor, words: Sequence[str], count: int, restarts: int, least: int | None) -> int:
    """Run under a supervisor to which this process passes its signals on."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, supervisor.pass_on) for number in signals}
    try:
        return supervisor.run(words, count, restarts, least or count)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class RankProcess(Protocol):
    """A rank as its launcher sees it; `subprocess.Popen` is one."""

    @property
    def returncode(self) -> Any:
        """The exit code, once `poll` or `wait` saw the end; negative for a signal."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises `subprocess.TimeoutExpired`."""
        ...

    def send_signal(self, sig: int) -> None:
        """Send a signal."""

    def kill(self) -> None:
        """End it at once."""


Start = Callable[[Sequence[str], int, Mapping[str, str]], Sequence[RankProcess]]
"""Starts `tether` with these words as so many ranks; the mapping is for their environment."""


class Runner(Protocol):
    """Runs ranks once."""

    def run(self, words: Sequence[str], count: int, variables: Mapping[str, str]) -> RanksEnded:
        """Until they ended."""
        ...

    def pass_on(self, number: int) -> None:
        """Pass a signal on to rank 0."""


class Supervisor:
    """Runs ranks, and runs them again."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.asked_to_stop = False

    def pass_on(self, number: int, _: object) -> None:
        """Rank 0 stops after the step at hand, or at once when it is asked again."""
        self.asked_to_stop = True
        self.runner.pass_on(number)

    def run(self, words: Sequence[str], count: int, restarts: int, least: int) -> int:
        """Until the run ends, or was started again `restarts` times."""
        variables = {LAUNCHER: str(os.getpid()), LAUNCH: secrets.token_hex(8)}
        fault = ""
        while True:
            ended = self.runner.run(words, count, variables | {FAULT: fault, RESTARTS_LEFT: str(restarts)})
            if not ended.fault or self.asked_to_stop or not restarts:
                if ended.fault and ended.code < 0:
                    say(f"{ended.fault}: resume the run, with as many ranks as you like")
                return ended.code if ended.code >= 0 else RankLost.exit_code
            restarts, fault, count = restarts - 1, ended.fault, max(least, count - 1)
            say(f"{fault}: starting {_ranks(count)} again, {restarts} more times if need be")


class RankProcesses:
    """The runner for ranks that are processes."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.ranks: Sequence[RankProcess] = ()

    def run(self, words: Sequence[str], count: int, variables: Mapping[str, str]) -> RanksEnded:
        """Start them, and leave none behind."""
        self.ranks = self.start(words, count, variables)
        try:
            return wait_for(self.ranks)
        finally:
            end_all(self.ranks)

    def pass_on(self, number: int) -> None:
        """To rank 0, if it lives."""
        for first in self.ranks[:1]:
            with suppress(ProcessLookupError):
                first.send_signal(number)


def local_ranks(words: Sequence[str], count: int, variables: Mapping[str, str]) -> list[subprocess.Popen[bytes]]:
    """Ranks on this machine. Each is in a session of its own, so that Ctrl-C reaches rank 0 once, by the launcher."""
    place = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared = {**environment(), **place, **variables}
    shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    return [
        subprocess.Popen(  # noqa: S603 (our own command line)
            python("-m", "tether", *words),
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.DEVNULL,
            start_new_session=True,
        )
        for rank in range(count)
    ]


def wait_for(ranks: Sequence[RankProcess]) -> RanksEnded:
    """Until rank 0 has ended, or cannot go on without a rank that has."""
    first, *others = ranks
    while first.poll() is None and all(each.poll() in (None, 0) for each in others):
        time.sleep(POLL)
    if first.returncode is None:  # it notices that a connection is gone, and says so; if it cannot, this does
        with suppress(subprocess.TimeoutExpired):
            first.wait(GRACE)
    code = -signal.SIGKILL if first.returncode is None else first.returncode
    return RanksEnded(code, lost_rank(ranks) if is_loss(code) else "")


def end_all(ranks: Sequence[RankProcess]) -> None:
    """End every rank that is left; they write nothing, so nothing is half written."""
    if ranks[0].poll() is not None:
        _wait_a_little(ranks)
    for each in ranks:
        if each.poll() is None:
            each.kill()
            each.wait()


def _wait_a_little(ranks: Sequence[RankProcess]) -> None:
    until = time.monotonic() + LAST_WORDS
    while any(each.poll() is None for each in ranks) and time.monotonic() < until:
        time.sleep(POLL)


def is_loss(code: int) -> bool:
    """Whether rank 0 ended with this code because a rank was lost, itself perhaps: a run may go on after that."""
    return code < 0 or code in (RankLost.exit_code, Stalled.exit_code)


def lost_rank(ranks: Sequence[RankProcess]) -> str:
    """Which rank was lost, in words."""
    _wait_a_little(ranks)
    codes = [each.poll() for each in ranks]
    return fault_of(codes)


def fault_of(codes: Sequence[int | None]) -> str:
    """What exit codes of ranks say; None is a rank that did not end. The others end because one was lost."""
    by_signal = next((rank for rank, code in enumerate(codes) if code is not None and code < 0), None)
    if by_signal is not None:
        return f"rank {by_signal} was killed by signal {-(codes[by_signal] or 0)}"
    if None in codes:
        return f"rank {codes.index(None)} did not answer"
    failed = next((rank for rank, code in enumerate(codes) if code not in (0, RankLost.exit_code)), 0)
    return f"rank {failed} ended with exit code {codes[failed]}"


def _ranks(count: int) -> str:
    return "all ranks" if count > 1 else "one rank"


def say(text: str) -> None:
    """A sentence of the launcher."""
    print(f"tether: {text}", file=sys.stderr, flush=True)


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]
