"""The difference between the sampler's and the trainer's log-probs over many tokens: mean, p99.9, max, and the KL.

    python benchmarks/gpu/agreement.py [--model smollm2-135m] [--tokens 1000000] [--device cuda] [--dtype bfloat16]
        [--prompts 1024] [--samples 1] [--new 128] [--seconds N] [--json FILE] [--seed 0] [--keep FILE]
        [--join FILE ...] [--numerics exact] [--adapters] [--mixed]

Default settings of PPO (temperature 1, the whole distribution), real weights, questions of `--task`. Every batch of
answers is evaluated as training would before its first update; the weights never change. The KL is the mean of
k3 = r - 1 - log r with r = trainer / sampler, an estimate of KL(sampler || trainer) per token that is never negative;
k1, the mean of sampler - trainer, is printed beside it, and `unequal` counts the tokens that differ in any bit. A CPU
needs hours for a million tokens: `--keep` writes this run's tokens into a safetensors file after every batch, the same
command continues such a file, and `--join` includes such files of runs with other seeds. `--mixed` draws other numbers
of questions, answers at once, tokens of an answer and tokens of a micro-batch for every batch; `--adapters` samples
with LoRA adapters whose weights are random.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tether.config.load import load_recipe
from tether.data.rows import collate
from tether.learner.batching import evaluate_tokens
from tether.ops.kl import kl_estimate
from tether.seeds import derive_seed
from tether.train.build import build_rl, load_policy
from tether.train.rl import RLParts
from tether.types import EvaluatedBatch, Score

Columns = dict[str, Tensor]  # (N,) each: "sampler" and "trainer", log-probs of a token, and "token", its id

QUESTIONS = 4096


def parts_of(options: argparse.Namespace) -> tuple[RLParts, Any]:
    """A PPO run with default settings except for sizes."""
    flags: dict[str, Any] = {
        "model.path": options.model,
        "model.device": options.device,
        "model.dtype": options.dtype,
        "task.name": options.task,
        "rollout.prompts_per_step": options.prompts,
        "rollout.samples_per_prompt": options.samples,
        "rollout.max_new_tokens": options.new,
        "run.seed": options.seed,
        "kl.apply_to": "none",
        "roles.critic": "head",
        "roles.mode": "lora" if options.adapters else "separate",
        "model.numerics": options.numerics,
    }
    if options.task.startswith("reasoning-gym:"):
        flags["task.options"] = {"size": max(QUESTIONS, options.prompts)}
    recipe = load_recipe("ppo", None, [f"--{key}={json.dumps(value)}" for key, value in flags.items()])
    policy = load_policy(recipe)
    parts = build_rl(recipe, policy)  # pyright: ignore[reportArgumentType]
    if options.adapters:
        fill_adapters(parts.roles.actor, options.seed)
    return dataclasses.replace(parts, roles=dataclasses.replace(parts.roles, known_logprobs=False)), policy.tokenizer


@torch.no_grad()
def fill_adapters(model: torch.nn.Module, seed: int) -> None:
    """Adapters begin as zeros: give them weights that show."""
    drawn = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.01)


def mixed(parts: RLParts, options: argparse.Namespace, step: int) -> RLParts:
    """The parts with sizes drawn for this batch; `options` has the largest of each."""
    drawn, engine = random.Random(options.seed * 1_000_003 + step), parts.engine
    engine.max_num_seqs = drawn.randint(1, 64)  # pyright: ignore[reportAttributeAccessIssue]
    parts.learner.micro_batch_tokens = drawn.choice((256, 512, 1024, 2048))
    sampling = dataclasses.replace(parts.sampling, max_new_tokens=drawn.randint(1, options.new))
    return dataclasses.replace(parts, sampling=sampling, prompts_per_step=drawn.randint(1, options.prompts))


def one_batch(parts: RLParts, options: argparse.Namespace, step: int) -> EvaluatedBatch:
    """Sample and evaluate one batch."""
    parts = mixed(parts, options, step) if options.mixed else parts
    prompts = parts.prompts.take(step * parts.prompts_per_step, parts.prompts_per_step)
    seed = derive_seed(options.seed, "agreement", step)
    rollouts = parts.engine.generate(prompts, parts.sampling, samples_per_prompt=options.samples, seed=seed)
    parts.engine.release()
    scores = [Score(0.0) for _ in rollouts]
    batch = collate(
        rollouts, scores, pad_id=parts.pad_id, temperature=parts.sampling.temperature, need_groups=False
    ).batch
    learner = parts.learner
    return evaluate_tokens(
        batch,
        parts.roles,
        minibatch_size=parts.algorithm.minibatch_size,
        micro_batch_tokens=learner.micro_batch_tokens,
        device=learner.device,
        shrink_micro_batch=learner.shrink_micro_batch,
    )


def columns_of(batch: EvaluatedBatch) -> Columns:
    """The sampled tokens of a batch."""
    mask = batch.response_mask
    return {
        "sampler": batch.untruncated_logprobs[mask].float(),
        "trainer": batch.old_logprobs[mask].float(),
        "token": batch.tokens[mask],
    }


def joined(parts: list[Columns]) -> Columns:
    """Concatenate the columns."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def origin(options: argparse.Namespace) -> dict[str, str]:
    """The metadata of a file of kept tokens."""
    named = ("seed", "model", "task", "dtype", "new", "numerics", "adapters", "mixed", "prompts", "samples")
    return {name: str(getattr(options, name)) for name in named}


