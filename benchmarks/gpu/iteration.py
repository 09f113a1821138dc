"""One PPO iteration on a GPU: seconds by phase, peak memory, and the share of the chip's matrix rate.

    python benchmarks/gpu/iteration.py --shape 1b [--mode separate] [--critic separate] [--micro-batch-tokens 4096]
        [--prompts 256] [--prompt 128] [--new 128] [--repeats 3] [--set KEY=VALUE ...] [--json FILE]

Random weights in bf16. Rollouts, a reward model of the same shape, the reference, values, four epochs of one optimizer
step each: what TRL's PPO does with `num_mini_batches=1`. The best of `--repeats` iterations, after two that compile.
Operations counted: forward passes of the four roles, and for the update three times a forward pass where weights are
trained, twice where only adapters are (without the adapters' own products); recomputation is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, forward_operations, matrix_rate, random_model

from tether.config.load import load_recipe
from tether.models.backbones import Backbone, ScalarHead, backbone_notices, shared_tree
from tether.models.load import LoadedModel
from tether.models.scalar_models import ScalarModel
from tether.models.sharing import Adapters, Separate
from tether.rewards.model import RewardModelReward
from tether.train.build import build_rl
from tether.train.rl import RLParts, rl_step


def iteration_parts(options: argparse.Namespace) -> RLParts:
    """A PPO run whose four roles follow the options."""
    flags = {
        "model.dtype": "bfloat16", "roles.mode": options.mode, "roles.critic": options.critic,
        "task.name": "smollm_shape:RandomPrompts",
        "task.options": {"count": options.prompts * 8, "length": options.prompt},
        "rollout.prompts_per_step": options.prompts, "rollout.max_new_tokens": options.new,
        "rollout.max_num_seqs": options.prompts, "ppo.epochs": options.epochs, "ppo.minibatch_size": options.prompts,
        "optimizer.policy_lr": 1e-6, "optimizer.critic_lr": 1e-6,
        "optimizer.micro_batch_tokens": options.micro_batch_tokens,
    }  # fmt: skip
    arguments = [f"--{key}={json.dumps(value)}" for key, value in flags.items()]
    recipe: Any = load_recipe("ppo", None, arguments + [f"--{each}" for each in options.set])
    loaded = random_model(options.shape)
    parts = build_rl(recipe, loaded)
    return dataclasses.replace(parts, reward=reward_model(parts, loaded, recipe, options))


def reward_model(parts: RLParts, loaded: LoadedModel, recipe: Any, options: argparse.Namespace) -> RewardModelReward:
    """A reward model of the same shape: a separate one, or adapters on the shared base."""
    policy = parts.roles.actor.policy
    if options.mode == "lora":
        roles = recipe.roles
        base = shared_tree(loaded.model)
        own: Backbone = Adapters(base, roles.lora_rank, roles.lora_alpha, roles.lora_targets, 3).scalar_backbone(3)
    else:
        own = Separate(policy).scalar_backbone(0)
    head = ScalarHead.like_output(policy, deviation=0.04, seed=0)
    model = ScalarModel(own, head, "reward").requires_grad_(False)
    return RewardModelReward(model, dataclasses.replace(loaded, model=own.model), 4 * options.micro_batch_tokens)


class Clock:
    """The start of each phase of an iteration, with the device synchronized, and its peak memory."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, float]] = []
        self.peaks: dict[str, float] = {}
        self.beside = 0.0  # GiB of the sampler's cache, which torch does not count

    def __call__(self, doing: str) -> None:
        """Mark the start of a phase."""
        torch.cuda.synchronize()
        if self.marks:
            beside = self.beside if self.marks[-1][0] == "rollout" else 0.0
            self.peaks[self.marks[-1][0]] = torch.cuda.max_memory_allocated() / 2**30 + beside
        torch.cuda.reset_peak_memory_stats()
        self.marks.append((doing.split(",")[0], time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase, and of the whole."""
        self("end")
        times = {name: after - at for (name, at), (_, after) in zip(self.marks, self.marks[1:], strict=False)}
        return times | {"whole": self.marks[-1][1] - self.marks[0][1]}


def one_iteration(parts: RLParts, step: int, release: bool) -> tuple[dict[str, float], dict[str, float]]:
    """`(seconds, peak GiB)` by phase."""
    clock = Clock()

    def doing(what: str) -> None:
        clock.beside = getattr(parts.engine, "cache_bytes", 0) / 2**30
        if what.startswith("scores") and release:
            parts.engine.release()  # pyright: ignore[reportAttributeAccessIssue]
        clock(what)

    rl_step(parts, step, parts.algorithm.controllers, doing)
    return clock.seconds(), clock.peaks


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The best iteration of several."""
    parts = iteration_parts(options)
    gc.collect()
    torch.cuda.empty_cache()
    runs: list[dict[str, float]] = []
    peaks: dict[str, float] = {}
    for step in range(options.repeats + options.warmup):
        seconds, peak = one_iteration(parts, step, options.release)
        print(options.shape, options.mode, step, {k: round(v, 3) for k, v in seconds.items()}, flush=True)
        if step >= options.warmup:
            runs.append(seconds)
            peaks = {name: max(peak[name], peaks.get(name, 0.0)) for name in peak}
    best = min(runs, key=lambda run: run["whole"])
    rate = matrix_rate()
    shape, length = SHAPES[options.shape], options.prompt + options.new
    backbone, head = forward_operations(shape, options.prompts, length, options.new + 1)
    backbones = 2 if options.critic == "separate" else 1
    times = 2 if options.mode == "lora" else 3
    update = options.epochs * times * (backbones * backbone + head)  # of whole backbones: shared_backbone does less
    return {
        "shape": options.shape, "mode": options.mode, "critic": options.critic, "settings": options.set,
        "micro_batch_tokens": options.micro_batch_tokens, "seconds": best, "all": [run["whole"] for run in runs],
        "peak_gib": peaks, "peak": max(peaks.values()), "matrix_rate": rate, "update_operations": update,
        "update_share": update / best["update"] / rate if options.mode != "shared_backbone" else None,
        "notices": [*getattr(parts.engine, "notices", ()), *backbone_notices(parts.roles.actor)],
    }  # fmt: skip


def profiled(options: argparse.Namespace) -> None:
    """The device time of one iteration, by kernel."""
    parts = iteration_parts(options)
    one_iteration(parts, 0, options.release)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        one_iteration(parts, 1, options.release)
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    print(f"{options.shape} {options.mode}: {total / 1e6:.3f} s of kernels")
    for event in events[:32]:
        print(f"{event.self_device_time_total / 1e3:9.1f} ms {event.count:7d} {event.key[:110]}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shape", default="1b", choices=list(SHAPES))
    parser.add_argument("--mode", default="separate", choices=["separate", "lora", "shared_backbone"])
    parser.add_argument("--critic", default="separate", choices=["separate", "head"])
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--release", action="store_true", help="free the sampler's cache before the update")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the recipe")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.profile:
        profiled(options)
        return
    found = measure(options)
    print(json.dumps(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
