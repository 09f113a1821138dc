"""`distributed.shard: full`: ranks share weights, gradients and optimizer state, to the bits of one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from in_process import attempt
from ranks_runner import on_ranks, trained
from same_runs import differences
from tiny_recipes import TOP, tiny

import tether.distributed.fsdp  # noqa: F401  (once, before ranks are forked)
from tether.distributed.group_ranks import GroupRanks, check_recipe
from tether.errors import ConfigError, RankLost
from tether.models import backbones
from tether.store import checkpoints
from tether.store.folder import RunFolder

FULL = ("--distributed.shard", "full")
LORA = ("--roles.mode", "lora", "--roles.lora_rank", "2")
FEW = ("--optimizer.micro_batch_tokens", "16", "--run.steps", "3")
CASES = {
    "ppo": (3, "ppo", ()),
    "ppo with lora": (2, "ppo", LORA),
    "ppo with a value head": (3, "ppo", ("--roles.critic", "head", "--distributed.rollout_chunk", "1")),
    "grpo with recomputed layers": (2, "grpo", ("--model.gradient_checkpointing", "true")),
    "sft": (3, "sft", ("--sft.batch_size", "5")),
    "reward": (2, "reward", ("--reward.batch_size", "5")),
    "dpo": (4, "dpo", ("--dpo.batch_size", "5")),
}
HYBRID = ("--distributed.shard", "hybrid", "--distributed.shard_ranks", "2")


@pytest.mark.parametrize("case", CASES)
def test_shared_weights_give_the_bits_of_one_process(tmp_path, case):
    count, method, flags = CASES[case]
    one = trained(tiny(method, tmp_path / "one", *FEW, *flags), 1)
    several = trained(tiny(method, tmp_path / "several", *FEW, *flags, *FULL), count)
    assert differences(one, several) == []


HYBRID_CASES = {
    "ppo": ("ppo", ()),
    "ppo with lora": ("ppo", LORA),
    "grpo": ("grpo", ("--distributed.rollout_chunk", "1")),
    "sft": ("sft", ("--sft.batch_size", "5")),
    "dpo": ("dpo", ("--dpo.batch_size", "5")),
}


@pytest.mark.parametrize("case", HYBRID_CASES)
def test_two_copies_shared_by_two_ranks_each_give_the_bits_of_one_process(tmp_path, case):
    method, flags = HYBRID_CASES[case]
    one = trained(tiny(method, tmp_path / "one", *FEW, *flags), 1)
    several = trained(tiny(method, tmp_path / "several", *FEW, *flags, *HYBRID), 4)
    assert differences(one, several) == []


def test_copies_go_on_as_one_copy_or_none(tmp_path):
    """Three ranks are no whole number of copies of two: all share one."""
    flags = (*FEW, "--run.steps", "5")
    calm = trained(tiny("ppo", tmp_path / "calm", *flags), 1)
    recipe = tiny("ppo", tmp_path / "moved", *flags, *HYBRID)
    for count in (4, 3, 1, 2):
        trained(recipe, count, steps=1)
    assert differences(calm, trained(recipe, 4)) == []


def test_a_run_goes_on_with_any_number_of_ranks(tmp_path):
    flags = (*FEW, "--run.steps", "5")
    calm = trained(tiny("ppo", tmp_path / "calm", *flags), 1)
    recipe = tiny("ppo", tmp_path / "moved", *flags, *FULL)
    for count in (3, 1, 2, 4):
        trained(recipe, count, steps=1)
    assert differences(calm, trained(recipe, 1)) == []


def test_each_rank_writes_its_share_of_a_checkpoint(tmp_path):
    run = trained(tiny("sft", tmp_path, *FEW, *FULL), 2)
    folder = checkpoints.listed(RunFolder(run).checkpoints)[-1][1]
    sizes = [sum(path.stat().st_size for path in folder.glob(f"learner.{rank:05d}-*")) for rank in range(2)]
    assert min(sizes) > 0.4 * sum(sizes)
    assert not list(folder.glob("learner-*"))
    file = next(folder.glob("learner.00001-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "is not what was written" in str(checkpoints.damage(folder))


@pytest.mark.parametrize(("count", "shard"), [(2, FULL), (4, HYBRID)], ids=["full", "hybrid"])
def test_fast_is_within_rounding(tmp_path, count, shard):
    flags = (*FEW, "--sft.batch_size", "5")
    one = trained(tiny("sft", tmp_path / "one", *flags), 1)
    fast = trained(tiny("sft", tmp_path / "fast", *flags, *shard, "--distributed.reduction", "fast"), count)
    pair = [checkpoints.read_newest(RunFolder(run).checkpoints, print) for run in (one, fast)]
    first, second = (found.tensors["learner"] for found in pair if found is not None)
    for name in first:
        if "/exp_avg" not in name:
            torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)


def test_the_pass_over_packed_tokens_is_taken(tmp_path, monkeypatch):
    """With the models' own modules out of order, so that nothing else can run the layers."""
    shard = GroupRanks._shard

    def refused(*given, **named):
        raise AssertionError("the model's own modules were run")

    def shard_and_refuse(self, training, recipe):
        shard(self, training, recipe)
        backbones.hidden_states = refused
        assert not [notice for notice in training.notices if "own modules" in notice]

    monkeypatch.setattr(GroupRanks, "_shard", shard_and_refuse)
    for name, flags in (("full", ()), ("lora", LORA)):
        trained(tiny("ppo", tmp_path / name, *FEW, *flags, *FULL), 2)


