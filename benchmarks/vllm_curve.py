"""Whether PPO learns with answers of a vLLM server as it does with those of Tether's own sampler.

    OMP_NUM_THREADS=1 python benchmarks/vllm_curve.py [--seeds 3] [--steps 40] [--json]

Needs `make vllm` (or TETHER_VLLM_PYTHON). The toy task of `lag.py`, on a Llama of random weights that vLLM can load
(0.5M, heads of 32). Both begin with the same weights; a seed decides the order of prompts and what is sampled. Prints
the mean score of the five steps up to each mark with its 95 % interval over seeds, the differences of runs with one
seed, and the mean and the largest difference between the log-probs of sampler and trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rollout"))

import torch
from lag import interval, parts_of
from vllm_server import TOKEN, serving  # pyright: ignore[reportMissingImports]

from tether.hub.tiny_model import tiny_model, tiny_tokenizer
from tether.train.rl import train_rl

Curve = list[dict[str, float]]


def save_model(folder: Path) -> Path:
    """vLLM's attention on a CPU wants heads of 32 numbers or more."""
    tiny_model(0, width=128).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def curve(model: Path, seed: int, steps: int, *flags: str) -> Curve:
    """The metrics of each step."""
    own = ("--model.path", str(model), "--model.dtype", "float32", "--distributed.rollout_chunk", "8")
    parts = parts_of(*own, "--run.seed", str(seed), "--run.steps", str(steps), *flags)
    return [result.metrics for result in train_rl(parts)]


def row(name: str, curves: Sequence[Curve], marks: Sequence[int]) -> str:
    """A line of the table."""
    cells = [interval([_score(run, mark) for run in curves]) for mark in marks]
    mean = statistics.mean(step["logprob_diff"] for run in curves for step in run)
    most = max(step["logprob_diff_max"] for run in curves for step in run)
    return f"| {name} | {' | '.join(cells)} | {mean:.1e} | {most:.1e} |"


def _score(run: Curve, mark: int) -> float:
    return statistics.mean(step["score"] for step in run[max(0, mark - 5) : mark])


def main() -> int:
    """Train with both, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print the scores of each run on the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TETHER_WORKER_TOKEN"] = TOKEN
    found: dict[str, list[Curve]] = {"ours": [], "vLLM": []}
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model")
        with serving(model, "--max-model-len", "256") as server:
            elsewhere = ("--rollout.engine", "vllm", "--rollout.servers", f"[{server.url}]")
            for seed in range(options.seeds):
                for name, flags in (("ours", ()), ("vLLM", elsewhere)):
                    found[name].append(curve(model, seed, options.steps, *flags))
                    print(f"{name}, seed {seed}: {found[name][-1][-1]['score']:.3f}", file=sys.stderr, flush=True)
    marks = [round(options.steps * part) for part in (0.25, 0.5, 0.75, 1.0)]
    print("| sampler | " + " | ".join(f"step {mark}" for mark in marks) + " | log-prob diff | largest |")
    print("|---" * (len(marks) + 3) + "|")
    for name, curves in found.items():
        print(row(name, curves, marks))
    pairs = list(zip(found["ours"], found["vLLM"], strict=True))
    apart = [interval([_score(vllm, mark) - _score(own, mark) for own, vllm in pairs]) for mark in marks]
    print(f"| vLLM less ours | {' | '.join(apart)} | | |")
    if options.json:
        print(json.dumps({name: [[step["score"] for step in run] for run in runs] for name, runs in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
