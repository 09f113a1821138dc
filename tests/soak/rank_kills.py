"""Kill ranks of a run while it trains, at random, and compare its end with that of a run that nobody disturbed.

    OMP_NUM_THREADS=1 python tests/soak/rank_kills.py --launcher forked --kills 100 --seed 0 --json

Launchers: `nproc` (`tether train --nproc N --restarts M`), `torchrun` and `ray` start programs. `forked` is that of
`nproc` with ranks forked from this process, so that a kill takes seconds. With `ray`, a quarter of the kills hit a
machine of a cluster on loopback, and a quarter an actor that holds a rank. The last line is the verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from forked_ranks import launched
from in_process import whole
from same_runs import differences
from tiny_recipes import METHODS, tiny

SOAK = "TETHER_TEST_SOAK"  # in the environment of ranks that programs start, with an id
EVERY = 2  # steps between checkpoints
SILENCE = 3.0  # distributed.timeout
BEFORE_A_STEP = 0.15  # share of kills that come before the attempt's first step
STOPPED = 0.1  # share of ranks that are stopped and not killed
SPARE = 10  # restarts beside those for kills: on a machine with too much to do, a rank may miss its beat

_ray_cluster: Any = None

Tell = Callable[[str], None]


@dataclass
class Verdict:
    """What a run went through, and what is wrong with it in the end."""

    name: str
    ranks: int
    steps: int
    kills: int = 0
    stopped: int = 0
    machines: int = 0  # of a Ray cluster
    actors: int = 0
    of_rank: dict[int, int] = field(default_factory=dict[int, int])
    before_a_step: int = 0
    restarts: int = 0  # recorded ones: a kill before the run exists leaves none
    steps_again: int = 0  # recorded steps that were taken again
    wrong: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    def line(self) -> str:
        """In words."""
        cost = self.steps_again / max(1, self.restarts)
        of = ", ".join(f"rank {rank} {count}" for rank, count in sorted(self.of_rank.items()))
        return (
            f"{self.name}, {self.ranks} ranks: {self.kills} kills over {self.steps} steps ({of}; {self.stopped} by "
            f"SIGSTOP, {self.machines} with their machine, {self.actors} by their actor, {self.before_a_step} before "
            f"the attempt's first step), {self.restarts} restarts recorded, {cost:.2f} steps taken again each, "
            f"{self.seconds:.0f} s: " + ("same bits" if not self.wrong else "; ".join(self.wrong))
        )


@dataclass
class Running:
    """A launcher: its lines, the process ids of its ranks, and its exit code."""

    lines: Iterator[str]
    pid_of: Callable[[int], int | None]
    wait: Callable[[], int]
    kill_machine: Callable[[int], None] | None = None  # of a cluster: the machine of the process


def words_of(workspace: Path, method: str, steps: int, *flags: str) -> list[str]:
    """The command line of the recipe that `tiny` makes of the same."""
    recipe = tiny(method, workspace, *rules(steps), *flags)
    own = [*METHODS[method]]
    if recipe.method in ("sft", "reward", "dpo"):
        own += ["--data.train", str(recipe.data.train), "--data.held_out", str(recipe.data.held_out)]  # pyright: ignore
    place = ("--run.directory", str(workspace), "--run.name", "run", "--model.device", "cpu")
    return ["train", method, *own, *place, *rules(steps), *flags, "--json"]


def rules(steps: int) -> tuple[str, ...]:
    chunk = ("--distributed.rollout_chunk", "1")
    timeout = ("--distributed.timeout", str(SILENCE))
    slow = ("--optimizer.policy_lr", "3e-4")  # for hundreds of steps
    return ("--run.steps", str(steps), "--checkpoint.every", str(EVERY), *chunk, *timeout, *slow)


# -- launchers --------------------------------------------------------------------------------------------------------


def forked(words: list[str], ranks: int, restarts: int, least: int, place: Path) -> Running:
    """Our launcher, with forked ranks."""
    process, output = launched(words, ranks, restarts, least, place / "pids")

    def pid_of(rank: int) -> int | None:
        file = place / "pids" / str(rank)
        return int(file.read_text()) if file.exists() else None

    return Running(iter(os.fdopen(output)), pid_of, lambda: process.wait(60.0))


def program(command: Sequence[str], place: Path) -> Running:
    """A program that starts ranks."""
    env = os.environ | {SOAK: str(place)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    return Running(process.stdout, lambda rank: _found(place, rank), lambda: process.wait(60.0))


def _found(place: Path, rank: int) -> int | None:
    """The process id of a rank, by its environment."""
    wanted = {f"{SOAK}={place}".encode(), f"RANK={rank}".encode()}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                return int(folder.name)
        except OSError:
            continue
    return None


def nproc(words: list[str], ranks: int, restarts: int, least: int, place: Path) -> Running:
    """`tether train --nproc`."""
    options = ("--nproc", str(ranks), "--restarts", str(restarts), "--min-nproc", str(least))
    return program([sys.executable, "-m", "tether", *words, *options], place)


def torchrun(words: list[str], ranks: int, restarts: int, least: int, place: Path) -> Running:
    """PyTorch's launcher."""
    options = ("--nproc-per-node", str(ranks), "--max-restarts", str(restarts), "--monitor-interval", "0.1")
    starts = (sys.executable, "-m", "torch.distributed.run", "--standalone", *options)
    return program([*starts, "-m", "tether", *words], place)


