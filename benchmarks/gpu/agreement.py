"""How far the sampler's log-probs are from the trainer's, over many sampled tokens: mean, p99.9, max, and the KL.

    python benchmarks/gpu/agreement.py [--model smollm2-135m] [--tokens 1000000] [--device cuda] [--dtype bfloat16]
        [--prompts 1024] [--new 128] [--seconds N] [--json FILE]

Default settings of PPO (temperature 1, the whole distribution), real weights, questions of `--task`. Every batch of
answers is evaluated as training would before its first update; nothing is learned in between. The KL is the mean of
k3 = r - 1 - log r with r = trainer / sampler, an estimate of KL(sampler || trainer) a token that is never negative;
k1, the mean of sampler - trainer, is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.config.load import load_recipe
from tether.data.collate import collate
from tether.learner.evaluate import evaluate_tokens
from tether.loops.agreement import ApartToken, worst_tokens
from tether.loops.build import build_rl, load_policy
from tether.loops.rl import RLParts, release_memory
from tether.ops.kl import kl_estimate
from tether.seeds import derive_seed
from tether.types import Experience, Score, extend


def parts_of(options: argparse.Namespace) -> tuple[RLParts, Any]:
    """A PPO run with default settings but for sizes."""
    flags: dict[str, Any] = {
        "model.path": options.model,
        "model.device": options.device,
        "model.dtype": options.dtype,
        "task.name": options.task,
        "rollout.prompts_per_step": options.prompts,
        "rollout.max_new_tokens": options.new,
        "kl.place": "none",
        "roles.critic": "head",
    }
    if options.task.startswith("reasoning-gym:"):
        flags["task.options"] = {"size": 4 * options.prompts}
    recipe = load_recipe("ppo", None, [f"--{key}={json.dumps(value)}" for key, value in flags.items()])
    policy = load_policy(recipe)
    return build_rl(recipe, policy), policy.tokenizer  # pyright: ignore[reportArgumentType]


def one_batch(parts: RLParts, step: int) -> Experience:
    """Sampled and evaluated; what credit would add is left at nothing."""
    prompts = parts.prompts.take(step * parts.prompts_per_step, parts.prompts_per_step)
    seed = derive_seed(0, "agreement", step)
    rollouts = parts.engine.generate(prompts, parts.sampling, samples_per_prompt=1, seed=seed)
    release_memory(parts.engine)
    scores = [Score(0.0) for _ in rollouts]
    batch = collate(
        rollouts, scores, pad_id=parts.pad_id, temperature=parts.sampling.temperature, need_groups=False
    ).batch
    learner = parts.learner
    evaluated = evaluate_tokens(
        batch,
        parts.roles,
        minibatch_size=parts.algorithm.minibatch_size,
        micro_tokens=learner.micro_tokens,
        device=learner.device,
        halve=learner.halve,
    )
    nothing = torch.zeros_like(evaluated.old_logprobs)
    return extend(evaluated, Experience, rewards=nothing, advantages=nothing, returns=None)


def summary(sampler: Tensor, trainer: Tensor) -> dict[str, float]:
    """Of (N,) log-probs each, in float64."""
    sampler, trainer = sampler.double(), trainer.double()
    gaps = (sampler - trainer).abs().sort().values
    return {
        "tokens": len(gaps),
        "mean": float(gaps.mean()),
        "p50": float(gaps[len(gaps) // 2]),
        "p99": float(gaps[int(0.99 * len(gaps))]),
        "p99.9": float(gaps[int(0.999 * len(gaps))]),
        "max": float(gaps[-1]),
        "kl_k3": float(kl_estimate(sampler, trainer, "k3").mean()),
        "kl_k1": float((sampler - trainer).mean()),
    }


def main() -> None:
    """Sample until there are enough tokens, and print what they say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--task", default="reasoning-gym:chain_sum")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype")
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop with what there is after so many")
    parser.add_argument("--json")
    options = parser.parse_args()
    options.dtype = options.dtype or ("bfloat16" if options.device.startswith("cuda") else "float32")
    parts, tokenizer = parts_of(options)
    columns: list[tuple[Tensor, Tensor]] = []
    worst: list[tuple[ApartToken, str]] = []
    count, step, began = 0, 0, time.perf_counter()
    while count < options.tokens and time.perf_counter() - began < options.seconds:
        batch = one_batch(parts, step)
        mask = batch.response_mask
        columns.append((batch.untruncated_logprobs[mask].float(), batch.old_logprobs[mask].float()))
        found = [(token, tokenizer.decode([token.token])) for token in worst_tokens(batch)]
        worst = sorted(worst + found, key=lambda each: -each[0].gap)[:5]
        count += int(mask.sum())
        step += 1
        print(f"{count:,} tokens, {time.perf_counter() - began:.0f} s", flush=True)
    sampler, trainer = (torch.cat(column) for column in zip(*columns, strict=True))
    result: dict[str, Any] = {
        "model": options.model, "device": options.device, "dtype": options.dtype, "task": options.task,
        "notices": list(getattr(parts.engine, "notices", ())), **summary(sampler, trainer),
        "seconds": round(time.perf_counter() - began, 1),
        "worst": [{"text": text, "sampler": token.sampler, "trainer": token.trainer} for token, text in worst],
    }  # fmt: skip
    print(json.dumps(result))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
