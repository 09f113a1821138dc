"""The cost of recording: a real PPO iteration with and without the run store, and bytes per thousand rollouts.

    python benchmarks/store.py [--iterations 5] [--json]

SmolLM2-135M, roles on its top 4 layers, 32 prompts x (32 + 32) tokens, four epochs, fp32. Iterations with and without
recording alternate in one process. A recorded one includes the call and then waits until everything is on disk. In a
real run the writer thread overlaps with the next iteration, so this is an upper bound. The size is that of the database
after a thousand rollouts of 512 answer tokens each, built from the rows of those iterations, with every column and the
text of every token. With `--json` the last line has `ratio`, the overhead as a fraction (including top_logprobs and the
wait for the disk), and `mb_per_thousand_rollouts`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ppo_cpu import reward_model
from smollm_shape import matrix_rate, smollm2

import tether.models.roles as roles
from tether.config.load import load_recipe
from tether.doctor.answer_metrics import step_measures
from tether.models.load import load_causal_lm
from tether.store.database.apply import KeepRollouts
from tether.store.database.open import workspace_at
from tether.store.recorded import StoredRollout, TopLogprobs
from tether.store.recorder import Pieces, RunRecorder, RunStart
from tether.store.tokens import StepRollouts, stored_rollouts, token_pieces
from tether.train.build import build_rl
from tether.train.rl import RLParts, rl_step

LONG = 512  # tokens of a rollout whose size is measured


def iteration_parts(options: argparse.Namespace) -> RLParts:
    """A PPO run on the real model; a reward model of its shape scores the answers."""
    flags = {
        "roles.mode": "shared_backbone",
        "roles.trainable_layers": 4,
        "task.name": "smollm_shape:RandomPrompts",
        "task.options": {"count": options.batch * 8, "length": options.prompt},
        "rollout.prompts_per_step": options.batch,
        "rollout.max_new_tokens": options.response,
        "rollout.max_num_seqs": options.batch,
        "ppo.epochs": options.epochs,
        "ppo.minibatch_size": options.batch,
        "optimizer.policy_lr": 1e-6,
        "optimizer.critic_lr": 1e-6,
    }
    recipe: Any = load_recipe("ppo", None, [f"--{key}={json.dumps(value)}" for key, value in flags.items()])
    loaded = smollm2(random=False)
    parts = build_rl(recipe, loaded)
    shape = argparse.Namespace(micro_batch_tokens=recipe.optimizer.micro_batch_tokens)
    return dataclasses.replace(parts, reward=reward_model(parts, loaded, shape))


class Timed:
    """Runs iterations one after the other."""

    def __init__(self, parts: RLParts) -> None:
        self.parts, self.controllers, self.step = parts, parts.algorithm.controllers, 0
        self.unseen = dataclasses.replace(parts, top_logprobs=0)
        self.looked = 0.0  # seconds spent on top_logprobs
        whole = roles.top_tokens

        def timed(*given: Any, **options: Any) -> Any:
            began = time.perf_counter()
            found = whole(*given, **options)
            self.looked += time.perf_counter() - began
            return found

        roles.top_tokens = timed

    def iterate(self, *, kept: bool = False) -> tuple[float, dict[str, float], StepRollouts]:
        """Seconds, metrics and tokens of the next iteration; with `kept`, it also computes top_logprobs."""
        began = time.perf_counter()
        result = rl_step(self.parts if kept else self.unseen, self.step, self.controllers)
        seconds = time.perf_counter() - began
        self.controllers, self.step = result.controllers, self.step + 1
        parts = [score.parts for score in result.scores]
        tokens = StepRollouts(result.experience, result.rollouts, result.ratios, result.clipped, parts)
        return seconds, result.metrics, tokens


def measure(options: argparse.Namespace, pieces: Pieces, folder: Path) -> dict[str, Any]:
    """Times of alternating iterations, and the rows of the recorded ones."""
    timed = Timed(iteration_parts(options))
    timed.iterate()  # not counted
    workspace = workspace_at(folder, f"sqlite:///{folder}/tether.db")
    recorder = RunRecorder(workspace, folder / "ppo", RunStart("ppo", 1, {}), pieces=pieces, notify=print)
    recorder.flush()
    plain, recorded, calls, writes, looks = [], [], [], [], []
    rows: list[StoredRollout] = []
    for _ in range(options.iterations):
        plain.append(timed.iterate()[0])
        timed.looked = 0.0
        seconds, metrics, tokens = timed.iterate(kept=True)
        began = time.perf_counter()
        metrics |= step_measures(tokens.stored(timed.step, None))  # a run also does this before it records a step
        recorder.record(timed.step, metrics, tokens)
        called = time.perf_counter()
        assert recorder.flush()
        calls.append(called - began)
        writes.append(time.perf_counter() - began)
        recorded.append(seconds + writes[-1])
        looks.append(timed.looked)
        rows += stored_rollouts(timed.step, tokens, pieces)
    recorder.close("done")
    return {"plain": plain, "recorded": recorded, "calls": calls, "writes": writes, "looks": looks, "rows": rows}


def long_rollouts(rows: Sequence[StoredRollout], count: int) -> list[StoredRollout]:
    """Rollouts of LONG answer tokens, each concatenated from the answers of random rows."""
    draw = random.Random(0)
    made = []
    for place in range(count):
        order, chosen = itertools.cycle(draw.sample(rows, len(rows))), list[StoredRollout]()
        while sum(int(row.columns["response"].sum()) for row in chosen) < LONG:
            chosen.append(next(order))  # no row twice if there are enough: a repeat would compress away
        columns = {name: np.concatenate([row.answer(name) for row in chosen])[:LONG] for name in rows[0].columns}
        pieces = [
            piece for row in chosen for piece, own in zip(row.pieces, row.columns["response"], strict=True) if own
        ]
        text = "".join(pieces[:LONG])
        texts = {"pieces": pieces[:LONG], "completion": text}
        others = long_alternatives([row.top_logprobs for row in chosen if row.top_logprobs is not None])
        made.append(dataclasses.replace(rows[0], row=place, columns=columns, **texts, top_logprobs=others))
    return made


def long_alternatives(several: Sequence[TopLogprobs]) -> TopLogprobs | None:
    """The top_logprobs of concatenated answers; prompts have none."""
    if not several:
        return None
    counts = np.concatenate([others.counts for others in several])
    counts = counts[counts > 0][:LONG]
    counts = np.concatenate([counts, np.zeros(LONG - len(counts), dtype=np.uint8)])
    many = int(counts.sum())
    tokens = np.concatenate([others.tokens for others in several])[:many]
    wanted = set(tokens.tolist())
    texts = {token: text for others in several for token, text in others.texts.items() if token in wanted}
    logprobs = np.concatenate([others.logprobs for others in several])[:many]
    return TopLogprobs(counts, tokens, logprobs, texts)


def megabytes(rows: Sequence[StoredRollout], folder: Path) -> tuple[float, float]:
    """Size of a database with a thousand long rollouts, and the seconds it took to write them."""
    workspace = workspace_at(folder, f"sqlite:///{folder}/size.db")
    rollouts = long_rollouts(rows, 1000)
    began = time.perf_counter()
    recorder = RunRecorder(workspace, folder / "size", RunStart("ppo", 1, {}), keep=KeepRollouts(most=None))
    for step in range(10):
        batch = rollouts[100 * step : 100 * (step + 1)]
        recorder.record(step, {}, [dataclasses.replace(rollout, step=step) for rollout in batch])
    assert recorder.close("done")
    return sum(file.stat().st_size for file in folder.glob("size.db*")) / 1e6, time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--response", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=5, help="of each kind, after one warm-up")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pieces = token_pieces(load_causal_lm("smollm2-135m", dtype="float32", device="cpu", seed=0).tokenizer)
    with tempfile.TemporaryDirectory() as place:
        found = measure(options, pieces, Path(place))
        size, seconds = megabytes(found.pop("rows"), Path(place))
    middle = {name: statistics.median(times) for name, times in found.items()}
    direct = (middle["writes"] + middle["looks"]) / middle["plain"]
    print(
        f"{options.batch} prompts x ({options.prompt} + {options.response}) tokens, SmolLM2-135M, top 4 layers, "
        f"{options.threads} threads, {matrix_rate():.0f} GFLOP/s; medians of {options.iterations}"
    )
    print(f"iteration, not recorded          {middle['plain']:8.3f} s")
    print(f"iteration, recorded and on disk  {middle['recorded']:8.3f} s")
    print(f"  call to record                 {1000 * middle['calls']:8.3f} ms")
    print(f"  until it is on disk            {1000 * middle['writes']:8.3f} ms")
    print(f"  computing top_logprobs         {1000 * middle['looks']:8.3f} ms")
    print(f"the last two together            {direct:.2%} of an iteration")
    print(f"a thousand rollouts of {LONG} tokens {size:8.1f} MB, written in {seconds:.1f} s")
    if options.json:
        ratio = middle["recorded"] / middle["plain"] - 1.0
        figures = {"ratio": direct, "ratio_of_medians": ratio, "mb_per_thousand_rollouts": size}
        print(json.dumps(figures | {"seconds": found, "seconds_per_thousand_rollouts": seconds}))


if __name__ == "__main__":
    main()