def on_ray(words: list[str], ranks: int, restarts: int, least: int, place: Path) -> Running:
    """`tether train --ray`, on the cluster of `_cluster`."""
    assert _ray_cluster is not None
    options = ("--nproc", str(ranks), "--restarts", str(restarts), "--min-nproc", str(least))
    running = program([sys.executable, "-m", "tether", *words, *options, "--ray", _ray_cluster.address], place)
    running.kill_machine = _ray_cluster.replace_machine_of
    return running


LAUNCHERS = {"forked": forked, "nproc": nproc, "torchrun": torchrun, "ray": on_ray}


# -- the kills --------------------------------------------------------------------------------------------------------


def killed_ranks(
    launcher: str, kills: int, seed: int, *, ranks: int = 2, least: int | None = None, method: str = "ppo",
    steps: int | None = None, tell: Tell = lambda text: None,
) -> Verdict:  # fmt: skip
    """Kill so many ranks of a run, one after the other; compare the end."""
    began, root = time.monotonic(), Path(tempfile.mkdtemp(prefix="ranks-"))
    draw = random.Random(seed)
    steps = steps or 8 + 4 * kills
    verdict = Verdict(f"{launcher}, {method}", ranks, steps)
    calm = whole(tiny(method, root / "calm", *rules(steps)))
    words = words_of(root / "killed", method, steps)
    running = LAUNCHERS[launcher](words, ranks, kills + SPARE, least or ranks, root)
    said = _disturb(running, kills, draw, verdict, tell)
    code = running.wait()
    if code:
        verdict.wrong.append(f"it ended with {code}: {said[-3:]}")
    else:
        verdict.wrong += differences(calm, root / "killed" / "run")
        _count_restarts(root / "killed", verdict)
    if verdict.kills < kills:
        verdict.wrong.append(f"it came to its end after {verdict.kills} of {kills} kills")
    verdict.seconds = time.monotonic() - began
    if verdict.wrong:
        verdict.wrong.append(f"both runs are in {root}")
    else:
        shutil.rmtree(root)
    return verdict


def _disturb(running: Running, kills: int, draw: random.Random, verdict: Verdict, tell: Tell) -> list[str]:
    """Read the run's lines to their end, and kill a rank after some of them. The last lines that are not of a step."""
    said: list[str] = []
    left = _patience(draw)
    for line in running.lines:
        starts = '"step"' not in line
        if starts:
            said = [*said[-9:], line.rstrip()]
        if verdict.kills >= kills:
            continue
        if starts:
            early = "starting" in line and draw.random() < BEFORE_A_STEP
            if not early:
                continue
            time.sleep(draw.uniform(0.0, 2.0))
            verdict.before_a_step += 1
        elif left > 0:
            left -= 1
            continue
        else:
            time.sleep(draw.uniform(0.0, 0.2))
        if _shoot(running, draw, verdict):
            left = _patience(draw)
            if verdict.kills % 10 == 0:
                tell(f"  {verdict.name}: {verdict.kills} of {kills} kills; {line.strip()[:40]}")
    return said


def _patience(draw: random.Random) -> int:
    """Steps of an attempt until the next kill: a few more than lie between two checkpoints, so that it gets on."""
    return draw.randrange(EVERY, 2 * EVERY + 1)


def _shoot(running: Running, draw: random.Random, verdict: Verdict) -> bool:
    rank = draw.randrange(verdict.ranks)
    pid = running.pid_of(rank)
    place = draw.random() if running.kill_machine is not None else 1.0
    machine, actor = place < 0.25, 0.25 <= place < 0.5
    stopped = place >= 0.5 and draw.random() < STOPPED
    try:
        if pid is None:
            return False
        if machine and running.kill_machine is not None:
            running.kill_machine(pid)
        else:
            os.kill(parent_of(pid) if actor else pid, signal.SIGSTOP if stopped else signal.SIGKILL)
    except ProcessLookupError:  # it has ended since
        return False
    verdict.kills += 1
    verdict.stopped += stopped
    verdict.machines += machine
    verdict.actors += actor
    verdict.of_rank[rank] = verdict.of_rank.get(rank, 0) + 1
    return True


def parent_of(pid: int) -> int:
    """The process that started a process; raises ProcessLookupError where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error


def _count_restarts(workspace: Path, verdict: Verdict) -> None:
    found = restarts_of(workspace / "run")
    verdict.restarts, verdict.steps_again = len(found), sum(each["steps_again"] for each in found)
    if verdict.steps_again > verdict.restarts * 3 * EVERY:
        verdict.wrong.append(f"{verdict.steps_again} steps were taken again after {verdict.restarts} restarts")


def restarts_of(run: Path) -> list[dict[str, Any]]:
    """The data of a run's events of that kind."""
    from tether.store.database.records import read_log

    log = read_log(run)
    assert log is not None
    return [event["data"] for event in log.events.values() if event["kind"] == "restarted"]


def _cluster(machines: int) -> Any:
    """A Ray cluster, to which `on_ray` connects."""
    global _ray_cluster
    from ray_cluster import RayCluster

    from tether.distributed.launch import free_port

    _ray_cluster = RayCluster(machines, free_port())
    return _ray_cluster


def main() -> int:
    """0 if the run is what it would have been without a kill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="forked")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--method", choices=METHODS, default="ppo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON line")
    options = parser.parse_args()
    tell: Tell = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    cluster = _cluster(options.ranks + 1) if options.launcher == "ray" else None
    verdict = killed_ranks(
        options.launcher, options.kills, options.seed, ranks=options.ranks, method=options.method, tell=tell
    )
    if cluster is not None:
        cluster.close()
    print(json.dumps(asdict(verdict)) if options.json else verdict.line())
    return 1 if verdict.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
