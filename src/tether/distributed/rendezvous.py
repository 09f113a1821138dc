"""How the ranks of a launch find each other, again after each restart.

The store may be the launcher's own, as under torchrun, and then it still has the keys of earlier attempts. So rank 0
draws a name for each attempt, and every other rank asks for it with a number drawn for this attempt alone. Counting
restarts would not do: torchrun's agents do not count them alike when a machine joins or leaves.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tether.distributed.launch import FAULT, LAUNCH
from tether.errors import RankLost

RUN_ID = "TORCHELASTIC_RUN_ID"
LIMIT = 600.0  # seconds in which all ranks of an attempt are there
LOOK_EVERY = 0.02
STORES: Any = dist  # whose stubs leave its stores out


def shared_store(rank: int, count: int) -> Any:
    """What all ranks of a launch share: the launcher's own store under torchrun, else one that rank 0 holds."""
    from_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = STORES.TCPStore(address, port, count, rank == 0 and not from_agent, timeout=timedelta(seconds=LIMIT))
    return STORES.PrefixStore(f"tether/{os.environ.get(RUN_ID, '')}", store)


def attempt_store(shared: Any, rank: int, count: int) -> Any:
    """A store for this attempt alone. It returns once all ranks have it."""
    name = _given(shared, count) if rank == 0 else _asked(shared, rank)
    return STORES.PrefixStore(f"attempt/{name}", shared)


def _given(shared: Any, count: int) -> str:
    """Rank 0 answers whoever asks; a question of an earlier attempt is answered as well, and read by nobody."""
    name, missing = secrets.token_hex(8), set(range(1, count))
    answered: dict[int, str] = {}

    def all_there() -> bool:
        for rank in sorted(missing):
            if shared.check([f"asks/{rank}"]) and (number := shared.get(f"asks/{rank}").decode()) != answered.get(rank):
                shared.set(f"answer/{rank}/{number}", name)
                answered[rank] = number
            if shared.check([f"there/{name}/{rank}"]):
                missing.discard(rank)
        return not missing

    _wait(all_there, lambda: f"rank {min(missing)} did not start")
    return name


def _asked(shared: Any, rank: int) -> str:
    number = secrets.token_hex(8)
    shared.set(f"asks/{rank}", number)
    answer = f"answer/{rank}/{number}"
    _wait(lambda: shared.check([answer]), lambda: "rank 0 did not start")
    name = shared.get(answer).decode()
    shared.set(f"there/{name}/{rank}", "yes")
    return name


def _wait(done: Callable[[], bool], missing: Callable[[], str]) -> None:
    until = time.monotonic() + LIMIT
    while not done():
        if time.monotonic() > until:
            raise RankLost(f"{missing()} within {LIMIT / 60:.0f} minutes: see what its machine says, and start again")
        time.sleep(LOOK_EVERY)


def launch_of(shared: Any) -> tuple[str, str]:
    """The id of this launch, the same after every restart, and what made its launcher start the ranks again.

    Rank 0 asks, once in an attempt. Both are empty where the launcher starts nothing again.
    """
    if LAUNCH in os.environ:
        return os.environ[LAUNCH], os.environ.get(FAULT, "")
    if RUN_ID not in os.environ:
        return "", ""
    launch = shared.compare_set("launch", "", secrets.token_hex(8)).decode()
    again = shared.add("attempts", 1) > 1
    return launch, "a rank ended and torchrun started all of them again" if again else ""
