"""Many iterations in a row: does anything compile again, does memory grow?

    python benchmarks/gpu/steady.py [--shape 135m] [--iterations 200] [--device cuda] [--mode separate] [--json FILE]

Random weights, prompts of random lengths, answers that end at random, so that no two iterations have the same sizes.
The script counts, after iteration `--settled`: kernels that Triton compiled, graphs that torch.compile made, decode
steps that the sampler captured, and bytes that torch holds between two iterations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, Shape, random_model

sys.path.insert(0, str(Path(__file__).parents[1]))
from smollm_shape import random_ids

from tether.config.load import load_recipe
from tether.train.build import build_rl
from tether.train.rl import RLParts, train_rl
from tether.types import Prompt, Score

sys.modules.setdefault("steady_benchmark", sys.modules[__name__])  # the name under which the recipe finds its task
TINY = Shape(64, 128, 3, 4, 2, 40960, head_dim=16)
ENDS = 32  # one token id in this many ends an answer


class UnevenTask:
    """Prompts of random lengths up to `longest`."""

    def __init__(self, count: int, longest: int) -> None:
        self.count, self.longest = count, longest

    def prompts(self) -> list[Prompt]:
        """What is asked."""
        lengths = torch.randint(1, self.longest + 1, (self.count,), generator=torch.Generator().manual_seed(2))
        rows = zip(random_ids(self.count, self.longest).tolist(), lengths.tolist(), strict=True)
        return [Prompt.from_text(str(i), " ".join(map(str, row[:length]))) for i, (row, length) in enumerate(rows)]

    def held_out(self) -> list[Prompt]:
        """Nothing."""
        return []

    def reward(self) -> Any:
        """The parity of the last token."""
        return lambda rollouts: [Score(float(int(rollout.token_ids[-1]) % 2)) for rollout in rollouts]


class Compiled:
    """Counts of what was compiled or captured so far."""

    def __init__(self) -> None:
        self.kernels = 0
        try:
            import triton  # pyright: ignore[reportMissingImports]

            previous = triton.knobs.runtime.jit_post_compile_hook

            def count(*arguments: Any, **named: Any) -> Any:
                self.kernels += 1
                return previous(*arguments, **named) if previous else None

            triton.knobs.runtime.jit_post_compile_hook = count
        except (ImportError, AttributeError):  # no Triton here, or one without the hook
            self.kernels = -1

    def now(self, parts: RLParts) -> dict[str, int]:
        """All of them."""
        from torch._dynamo.utils import counters

        keeper: Any = getattr(parts.engine, "gpu", None)
        return {
            "triton_kernels": self.kernels,
            "torch_compile_graphs": int(counters["stats"]["unique_graphs"]),
            "captured_steps": keeper.decoder.captures if keeper is not None and keeper.decoder is not None else 0,
        }


def parts_of(options: argparse.Namespace) -> RLParts:
    """A small PPO run."""
    flags: dict[str, Any] = {
        "model.dtype": "bfloat16" if options.device == "cuda" else "float32", "roles.mode": options.mode,
        "task.name": "steady_benchmark:UnevenTask", "task.options": {"count": 4096, "longest": options.prompt},
        "rollout.prompts_per_step": options.prompts, "rollout.max_new_tokens": options.new,
        "ppo.epochs": 1, "ppo.minibatch_size": options.prompts // 2,
        "optimizer.micro_batch_tokens": options.micro_batch_tokens,
        "optimizer.policy_lr": 1e-7, "optimizer.critic_lr": 1e-7, "run.steps": options.iterations,
        "rollout.stop_token_ids": list(range(0, SHAPES[options.shape].vocabulary, ENDS)),
    }  # fmt: skip
    recipe: Any = load_recipe("ppo", None, [f"--{key}={json.dumps(value)}" for key, value in flags.items()])
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    return build_rl(recipe, replace(random_model(options.shape, options.device, dtype), end_id=0))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every iteration's memory, and what was compiled when."""
    compiled, parts = Compiled(), parts_of(options)
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    for result in train_rl(parts):
        memory = {name: value for name, value in result.metrics.items() if name.startswith("memory/")}
        reserved = torch.cuda.memory_reserved() / 2**30 if options.device == "cuda" else 0.0
        sizes = {"tokens": result.metrics["tokens/learned"], "seconds": result.metrics["seconds/step"]}
        rows.append({"step": result.step, **sizes, **memory, "reserved": reserved, **compiled.now(parts)})
        if result.step % 20 == 0:
            print(json.dumps(rows[-1]), flush=True)
    settled, last = rows[options.settled], rows[-1]
    counted = ("triton_kernels", "torch_compile_graphs", "captured_steps")
    grown = (last.get("memory/kept", 0.0) - settled.get("memory/kept", 0.0)) * 2**20
    return {
        "shape": options.shape, "mode": options.mode, "iterations": len(rows), "settled_at": options.settled,
        "compiled_until_settled": {name: settled[name] for name in counted},
        "compiled_afterwards": {name: last[name] - settled[name] for name in counted},
        "last_compiled_at": max((row["step"] for before, row in itertools.pairwise(rows)
                                 if any(row[name] > before[name] for name in counted)), default=0),
        "kept_gib": [round(row.get("memory/kept", 0.0), 4) for row in (rows[0], settled, last)],
        "grown_kib": round(grown, 1),
        "reserved_gib": [round(row["reserved"], 3) for row in (rows[0], settled, last)],
        "peak_gib": round(max(value for row in rows for name, value in row.items() if name.startswith("memory/"))
                          if options.device == "cuda" else 0.0, 3),
        "seconds": round(time.perf_counter() - began, 1),
        "seconds_an_iteration": round(sorted(row["seconds"] for row in rows)[len(rows) // 2], 4),
        "every": rows,
    }  # fmt: skip


def main() -> None:
    """Run, and say whether anything grew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shape", default="135m")
    parser.add_argument("--mode", default="separate")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--settled", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.iterations <= options.settled:
        parser.error(f"--iterations: growth is measured from iteration {options.settled} on, so more than that")
    SHAPES.setdefault("tiny", TINY)
    result = measure(options)
    print(json.dumps({name: value for name, value in result.items() if name != "every"}))
    if options.json:
        Path(options.json).write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
