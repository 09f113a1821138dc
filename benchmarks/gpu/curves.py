"""Does the native engine learn as well as the transformers engine? PPO on a verifiable task, several seeds.

    python benchmarks/gpu/curves.py [--recipe recipes/ppo-verifiable.yaml] [--seeds 0 1 2] [--steps 60]
        [--set KEY=VALUE ...] [--seconds S] [--out DIR]

Every run is `tether train` in its own process, all at once on one device, each with its seed and one of the two
engines. After `--seconds` all running processes are ended, and all curves are cut to the shortest. The script prints
and draws the mean score by iteration of each engine, with its spread over the seeds. The verdict: whether the means of
the last quarter of the runs differ by no more than twice the standard error from the spread of the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENGINES = ("auto", "transformers")
NAMES = {"auto": "native engine", "transformers": "transformers engine"}
SMOOTH = 5  # iterations averaged per drawn point


def start(options: argparse.Namespace, engine: str, seed: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start one run; its steps go to a file, line by line."""
    flags = [f"--run.seed={seed}", f"--run.steps={options.steps}", f"--rollout.engine={engine}", "--run.save=false"]
    flags += [f"--run.directory={folder / 'runs'}", f"--run.name={engine}-{seed}", "--run.doctor_every=0"]
    flags += ["--checkpoint.every=0", "--store.rollouts_every=0", f"--store.url=sqlite:///{folder}/{engine}-{seed}.db"]
    flags += [f"--{each}" for each in options.set]
    command = [sys.executable, "-m", "tether", "train", "ppo", options.recipe, "--json", *flags]
    log = folder / f"{engine}-{seed}"
    with log.with_suffix(".jsonl").open("wb") as lines, log.with_suffix(".err").open("wb") as errors:
        return subprocess.Popen(command, stdout=lines, stderr=errors, env={"OMP_NUM_THREADS": "2", **os.environ})


def ended(job: subprocess.Popen[bytes], deadline: float) -> int:
    """The run's exit code; ends the run at the deadline."""
    try:
        return job.wait(None if deadline == math.inf else max(0.1, deadline - time.perf_counter()))
    except subprocess.TimeoutExpired:
        job.kill()
        return job.wait()


def curve(folder: Path, engine: str, seed: int) -> list[dict[str, Any]]:
    """The steps that a run printed."""
    lines = (folder / f"{engine}-{seed}.jsonl").read_text().splitlines()
    whole = [line for line in lines if line.endswith("}")]  # the last line of an ended run may be incomplete
    return [step for step in map(json.loads, whole) if "score" in step]


def held_out_curve(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """`(steps taken, held-out score)`, before the first step and at each evaluation."""
    start = [(0, row["start/held_out/score"]) for row in rows[:1] if "start/held_out/score" in row]
    return start + [(row["step"] + 1, row["held_out/score"]) for row in rows if "held_out/score" in row]


def smoothed(values: list[float]) -> list[float]:
    """Means over windows that end at each place."""
    return [statistics.fmean(values[max(0, end - SMOOTH + 1) : end + 1]) for end in range(len(values))]


def verdict(runs: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Compare the engines' last quarters, given the spread of their seeds."""
    ends = {
        engine: [statistics.fmean(scores[-max(1, len(scores) // 4) :]) for scores in runs[engine]] for engine in runs
    }
    means = {engine: statistics.fmean(values) for engine, values in ends.items()}
    deviations = {engine: statistics.stdev(values) if len(values) > 1 else math.nan for engine, values in ends.items()}
    error = math.sqrt(sum(deviations[engine] ** 2 / len(ends[engine]) for engine in ends))
    difference = means["auto"] - means["transformers"]
    whole = {engine: statistics.fmean(statistics.fmean(scores) for scores in runs[engine]) for engine in runs}
    return {
        "last_quarter": ends,
        "means": means,
        "deviations": deviations,
        "difference": difference,
        "standard_error": error,
        "mean_of_whole_curves": whole,
        "within_seed_noise": abs(difference) <= 2.0 * error,
    }


def draw(runs: dict[str, list[list[float]]], file: Path) -> None:
    """Both mean curves with the range of their seeds."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for engine, color in zip(ENGINES, ("#1f6feb", "#d9822b"), strict=True):
        rows = [smoothed(scores) for scores in runs[engine]]
        columns = list(zip(*rows, strict=True))
        steps = range(len(columns))
        axes.plot(steps, [statistics.fmean(column) for column in columns], color=color, label=NAMES[engine])
        axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.2, lw=0)
    axes.set_xlabel("iteration")
    axes.set_ylabel(f"score, mean of {SMOOTH} iterations")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    """Run all, compare, save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--recipe", default="recipes/ppo-verifiable.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--out", default=".")
    options = parser.parse_args()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        jobs = {(e, s): start(options, e, s, folder) for e in ENGINES for s in options.seeds}
        for (engine, seed), job in jobs.items():
            code = ended(job, began + options.seconds)
            steps = curve(folder, engine, seed)
            print(f"{engine} {seed}: exit {code}, {len(steps)} steps, {time.perf_counter() - began:.0f} s", flush=True)
            if code:
                print((folder / f"{engine}-{seed}.err").read_text()[-2000:], flush=True)
        steps = {engine: [curve(folder, engine, seed) for seed in options.seeds] for engine in ENGINES}
    empty = [
        f"{engine} {seed}"
        for engine in ENGINES
        for seed, rows in zip(options.seeds, steps[engine], strict=True)
        if not rows
    ]
    if empty:
        raise SystemExit(f"{', '.join(empty)}: no step was completed, so there is nothing to compare")
    shortest = min(len(rows) for engine in ENGINES for rows in steps[engine])
    steps = {engine: [rows[:shortest] for rows in steps[engine]] for engine in ENGINES}
    runs = {engine: [[row["score"] for row in rows] for rows in steps[engine]] for engine in ENGINES}
    held_out = {engine: [held_out_curve(rows) for rows in steps[engine]] for engine in ENGINES}
    seconds = {
        phase: {e: [round(sum(row[f"seconds/{phase}"] for row in rows), 1) for rows in steps[e]] for e in ENGINES}
        for phase in ("rollout", "step")
    }
    result = {
        "recipe": options.recipe, "set": options.set, "steps": shortest, "seeds": options.seeds,
        **verdict(runs), "held_out": held_out, "seconds": seconds, "scores": runs,
    }  # fmt: skip
    for engine in ENGINES:
        columns = list(zip(*map(smoothed, runs[engine]), strict=True))
        picked = [columns[place] for place in range(0, len(columns), max(1, len(columns) // 10))]
        print(NAMES[engine], " ".join(f"{statistics.fmean(c):.3f}±{statistics.pstdev(c):.3f}" for c in picked))
    print(json.dumps({name: value for name, value in result.items() if name != "scores"}))
    (out / "curves.json").write_text(json.dumps(result) + "\n")
    draw(runs, out / "curves.png")


if __name__ == "__main__":
    main()
