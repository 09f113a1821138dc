"""Critic warm-up and TRPO's critic on a CUDA device. Skipped where there is none."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from tether.config.load import load_recipe
from tether.train.build import build_rl, load_policy
from tether.train.rl import RLParts, train_rl

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WARMUP = 2
SMALL = [
    *("--run.steps", "4", "--rollout.prompts_per_step", "8", "--rollout.max_new_tokens", "6", "--model.device", "cuda"),
    *("--optimizer.policy_lr", "3e-3", "--optimizer.critic_lr", "3e-3", "--optimizer.weight_decay", "0.1"),
]
MODES = {
    "separate": [],
    "lora": ["--roles.mode", "lora", "--roles.lora_rank", "2"],
    "shared_backbone": ["--roles.mode", "shared_backbone", "--roles.trainable_layers", "1"],
}
COMBINATIONS = itertools.product(MODES, ("head", "separate"), ("float32", "bfloat16"), ("adamw", "adamw_8bit"))


def build(method: str, *flags: str) -> RLParts:
    recipe = load_recipe(method, None, [*SMALL, *flags])
    return build_rl(recipe, load_policy(recipe))


def of(parts: RLParts, group: str) -> list[torch.Tensor]:
    """The group's weights, and all that the optimiser keeps for them."""
    return [tensor for name, tensor in parts.learner.state(copy=True).tensors.items() if name.startswith(f"{group}/")]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize(("mode", "critic", "dtype", "state"), list(COMBINATIONS))
def test_only_the_critic_moves_in_warm_up(tmp_path: Path, mode: str, critic: str, dtype: str, state: str):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "abababababababab"}\n')
    flags = ["--ppo.critic_warmup", str(WARMUP), "--ppo.epochs", "2", "--ppo.minibatch_size", "4"]
    flags += ["--ppo.objective", "kl_penalty", "--kl.controller", "adaptive", "--ptx.data", str(text)]
    flags += ["--model.dtype", dtype, "--optimizer.name", state, "--roles.critic", critic]
    parts = build("ppo", *MODES[mode], *flags)
    policy, critic_before = of(parts, "policy"), of(parts, "critic")
    steps = train_rl(parts)
    for _ in range(WARMUP):
        result = next(steps)
        assert all(map(math.isfinite, result.metrics.values())) and result.metrics["skipped_steps"] == 0
        assert same(policy, of(parts, "policy")) and not same(critic_before, of(parts, "critic"))
        assert result.controllers == parts.algorithm.controllers
    after = next(steps)
    assert "policy_loss" in after.metrics and not same(policy, of(parts, "policy"))


@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_warm_up_with_layers_run_again_in_the_backward_pass(checkpointing: str):
    flags = ["--ppo.critic_warmup", "2", "--roles.critic", "head", "--model.gradient_checkpointing", checkpointing]
    parts = build("ppo", *flags)
    policy = of(parts, "policy")
    steps = train_rl(parts)
    for _ in range(WARMUP):
        next(steps)
    assert same(policy, of(parts, "policy"))


def test_trpo_teaches_its_critic():
    parts = build("trpo", "--trpo.cg_iterations", "2")
    critic = of(parts, "critic")
    result = next(train_rl(parts))
    assert result.metrics["value_loss"] > 0.0 and not same(critic, of(parts, "critic"))