def keep(columns: Columns, options: argparse.Namespace, steps: int) -> None:
    """Write to a temporary file and rename it, so that an interrupted run loses at most one batch."""
    half = Path(f"{options.keep}.half")
    save_file(columns, half, metadata=origin(options) | {"steps": str(steps)})
    half.replace(options.keep)


def begun(options: argparse.Namespace) -> tuple[list[Columns], int]:
    """What this command has kept before, and in how many batches."""
    if not options.keep or not Path(options.keep).is_file():
        return [], 0
    with safe_open(options.keep, "pt") as file:
        said = dict(file.metadata())
        columns = {name: file.get_tensor(name) for name in ("sampler", "trainer", "token")}
    steps = int(said.pop("steps", "0"))
    if said != origin(options):
        raise SystemExit(f"--keep: {options.keep} is of another run: {said}")
    return [columns], steps


def kept(options: argparse.Namespace) -> list[Columns]:
    """The tokens of earlier runs; rejects duplicates."""
    found: list[Columns] = []
    seeds = {str(options.seed): "this run"}
    for path in options.join:
        try:
            with safe_open(path, "pt") as file:
                said = file.metadata() or {}
                found.append({name: file.get_tensor(name) for name in ("sampler", "trainer", "token")})
        except (OSError, SafetensorError) as unread:
            raise SystemExit(f"--join: {path} is not a file that --keep wrote: {unread}") from unread
        other = [name for name, value in origin(options).items() if name != "seed" and said.get(name) != value]
        if other:
            raise SystemExit(f"--join: {path} is of another {' and '.join(other)}: {said}")
        if said["seed"] in seeds:
            raise SystemExit(
                f"--join: {path} has the seed of {seeds[said['seed']]}: it would count the same tokens twice"
            )
        seeds[said["seed"]] = path
    return found


def summary(columns: Columns) -> dict[str, float]:
    """The statistics, in float64."""
    sampler, trainer = columns["sampler"].double(), columns["trainer"].double()
    gaps = (sampler - trainer).abs().sort().values
    return {
        "tokens": len(gaps),
        "unequal": int((columns["sampler"].view(torch.int32) != columns["trainer"].view(torch.int32)).sum()),
        "mean": float(gaps.mean()),
        "p50": float(gaps[len(gaps) // 2]),
        "p99": float(gaps[int(0.99 * len(gaps))]),
        "p99.9": float(gaps[int(0.999 * len(gaps))]),
        "max": float(gaps[-1]),
        "kl_k3": float(kl_estimate(sampler, trainer, "k3").mean()),
        "kl_k1": float((sampler - trainer).mean()),
    }


def worst(columns: Columns, tokenizer: Any, count: int = 5) -> list[dict[str, Any]]:
    """The tokens with the largest differences, worst first."""
    gaps = (columns["sampler"] - columns["trainer"]).abs()
    return [
        {"text": tokenizer.decode([int(columns["token"][at])])}
        | {name: float(columns[name][at]) for name in ("sampler", "trainer")}
        for at in gaps.topk(min(count, len(gaps))).indices.tolist()
    ]


def options_given() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--task", default="reasoning-gym:chain_sum")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype")
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=1, help="answers to each question")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit; reports what it has by then")
    parser.add_argument("--json")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the questions and of sampling")
    parser.add_argument("--keep", help="a safetensors file for this run's tokens, written after every batch")
    parser.add_argument("--join", nargs="+", default=[], help="such files of earlier runs to include")
    parser.add_argument("--numerics", default="fast", choices=("fast", "exact"))
    parser.add_argument("--adapters", action="store_true", help="LoRA adapters with random weights")
    parser.add_argument("--mixed", action="store_true", help="draw the sizes of every batch, up to those given")
    options = parser.parse_args()
    options.dtype = options.dtype or ("bfloat16" if options.device.startswith("cuda") else "float32")
    return options


def main() -> None:
    """Sample until there are enough tokens, and print the statistics."""
    options = options_given()
    before = kept(options)
    seen, step = begun(options)
    parts, tokenizer = parts_of(options)
    count, began = sum(len(part["token"]) for part in before + seen), time.perf_counter()
    while count < options.tokens and time.perf_counter() - began < options.seconds:
        seen.append(columns_of(one_batch(parts, options, step)))
        count += len(seen[-1]["token"])
        step += 1
        if options.keep:
            keep(joined(seen), options, step)
        print(f"{count:,} tokens, {time.perf_counter() - began:.0f} s", flush=True)
    columns = joined(before + seen)
    result: dict[str, Any] = {
        "model": options.model, "device": options.device, "dtype": options.dtype, "task": options.task,
        "notices": list(getattr(parts.engine, "notices", ())), **summary(columns),
        "seconds": round(time.perf_counter() - began, 1),
        "worst": worst(columns, tokenizer),
    }  # fmt: skip
    print(json.dumps(result))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
