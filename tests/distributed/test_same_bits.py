"""Weights, checkpoints, metrics and stored tokens of a run are the same bits for 1, 2 and 3 ranks."""

from __future__ import annotations

import struct
import weakref

import pytest
import torch
from ranks_runner import trained
from same_runs import differences, metrics_table
from threaded_engine import ThreadedEngine
from tiny_recipes import TOP, tiny

from tether.distributed.follow import with_same_algorithm
from tether.distributed.group_ranks import code_record
from tether.distributed.sums import OrderedSums
from tether.errors import ConfigError
from tether.learner.learner import Learner
from tether.store import checkpoints
from tether.store.folder import RunFolder
from tether.train import engines

LORA = ("--roles.mode", "lora", "--roles.lora_rank", "2")
CHUNKED = ("--distributed.rollout_chunk", "1")
LAG = ("--rollout.lag", "1", "--rollout.importance_sampling_cap", "2")
FAST = ("--distributed.reduction", "fast")
# A row at a time, so that a step has several micro-batches and the last round fewer of them than there are ranks.
FEW = ("--optimizer.micro_batch_tokens", "16", "--run.steps", "3")
REFILLED = ("--rollout.dynamic_sampling_rounds", "3", "--task.reward", "coarse_reward:reward")
RECORDS = {name: (f"--{name}.batch_size", "5") for name in ("sft", "reward", "dpo")}
CASES = {
    "ppo": ("ppo", ()),
    "ppo with lora": ("ppo", LORA),
    "ppo with a shared backbone": ("ppo", TOP),
    "ppo with a value head": ("ppo", ("--roles.critic", "head", *CHUNKED)),
    "grpo": ("grpo", CHUNKED),
    "grpo with dynamic sampling": ("grpo", (*CHUNKED, *REFILLED)),
    "gspo": ("grpo", ("--grpo.objective", "gspo", "--grpo.epochs", "2")),
    "reinforce with a moving average": ("reinforce", ("--reinforce.baseline", "moving_average")),
    "trpo": ("trpo", ()),
    "ppo with a lag": ("ppo", (*LAG, *CHUNKED)),
    "ppo with a lag and a shared backbone": ("ppo", (*LAG, *TOP)),
    "sft": ("sft", RECORDS["sft"]),
    "sft with a shared backbone": ("sft", (*RECORDS["sft"], *TOP)),
    "reward": ("reward", RECORDS["reward"]),
    "dpo": ("dpo", RECORDS["dpo"]),
}


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_ranks_gives_the_bits_of_one_process(tmp_path, case):
    method, flags = CASES[case]
    one = trained(tiny(method, tmp_path / "one", *FEW, *flags), 1)
    for count in (2, 3):
        several = trained(tiny(method, tmp_path / f"{count}", *FEW, *flags), count)
        assert differences(one, several) == []


@pytest.mark.parametrize("method", ["ppo", "sft"])
def test_fast_is_within_rounding_and_not_the_same_bits(tmp_path, method):
    flags = (*FEW, *RECORDS.get(method, ()))
    one = trained(tiny(method, tmp_path / "one", *flags), 1)
    fast = trained(tiny(method, tmp_path / "fast", *flags, *FAST), 2)
    pair = [checkpoints.read_newest(RunFolder(run).checkpoints, print) for run in (one, fast)]
    first, second = (found.tensors["learner"] for found in pair if found is not None)
    weights = [name for name in first if "/exp_avg" not in name and not name.endswith("/step")]
    for name in weights:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)
    # So the test above compares sums whose order matters.
    assert any(not torch.equal(first[name], second[name]) for name in weights)


@pytest.mark.parametrize(("method", "flags"), [("ppo", ()), ("ppo", LAG), ("sft", TOP)])
def test_a_run_goes_on_with_any_number_of_ranks(tmp_path, method, flags):
    calm = trained(tiny(method, tmp_path / "calm", *FEW, *flags, "--run.steps", "4"), 1)
    recipe = tiny(method, tmp_path / "moved", *FEW, *flags, "--run.steps", "4")
    for count in (1, 3, 2):
        trained(recipe, count, steps=1)
    assert differences(calm, trained(recipe, 1)) == []


