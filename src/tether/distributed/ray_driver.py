"""The program of one attempt on a Ray cluster: it places one actor a rank, which runs `tether` as a process.

Nothing of training passes through Ray: ranks talk to each other as they do under torchrun. An actor starts its process,
hands on what it prints, and says when it has ended. The process ends when its actor does, however that ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import GetTimeoutError, RayError  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import placement_group, remove_placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from tether.distributed.launch import RankProcesses, RanksEnded, say
from tether.distributed.ray_host import RankHost
from tether.distributed.ray_launch import LOCAL, lost
from tether.errors import UsageError

FIND_SECONDS = 120.0  # for a cluster that is being started again
PLACE_SECONDS = 60.0  # for the machines of a cluster to have room
ASK_SECONDS = 30.0  # for an actor's answer; Ray says by itself, mostly sooner, when a machine is gone
POLL = 0.2
PASSED_ON = ("OMP_", "HF_", "TETHER_", "NCCL_", "GLOO_", "TOKENIZERS_", "CUBLAS_")  # of this program's environment


class RayRank:
    """A rank on the cluster, as `subprocess.Popen` would show it."""

    def __init__(self, host: Any, rank: int) -> None:
        self.host, self.rank = host, rank
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Ask its actor, and print what the rank printed: rank 0 alone has something for standard output."""
        if self.returncode is not None:
            return self.returncode
        try:
            code, printed = ray.get(self.host.poll.remote(), timeout=ASK_SECONDS)
        except GetTimeoutError:
            code, printed = -signal.SIGKILL, []
        except RayError:  # the actor or its machine is gone, and so is the rank
            code, printed = -signal.SIGKILL, []
        for number, text in printed:
            stream = sys.stdout if number == 1 and self.rank == 0 else sys.stderr
            stream.write(text.decode(errors="backslashreplace"))
            stream.flush()
        self.returncode = code
        return code

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended."""
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired(f"rank {self.rank}", timeout or 0.0)
            time.sleep(POLL)
        return code

    def send_signal(self, sig: int) -> None:
        """Through its actor."""
        with suppress(RayError):
            self.host.send_signal.remote(int(sig))

    def kill(self) -> None:
        """End the rank, then its actor."""
        with suppress(RayError, GetTimeoutError):
            ray.get(self.host.send_signal.remote(int(signal.SIGKILL)), timeout=ASK_SECONDS)
        with suppress(RayError):
            ray.kill(self.host)
        self.returncode = -signal.SIGKILL if self.returncode is None else self.returncode


class RayRanks:
    """Places ranks, at least `least` of those asked for."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.group: Any = None

    def start(self, words: Sequence[str], count: int, variables: Mapping[str, str]) -> list[RayRank]:
        """The `Start` of `RankProcesses`."""
        share = {"CPU": 1.0} | ({"GPU": 1.0} if ray.cluster_resources().get("GPU") else {})
        count = self._placed(count, share)
        hosts = [self._host(index, share) for index in range(count)]
        address, port = ray.get(hosts[0].place.remote(), timeout=ASK_SECONDS)
        mine = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        shared = {"OMP_NUM_THREADS": "1", **mine, **variables}
        shared |= {"WORLD_SIZE": str(count), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        folder = str(Path.cwd())
        begun = [
            host.start.remote(list(words), shared | {"RANK": str(rank), "LOCAL_RANK": "0"}, folder)
            for rank, host in enumerate(hosts)
        ]
        ray.get(begun, timeout=ASK_SECONDS)
        return [RayRank(host, rank) for rank, host in enumerate(hosts)]

    def _host(self, index: int, share: dict[str, float]) -> Any:
        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        options = {"num_cpus": share["CPU"], "num_gpus": share.get("GPU", 0.0), "scheduling_strategy": place}
        # Ray brings nothing back: see the docstring of ray_launch.py.
        return ray.remote(RankHost).options(max_restarts=0, max_task_retries=0, **options).remote()

    def _placed(self, count: int, share: dict[str, float]) -> int:
        """Reserve room for `count` ranks, or for as many as there is room for; returns how many."""
        for fewer in range(count, self.least - 1, -1):
            self.group = placement_group([share] * fewer, strategy="PACK")
            if self.group.wait(PLACE_SECONDS if fewer == count else POLL):
                return fewer
            remove_placement_group(self.group)
        have = {name: int(ray.cluster_resources().get(name, 0)) for name in share}
        raise UsageError(
            f"--nproc: the Ray cluster has no room for {self.least} ranks of {share} each; it has {have} in all: add "
            "machines, end other jobs, or set --nproc or --min-nproc lower"
        )


def connect(address: str) -> None:
    """Join a cluster, waiting for one that is being started again; or start one that only this machine reaches."""
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address == LOCAL:
        ray.init(address=LOCAL, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
        return
    until = time.monotonic() + FIND_SECONDS
    while True:
        try:
            ray.init(address=address, **quiet)
            return
        except (ConnectionError, RuntimeError, RayError) as error:
            if time.monotonic() > until:
                raise UsageError(f"--ray: there is no Ray cluster at {address} ({error})") from error
            time.sleep(1.0)


def main() -> None:
    """Read what to run from standard input, run it, and write how it ended to the pipe that is named."""
    asked = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    ranks = RayRanks(asked["least"])
    runner = RankProcesses(ranks.start)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: runner.pass_on(number))
    try:
        connect(asked["address"])
        ended = runner.run(asked["words"], asked["count"], asked["variables"])
    except UsageError as error:
        say(str(error))
        ended = RanksEnded(error.exit_code)
    except (RayError, GetTimeoutError) as error:
        ended = lost(f"the ranks could not be started on the Ray cluster ({str(error).splitlines()[0]})")
    with os.fdopen(int(sys.argv[1]), "w") as answer:
        json.dump(asdict(ended), answer)
    ray.shutdown()


def _end_with_stdin() -> None:
    """End when the process that started this one ends: Ray then ends the actors, and each of them its rank."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
