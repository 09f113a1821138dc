"""`tether train ... --nproc N --ray ADDRESS`: ranks on the machines of a Ray cluster, placed and watched by Ray.

Ray only places processes and says when one is gone. It restarts nothing: an actor that Ray brought back would answer
with the weights of the beginning. What is lost is started again here, and resumes from the last checkpoint.

Each attempt has a program of its own that talks to the cluster (`ray_driver.py`), because Ray ends the programs of a
cluster whose head is lost. This process survives that, and tries again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec

from tether.distributed.launch import RanksEnded, Supervisor, supervise
from tether.errors import RankLost, UsageError
from tether.processes import environment, python

LOCAL = "local"  # the address of a cluster of this machine alone, started for the run


def launch_on_ray(
    words: Sequence[str], count: int, restarts: int = 0, least: int | None = None, *, address: str = "auto"
) -> int:
    """As `launch`, on a Ray cluster. With `least`, as many ranks as the cluster has room for, down to that many."""
    if count < 1 or not 1 <= (least or count) <= count:
        raise UsageError(f"--nproc is {count} and --min-nproc {least}: both must be at least 1, and the first not less")
    if find_spec("ray") is None:
        raise UsageError("--ray: Ray is not installed here: pip install 'tether-rl[ray]'")
    return supervise(Supervisor(RayDriver(address, least or count)), words, count, restarts, count)


class RayDriver:
    """The runner for ranks on a cluster: one program for each attempt."""

    def __init__(self, address: str, least: int) -> None:
        self.address, self.least = address, least
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, words: Sequence[str], count: int, variables: Mapping[str, str]) -> RanksEnded:
        """Until the program says how the ranks ended, or is gone."""
        read, write = os.pipe()
        asked = {
            "address": self.address,
            "words": [*words],
            "count": count,
            "least": self.least,
            "variables": {**variables},
        }
        process = subprocess.Popen(  # noqa: S603 (our own program)
            python("-m", "tether.distributed.ray_driver", str(write)),
            env={**ray_environment(self.address), **environment()},
            stdin=subprocess.PIPE,
            pass_fds=(write,),
            start_new_session=True,
        )
        self.process = process
        os.close(write)
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()  # and kept open: the program ends when this one does
        try:
            with os.fdopen(read) as answers:
                answer = answers.read()
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        with suppress(ValueError):
            return RanksEnded(**json.loads(answer))
        return RanksEnded(-signal.SIGKILL, f"the Ray cluster at {self.address} was lost ({_how(code)})")

    def pass_on(self, number: int) -> None:
        """The program passes it on to rank 0."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


def ray_environment(address: str) -> dict[str, str]:
    """Variables for a program that joins or starts a cluster: it reports nothing to Ray's makers.

    Ray replaces the loopback address by the machine's address in its network, where a cluster on loopback does not
    listen, unless a variable tells it not to.
    """
    on_loopback = address == LOCAL or address.startswith(("127.", "localhost", "[::1]"))
    return {"RAY_USAGE_STATS_ENABLED": "0"} | ({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if on_loopback else {})


def _how(code: int) -> str:
    return f"its program here ended by signal {-code}" if code < 0 else f"its program here ended with exit code {code}"


def lost(text: str) -> RanksEnded:
    """The end of an attempt that did not come to a rank's exit code, after which another one may do better."""
    return RanksEnded(RankLost.exit_code, text)
