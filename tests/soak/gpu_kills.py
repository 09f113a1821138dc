"""Kill a PPO run on one device at random, resume it each time, and compare the end with an undisturbed run bit by bit.

    .venv/bin/python tests/soak/gpu_kills.py --kills 20 --device cuda --dtype bfloat16
    .venv/bin/python tests/soak/gpu_kills.py --kills 5 --device cpu
    .venv/bin/python tests/soak/gpu_kills.py --compare soak/calm/run soak/killed/run

Standard output is one JSON object: which parts are equal, and by how much the others differ. The exit code is 0 only
where every bit is equal. `repeat` compares two undisturbed runs: where these differ, the device is not deterministic
and resuming is not to blame. Flags that this script does not know go to the recipe, such as `--model.path FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a pool of threads does not outlive a fork
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from attempts import sit
from safetensors.torch import load_file
from same_runs import differences, metrics_table, rollouts_table
from soak import Pace, Verdict, newest_step, undisturbed
from tiny_recipes import tiny

from tether.config.recipes import Recipe
from tether.store import checkpoints
from tether.store.folder import RunFolder, run_path
from tether.store.recorded import decode_rollout

STEPS_PER_KILL, CHECKPOINT_EVERY, MIN_STEPS = 2, 2, 12
SHOWN = 8  # of the names that differ

Arrays = Mapping[str, np.ndarray]


# -- comparing ----------------------------------------------------------------------------------------------------


def compare(one: Path, other: Path) -> dict[str, Any]:
    """What is equal between two finished runs, and by how much the rest differs."""
    parts = {
        "weights": difference(weights(one), weights(other)),
        "checkpoint": difference(last_checkpoint(one), last_checkpoint(other)),
        "metrics": difference(metrics(one), metrics(other)),
        "records": difference(records(one), records(other)),
    }
    found = differences(one, other)
    equal = not found and all(part["equal"] for part in parts.values())
    return {"equal": equal, **parts, "differences": found[:SHOWN]}


def difference(one: Arrays, other: Arrays) -> dict[str, Any]:
    """Compare arrays by name: their bits, and the largest difference of two numbers."""
    missing = sorted(one.keys() ^ other.keys())
    changed: dict[str, float | None] = {}
    for name in sorted(one.keys() & other.keys()):
        mine, its = one[name], other[name]
        if mine.dtype != its.dtype or mine.shape != its.shape:
            changed[name] = None
        elif mine.tobytes() != its.tobytes():
            changed[name] = _largest(mine, its)
    known = [value for value in changed.values() if value is not None]
    return {
        "equal": bool(one) and not missing and not changed,
        "compared": len(one.keys() | other.keys()),
        "missing": len(missing),
        "different": len(changed),
        "max_abs_difference": max(known, default=0.0),
        "names": [*missing, *changed][:SHOWN],
    }


def _largest(one: np.ndarray, other: np.ndarray) -> float | None:
    """The largest difference of two numbers; None where these are no numbers, or not finite."""
    if one.dtype.kind not in "biuf":
        return None
    with np.errstate(all="ignore"):
        apart = np.abs(one.astype(np.float64) - other.astype(np.float64))
    return float(apart.max()) if apart.size and np.isfinite(apart).all() else None


def weights(run: Path) -> Arrays:
    """The tensors of the trained model and of the best one."""
    files = [file for folder in ("model", "best") for file in sorted((run / folder).rglob("*.safetensors"))]
    return dict(_named((str(file.relative_to(run)), load_file(file)) for file in files))


def last_checkpoint(run: Path) -> Arrays:
    """The tensors of the newest checkpoint: weights, optimizer state, generators."""
    found = checkpoints.read_newest(RunFolder(run).checkpoints, lambda text: None)
    return {} if found is None else dict(_named(found.tensors.items()))


def _named(groups: Any) -> Iterator[tuple[str, np.ndarray]]:
    for group, tensors in groups:
        for name, tensor in tensors.items():
            yield f"{group}: {name}", as_array(tensor)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bits as numbers; bfloat16, which numpy lacks, becomes float32 without loss."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def metrics(run: Path) -> Arrays:
    """Every metric of every step."""
    return {
        f"step {step}: {name}": np.frombuffer(bits or b"", dtype=np.float64) for step, name, bits in metrics_table(run)
    }


def records(run: Path) -> Arrays:
    """The recorded rollouts: every column of every token, and all else as text."""
    found: dict[str, np.ndarray] = {}
    for step, row, group_id, sample_id, finish, tokens, bits, content in rollouts_table(run):
        place = f"step {step}, row {row}"
        kept = decode_rollout(
            content, step=step, row=row, group_id=group_id, sample_id=sample_id, finish=finish, score=0.0
        )
        found |= {f"{place}: {name}": column for name, column in kept.columns.items()}
        found[f"{place}: score"] = np.frombuffer(bits or b"", dtype=np.float64)
        others = (kept.prompt_id, kept.completion, kept.temperature, kept.parts, kept.final_value, [*kept.pieces])
        said = repr((group_id, sample_id, finish, tokens, *others))
        found[f"{place}: text"] = np.frombuffer(said.encode(), dtype="S1")
    return found


# -- killing ------------------------------------------------------------------------------------------------------


def make(place: Path, options: argparse.Namespace, flags: list[str]) -> Recipe:
    """The recipe of the run in the workspace `place`."""
    steps = max(MIN_STEPS, STEPS_PER_KILL * options.kills)
    rules = ["--run.steps", str(steps), "--checkpoint.every", str(CHECKPOINT_EVERY), "--model.device", options.device]
    return tiny("ppo", place, *rules, "--model.dtype", options.dtype, *flags)


def kill_and_resume(recipe: Recipe, pace: Pace, kills: int) -> Verdict:
    """Kill the run `kills` times at random, resume it each time, and let it end."""
    verdict = Verdict("ppo", recipe.run.steps)
    while verdict.kills < kills:
        before = newest_step(recipe, verdict.wrong)
        attempt = pace.next(before, verdict.kills)
        if not attempt.killed:
            verdict.wrong.append(f"it ended with {attempt.exit_code} after {verdict.kills} of {kills} kills")
            break
        newest = newest_step(recipe, verdict.wrong)
        verdict.count(attempt, newest)
        if newest < before:
            verdict.wrong.append(f"a kill lost the checkpoint of step {before}")
        print(f"kill {verdict.kills} of {kills}: {' and '.join(attempt.where)}, {newest} steps", file=sys.stderr)
    if (code := sit(recipe).exit_code) != 0:
        verdict.wrong.append(f"the last attempt ended with {code}")
    return verdict


def soak(root: Path, options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Two undisturbed runs and one that is killed, compared."""
    began = time.monotonic()
    calm, again, killed = (make(root / name, options, flags) for name in ("calm", "again", "killed"))
    first = undisturbed(calm)
    undisturbed(again)
    verdict = kill_and_resume(killed, Pace(killed, options.kills, random.Random(options.seed), first), options.kills)
    ended = not verdict.wrong
    compared = compare(run_path(calm), run_path(killed)) if ended else {"equal": False}
    return {
        "passed": bool(ended and compared["equal"]),
        "kills": verdict.kills,
        "steps": verdict.steps,
        "device": options.device,
        "dtype": options.dtype,
        "seed": options.seed,
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "where": verdict.where,
        "while_writing_checkpoint": verdict.while_writing_checkpoint,
        "wrong": verdict.wrong,
        "resumed": compared,
        "repeat": compare(run_path(calm), run_path(again)),
        "seconds": round(time.monotonic() - began, 1),
    }


def main(words: list[str] | None = None) -> int:
    """Run it; 0 if every bit is equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how often the run is killed (20)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu (cuda)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of the model (auto)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs in this folder, which is new")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="RUN", help="only compare these two finished runs")
    options, flags = parser.parse_known_args(words)
    if options.compare:
        found = compare(*options.compare)
        print(json.dumps(found, indent=2))
        return 0 if found["equal"] else 1
    if options.keep:
        options.keep.mkdir(parents=True)
    root = options.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    summary = soak(root.resolve(), options, flags)
    print(json.dumps(summary, indent=2))
    if summary["passed"] and not options.keep:
        shutil.rmtree(root)
    elif not summary["passed"]:
        print(f"The runs are in {root}.", file=sys.stderr)
    return 0 if summary["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
