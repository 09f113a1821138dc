"""What `model.numerics: exact` costs on a CPU, beside `fast`: the phases of a PPO iteration, taking turns.

    python benchmarks/exact_numerics.py [--layers 6] [--prompts 16] [--samples 2] [--prompt 32] [--new 32]
        [--minibatch 8] [--micro-batch 512] [--critic separate|head|none] [--epochs 1] [--threads 1] [--repeats 2]
        [--json]

The shape of SmolLM2-135M with random weights and as many layers as asked for; 30 are the whole of it. Both ways take
turns in one process. A ratio is that of the least CPU time of each, which a busy machine changes less than the time on
the clock. An iteration has a reference and stores no most likely tokens, so that exact evaluates no old log-probs.
`--critic none` is REINFORCE.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from smollm_shape import NEVER, SHAPE, Numbers
from transformers import LlamaConfig, LlamaForCausalLM

from tether.config.load import load_recipe
from tether.models.load import LoadedModel
from tether.train.build import build_rl
from tether.train.rl import RLParts, rl_step

WAYS = ("fast", "exact")


def parts_of(options: argparse.Namespace, numerics: str) -> RLParts:
    """A run on a model of its own, the same for both ways."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": options.layers})).eval()
    numbers: Any = Numbers()
    loaded = LoadedModel(model, numbers, end_id=NEVER, pad_id=0, context_length=8192)
    flags: dict[str, Any] = {
        "model.numerics": numerics,
        "model.device": "cpu",
        "task.name": "smollm_shape:RandomPrompts",
        "task.options": {"count": options.prompts, "length": options.prompt},
        "rollout.prompts_per_step": options.prompts,
        "rollout.samples_per_prompt": options.samples,
        "rollout.max_new_tokens": options.new,
        "optimizer.micro_batch_tokens": options.micro_batch,
        "store.top_logprobs": 0,
    }
    method = "reinforce" if options.critic == "none" else "ppo"
    if method == "ppo":
        flags |= {"ppo.minibatch_size": options.minibatch, "ppo.epochs": options.epochs, "roles.critic": options.critic}
    recipe = load_recipe(method, None, [f"--{key}={json.dumps(value)}" for key, value in flags.items()])
    return build_rl(recipe, loaded)  # pyright: ignore[reportArgumentType]


def phases(parts: RLParts, step: int) -> dict[str, float]:
    """CPU seconds of each phase of an iteration, and of the whole."""
    marks: list[tuple[str, float]] = []
    rl_step(
        parts, step, parts.algorithm.controllers, lambda text: marks.append((text.split(",")[0], time.process_time()))
    )
    ends = [began for _, began in marks[1:]] + [time.process_time()]
    found = {name: end - began for (name, began), end in zip(marks, ends, strict=True)}
    return found | {"iteration": ends[-1] - marks[0][1]}


def main() -> None:
    """Time them in turn and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=2, help="answers to each prompt")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--minibatch", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=512, help="tokens")
    parser.add_argument("--critic", choices=("separate", "head", "none"), default="separate")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    runs = {way: parts_of(options, way) for way in WAYS}
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for step in range(options.repeats):
        for way, parts in runs.items():
            seen[way].append(phases(parts, step))
    least = {way: {name: min(each[name] for each in seen[way]) for name in seen[way][0]} for way in WAYS}
    print(f"{'phase':12s} {'fast':>9s} {'exact':>9s}   exact / fast, in CPU seconds, least of {options.repeats}")
    for name, fast in least["fast"].items():
        print(f"{name:12s} {fast:9.2f} {least['exact'][name]:9.2f} {least['exact'][name] / max(fast, 1e-9):7.2f}")
    if options.json:
        print(json.dumps(least))


if __name__ == "__main__":
    main()
