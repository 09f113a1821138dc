"""A process that a launcher started as one of several ranks: rank 0 runs the command, the others follow."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from tether.distributed.group import PeerFailed, ProcessGroup, advice
from tether.distributed.group_ranks import GroupRanks
from tether.distributed.launch import LAUNCH, LAUNCHER, LEASH
from tether.distributed.rendezvous import RUN_ID, launch_of, shared_store
from tether.errors import RankLost, Stopped, judge
from tether.learner.ranks import Ranks, using_ranks
from tether.user_code import end_process


def run_as_rank(command: Callable[[], int]) -> int:
    """Run the command on rank 0, and its steps on every rank; returns the exit code of this process."""
    if os.environ.get(LEASH) == "stdin":
        threading.Thread(target=_end_with_stdin, name="tether-leash", daemon=True).start()
    if os.environ["WORLD_SIZE"] == "1":
        return _run_alone(command)
    rank = int(os.environ["RANK"])
    group = ProcessGroup()
    if rank:
        for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when a run stops
            signal.signal(number, signal.SIG_IGN)
    try:
        return _lead(group, command) if rank == 0 else _follow(group)
    finally:
        group.close()


def _end_with_stdin() -> None:
    """End at once when what started this rank is gone: a rank that is left over would write to the run of the next."""
    with suppress(OSError):
        while os.read(0, 1):
            pass
    end_process(RankLost.exit_code)


def _run_alone(command: Callable[[], int]) -> int:
    """As one process, which may have been started again: torchrun's store, if there is one, knows."""
    alone = Ranks()
    from_torchrun = RUN_ID in os.environ and LAUNCH not in os.environ
    alone.launch, alone.fault = launch_of(shared_store(0, 1) if from_torchrun else None)
    with using_ranks(alone):
        return command()


def _lead(group: ProcessGroup, command: Callable[[], int]) -> int:
    ranks = GroupRanks(group)
    try:
        ranks.launch, ranks.fault = launch_of(group.shared)
        with using_ranks(ranks):
            code = command()
    except PeerFailed as error:
        raise RankLost(f"{error}{advice()}") from error
    except RankLost:
        raise
    except BaseException:
        if not ranks.in_step:  # else they see that rank 0 is gone
            _end(ranks)
        raise
    _end(ranks)
    return code


def _end(ranks: GroupRanks) -> None:
    with suppress(Exception):  # a rank that is gone need not be told
        ranks.end()


def _follow(group: ProcessGroup) -> int:
    from tether.distributed.follow import follow

    try:
        follow(group)
    except (RankLost, PeerFailed) as error:  # rank 0 says why, or is gone
        group.report(error)
        return RankLost.exit_code
    except BaseException as error:
        group.report(error)
        message, code = judge(error)
        if LAUNCHER not in os.environ or os.environ.get("TETHER_DEBUG", "") not in ("", "0"):
            print(f"tether: rank {group.index}: {message}", file=sys.stderr, flush=True)
        return code if code != Stopped.exit_code else RankLost.exit_code
    return 0