def test_the_models_own_modules_run_gathered_as_well(tmp_path, monkeypatch):
    """What the packed pass does not know is run layer by layer all the same, and said."""
    monkeypatch.setattr(backbones, "training_unsupported", lambda model: "nobody knows it")
    one = trained(tiny("sft", tmp_path / "one", *FEW), 1)
    assert differences(one, trained(tiny("sft", tmp_path / "two", *FEW, *FULL), 2)) == []


def test_at_rest_a_rank_holds_its_share_and_no_more(tmp_path, monkeypatch):
    shard = GroupRanks._shard

    def shard_and_count(self, training, recipe):
        whole = sum(each.numel() for each in training.parts.roles.actor.parameters())
        shard(self, training, recipe)
        units = self.shares.models.units
        own = sum(share.to_local().numel() for unit in units for share in unit.shares)
        record = {"whole": whole, "own": own, "trained": sum(each.numel() for each in self.learner_numbers(training))}
        (Path(tmp_path) / f"{self.index}.json").write_text(json.dumps(record))

    monkeypatch.setattr(GroupRanks, "learner_numbers", lambda self, t: t.learner.named.values(), raising=False)
    monkeypatch.setattr(GroupRanks, "_shard", shard_and_count)
    trained(tiny("ppo", tmp_path / "runs", *FEW, *FULL), 2)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for each in found:
        assert each["trained"] < 0.55 * each["whole"]
        assert each["own"] < 0.55 * 1.5 * each["whole"]  # with the reference


@pytest.mark.parametrize(
    "flags",
    [TOP, ("--roles.offload_reference", "true"), ("--optimizer.name", "adamw_8bit")],
)
def test_what_needs_whole_weights_is_refused(tmp_path, flags):
    with pytest.raises(ConfigError, match="which needs whole weights"):
        check_recipe(tiny("ppo", tmp_path, *FULL, *flags))


def test_a_rank_that_fails_in_a_pass_ends_all(tmp_path, monkeypatch, capfd):
    from tether.models.roles import ActorCritic

    whole = ActorCritic.forward

    def failing(self, batch):
        if os.environ.get("RANK") == "1":
            raise torch.OutOfMemoryError("out of memory")
        return whole(self, batch)

    monkeypatch.setattr(ActorCritic, "forward", failing)
    codes = on_ranks(3, lambda: attempt(tiny("sft", tmp_path, *FEW, *FULL)).steps)
    assert codes[0] == RankLost.exit_code
    assert "lower optimizer.micro_batch_tokens" in capfd.readouterr().err
