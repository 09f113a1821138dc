"""Critic warm-up: the critic learns, and of the policy, its optimiser state and its controllers no bit changes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from in_process import step_by_step, whole
from same_runs import differences
from tiny_recipes import tiny

from tether.config.load import load_recipe
from tether.doctor.doctor import Doctor
from tether.store.read import open_workspace, read_run
from tether.store.recorded import RecordedRun
from tether.train.build import build_rl, load_policy
from tether.train.rl import RLParts, StepResult, train_rl
from tether.train.run import run_recipe

WARMUP = 2
SMALL = [
    *("--run.steps", str(WARMUP + 1), "--rollout.prompts_per_step", "4", "--rollout.max_new_tokens", "4"),
    *("--optimizer.policy_lr", "3e-3", "--optimizer.critic_lr", "3e-3", "--optimizer.weight_decay", "0.1"),
    *("--ppo.critic_warmup", str(WARMUP), "--ppo.epochs", "2", "--ppo.minibatch_size", "2"),
    *("--store.top_logprobs", "0", "--model.device", "cpu"),
]
MODES = {
    "separate": [],
    "lora": ["--roles.mode", "lora", "--roles.lora_rank", "2"],
    "shared_backbone": ["--roles.mode", "shared_backbone", "--roles.trainable_layers", "1"],
}
OBJECTIVES = {
    "clip": ["--kl.controller", "adaptive", "--ppo.target_kl", "0.5"],
    "penalty": ["--ppo.objective", "kl_penalty", "--kl.controller", "proportional", "--kl.horizon", "100"],
    "unclipped": [
        *("--ppo.objective", "unclipped", "--ppo.entropy_coef", "0.5"),
        *("--kl.apply_to", "loss", "--kl.estimator", "k3", "--kl.coef", "0.3", "--kl.controller", "adaptive"),
    ],
}
STATES = {"adamw": [], "adamw_8bit": ["--optimizer.name", "adamw_8bit"]}


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "abababababababab"}\n')
    return ["--ptx.data", str(path), "--ptx.coef", "5"]


def build(*flags: str) -> RLParts:
    recipe = load_recipe("ppo", None, [*SMALL, *flags])
    return build_rl(recipe, load_policy(recipe))


def tensors(parts: RLParts) -> dict[str, torch.Tensor]:
    """Everything that the roles hold, by role."""
    reference = parts.roles.reference
    frozen = {} if reference is None else {f"reference/{k}": v for k, v in reference.backbone.state_dict().items()}
    learned = {name: parameter.detach() for name, parameter in parts.learner.named.items()}
    policy = {f"policy/{name}": value for name, value in parts.roles.actor.policy.state_dict().items()}
    return {name: value.clone() for name, value in (frozen | policy | learned).items()}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name.partition("/")[0] for name in before if not torch.equal(before[name], after[name])}


def check_metrics(result: StepResult) -> None:
    found = result.metrics
    assert found["critic_warmup"] == 1.0 and found["value_loss"] > 0.0 and found["grad_norm/critic"] > 0.0
    assert (
        not {"policy_loss", "clip_fraction", "approx_kl", "approx_kl_after", "ptx_loss", "grad_norm/policy"}
        & found.keys()
    )
    assert all(map(math.isfinite, found.values()))
    assert bool((result.ratios == 1.0).all())


# Every mode with every critic; of the objectives, texts and states each meets two, so that all pairs occur somewhere.
COMBINATIONS = [
    (mode, critic, objective, with_texts, state)
    for place, (mode, critic) in enumerate(itertools.product(MODES, ("head", "separate")))
    for objective, with_texts, state in (
        (list(OBJECTIVES)[place % 3], place % 2 == 0, "adamw"),
        (list(OBJECTIVES)[(place + 1 + place // 3) % 3], place % 2 == 1, "adamw_8bit"),
    )
]


@pytest.mark.parametrize(("mode", "critic", "objective", "with_texts", "state"), COMBINATIONS)
def test_only_the_critic_moves(texts: list[str], mode: str, critic: str, objective: str, with_texts: bool, state: str):
    more = texts if with_texts else []
    parts = build(*MODES[mode], *OBJECTIVES[objective], *STATES[state], "--roles.critic", critic, *more)
    start, controllers = tensors(parts), parts.algorithm.controllers
    steps = train_rl(parts)
    for _ in range(WARMUP):
        before = tensors(parts)
        result = next(steps)
        check_metrics(result)
        assert changed(before, tensors(parts)) == {"critic"}
        assert result.controllers == controllers
    slots = parts.learner.state().tensors.keys() - parts.learner.named.keys()
    assert slots and all(name.startswith("critic/") for name in slots)  # of the policy nothing is kept yet
    after = next(steps)
    assert changed(start, tensors(parts)) == {"critic", "policy"}
    assert "critic_warmup" not in after.metrics and "policy_loss" in after.metrics
    assert ("ptx_loss" in after.metrics) == with_texts
    assert after.controllers != controllers


def test_after_warm_up_training_goes_on_as_from_a_fresh_policy():
    """A run that has the warmed critic from the start, and no warm-up, takes the very same steps from there."""
    warmed, fresh = build("--roles.critic", "head"), build("--roles.critic", "head", "--ppo.critic_warmup", "0")
    steps = train_rl(warmed)
    for _ in range(WARMUP):
        next(steps)
    saved = warmed.learner.state(copy=True)
    fresh.learner.load_state(saved)
    (ours,) = train_rl(fresh, start=WARMUP)
    theirs = next(steps)
    same = [key for key in ours.metrics if not key.startswith("seconds")]
    assert {key: ours.metrics[key] for key in same} == {key: theirs.metrics[key] for key in same}
    assert not changed(tensors(fresh), tensors(warmed))


def test_a_run_that_is_stopped_within_its_warm_up_ends_with_the_same_bits(tmp_path: Path, texts: list[str]):
    def recipe(name: str, *more: str):
        short = ("--run.steps", "3", "--ppo.critic_warmup", "2", "--ppo.objective", "kl_penalty")
        kept = ("--roles.critic", "head", "--optimizer.name", "adamw_8bit", "--evaluation.every", "0")
        return tiny("ppo", tmp_path / name, *short, *kept, *texts, *more)

    calm = whole(recipe("calm"))
    assert differences(calm, step_by_step(recipe("stopped", "--checkpoint.every", "0"))) == []


@pytest.mark.parametrize("mode", ["lora", "shared_backbone"])  # whose reference is another pass than the policy's
def test_the_doctor_says_nothing_of_a_policy_that_is_meant_to_stand_still(tmp_path: Path, capsys, mode: str):
    more = ["--run.steps", "22", "--ppo.critic_warmup", "20", "--run.directory", str(tmp_path), "--run.name", "warm"]
    more += ["--rollout.prompts_per_step", "8", "--run.save", "false", "--kl.controller", "adaptive"]
    more += ["--rollout.max_new_tokens", "4", "--checkpoint.every", "0", "--ppo.minibatch_size", "8"]
    assert run_recipe(load_recipe("ppo", None, [*SMALL, *MODES[mode], *more]), json_output=True) == 0
    capsys.readouterr()
    with open_workspace(tmp_path) as opened:
        run: RecordedRun = read_run(opened, "warm")
        found = {finding.audit for finding in Doctor().examine(run)}
    about_the_policy = {"not-training", "not-finite", "rollout-mismatch", "negative-kl", "kl-runaway", "clip"}
    about_the_policy |= {"entropy-collapse", "early-stop", "gradient-spikes", "critic", "critic-rate"}
    assert not found & about_the_policy
