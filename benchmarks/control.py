"""The PPO paper's seven MuJoCo tasks at one million steps: runs of `tether control`, and a table of them.

    python benchmarks/control.py [--tasks Hopper HalfCheetah ...] [--seeds 0 1 2] [--jobs 2] [--directory runs/control]
        [--version v5] [--steps 1000000] [--write docs/results.md] [--json]

Every run is an ordinary one: stop this program at any time, and call it again to go on. The figure of a run is the mean
total reward of its last 100 episodes, as in the paper. `--peer` measures the steps per second of processor time of
stable-baselines3, where it is installed, and of Tether. What others published is in control_reference.json, with its
source.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tether.processes import python

HERE = Path(__file__).resolve().parent
REFERENCE = HERE / "control_reference.json"
TASKS = (
    *("HalfCheetah", "Hopper", "InvertedDoublePendulum", "InvertedPendulum"),
    *("Reacher", "Swimmer", "Walker2d"),
)
BEGIN, END = "<!-- control: written by benchmarks/control.py -->", "<!-- end of control -->"


def train(environment: str, seed: int, options: argparse.Namespace) -> int:
    """Begin or continue one run, in a process of its own; returns its exit code."""
    flags = {
        "run.name": f"{environment}-{seed}",
        "run.directory": options.directory,
        "run.seed": seed,
        "run.environment_steps": options.steps,
    }
    words = ["-m", "tether", "control", environment, *(f"--{key}={value}" for key, value in flags.items())]
    with (Path(options.directory) / f"{environment}-{seed}.log").open("a") as log:
        done = subprocess.run(python(*words, "--resume", "auto"), stdout=log, stderr=log, check=False)
    return done.returncode


def result(environment: str, seed: int, options: argparse.Namespace) -> float | None:
    """The figure of a finished run; None where it is not finished."""
    folder = Path(options.directory) / f"{environment}-{seed}"
    if not (folder / "finished.json").is_file():
        return None
    return float(json.loads((folder / "report.json").read_text(encoding="utf-8"))["score_100"])


def table(options: argparse.Namespace) -> tuple[str, dict[str, list[float]]]:
    """Markdown: each task's mean and spread over seeds beside the published figures."""
    published: dict[str, Any] = json.loads(REFERENCE.read_text(encoding="utf-8"))["tasks"]
    lines = ["| task | seeds | Tether | published |", "|---|---|---|---|"]
    found: dict[str, list[float]] = {}
    for task in options.tasks:
        environment = f"{task}-{options.version}"
        scores = [score for seed in options.seeds if (score := result(environment, seed, options)) is not None]
        found[environment] = scores
        ours = f"{statistics.fmean(scores):.1f}" if scores else "-"
        ours += f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
        theirs = published.get(task)
        lines.append(f"| {environment} | {len(scores)} | {ours} | {theirs if theirs is not None else '-'} |")
    return "\n".join(lines), found


def peer(environment: str, iterations: int) -> dict[str, float]:
    """Steps per second of processor time, of stable-baselines3 and of Tether, at one thread and the same settings."""
    import torch
    from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.vec_env import (  # pyright: ignore[reportMissingImports]
        DummyVecEnv,
        VecNormalize,
    )

    from tether.config.control_recipe import ControlRecipe
    from tether.config.load import load_settings
    from tether.control.spaces import gymnasium
    from tether.control.training import ControlTraining

    torch.set_num_threads(1)
    steps = 2048 * iterations
    theirs = PPO("MlpPolicy", VecNormalize(DummyVecEnv([lambda: gymnasium().make(environment)])), device="cpu")
    theirs.learn(2048)
    began = time.process_time()
    theirs.learn(steps, reset_num_timesteps=False)
    sb3 = steps / (time.process_time() - began)
    ours = ControlTraining(load_settings(ControlRecipe, settings={"environment.id": environment}))
    ours.environments.begin()
    ours.iteration(0)
    began = time.process_time()
    for step in range(1, iterations + 1):
        ours.iteration(step)
    return {"stable-baselines3": sb3, "tether": steps / (time.process_time() - began)}


def write(page: Path, text: str) -> None:
    """Replace what is between the two marks of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} needs the lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Run what is not finished, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--directory", default="runs/control")
    parser.add_argument("--version", default="v5", help="of the environments")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--write", metavar="PAGE", help="write the table between the marks of this page")
    parser.add_argument("--peer", type=int, metavar="N", help="only measure steps per second, over N iterations")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.peer:
        for task in options.tasks:
            print(json.dumps({"task": task} | peer(f"{task}-{options.version}", options.peer)))
        return
    Path(options.directory).mkdir(parents=True, exist_ok=True)
    pairs = [(f"{task}-{options.version}", seed) for seed in options.seeds for task in options.tasks]
    with ThreadPoolExecutor(options.jobs) as pool:
        codes = list(pool.map(lambda pair: train(pair[0], pair[1], options), pairs))
    failed = [f"{name}-{seed}" for (name, seed), code in zip(pairs, codes, strict=True) if code]
    text, found = table(options)
    print(json.dumps(found) if options.json else text)
    if options.write:
        write(Path(options.write), text)
    if failed or any(math.isnan(score) for scores in found.values() for score in scores):
        raise SystemExit(f"not finished: {', '.join(failed)}; see the logs in {options.directory}")


if __name__ == "__main__":
    main()