def test_a_step_begins_without_the_sums_of_gradients(tmp_path, monkeypatch):
    """They are as large as a rank's part of all gradients, and would stay until the next ones are made."""
    made: list[weakref.ref[OrderedSums]] = []
    begin, step = OrderedSums.__init__, Learner.step

    def noted(self, *given):
        made.append(weakref.ref(self))
        begin(self, *given)

    def checked(self):
        assert made
        assert not [each for each in made if each() is not None]
        return step(self)

    monkeypatch.setattr(OrderedSums, "__init__", noted)
    monkeypatch.setattr(Learner, "step", checked)
    trained(tiny("sft", tmp_path, *FEW), 2)


MINE = """
from dataclasses import replace

def mine(ppo, recipe):
    settings = replace(ppo.advantage_settings, missing_eos_penalty=-2.0)
    return replace(ppo, name="mine", advantage_settings=settings)
"""


@pytest.mark.parametrize("flags", [(), ("--distributed.shard", "full")], ids=["whole", "shared"])
def test_an_algorithm_of_the_user_s_runs_on_every_rank(tmp_path, monkeypatch, flags):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    shipped = trained(tiny("ppo", tmp_path / "shipped", *FEW), 1)
    own = (*FEW, "--algorithm", "mine.py:mine")
    one = trained(tiny("ppo", tmp_path / "one", *own), 1)
    two = trained(tiny("ppo", tmp_path / "two", *own, *flags), 2)
    assert differences(one, two) == []
    assert metrics_table(shipped) != metrics_table(one)


def test_an_algorithm_that_is_other_code_on_another_rank_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    recipe = tiny("ppo", tmp_path / "runs", "--algorithm", "mine.py:mine")
    code = code_record(recipe)
    assert with_same_algorithm(recipe, code, 1).named == {"algorithm": "mine.py:mine"}
    (tmp_path / "mine.py").write_text(MINE.replace("-2.0", "-1.0"))
    with pytest.raises(ConfigError, match=r"algorithm mine\.py:mine is other code on rank 1 than on rank 0"):
        with_same_algorithm(recipe, code, 1)


def test_rank_0_asks_an_engine_that_samples_elsewhere_for_all_ranks(tmp_path, monkeypatch):
    """The run stops and goes on while rollouts are under way, with another number of ranks."""
    one = trained(tiny("ppo", tmp_path / "one", *FEW, *LAG), 1)
    monkeypatch.setattr(engines, "NativeEngine", lambda policy, **settings: ThreadedEngine(policy))
    recipe = tiny("ppo", tmp_path / "several", *FEW, *LAG)
    for count in (2, 3):
        trained(recipe, count, steps=1)
    assert differences(one, trained(recipe, 2)) == []


@pytest.mark.parametrize(
    ("method", "flags", "sign", "times"),
    [
        ("ppo", ("--ppo.target_kl", "1e-5"), "early_stop", 3),
        ("sft", ("--evaluation.every", "1", "--evaluation.patience", "1", "--optimizer.policy_lr", "1.0"), "loss", 1),
    ],
)
def test_ranks_end_an_update_or_a_run_early_together(tmp_path, method, flags, sign, times):
    one, two = (trained(tiny(method, tmp_path / f"{count}", *FEW, *flags), count) for count in (1, 2))
    assert metrics_table(one) == metrics_table(two)
    nothing = struct.pack("<d", 0.0)
    assert sum(name == sign and bits != nothing for _, name, bits in metrics_table(two)) == times


def test_what_one_rank_runs_is_recorded_for_all(tmp_path):
    """Every metric of one process is there, so nothing was measured on some of the micro-batches only."""
    one = trained(tiny("ppo", tmp_path / "one", *FEW), 1)
    two = trained(tiny("ppo", tmp_path / "two", *FEW), 2)
    assert metrics_table(one) == metrics_table(two)
    assert any(name == "approx_kl" for _, name, _ in metrics_table(two))
    ratios = [bits for _, name, bits in metrics_table(two) if name == "first_approx_kl"]
    assert set(ratios) == {bytes(8)}  # the first ratio is exactly 1
