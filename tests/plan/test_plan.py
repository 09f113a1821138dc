"""The plan in whole: what it counts, what it says, and what it advises."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from tether.cli import main
from tether.config.load import load_recipe
from tether.errors import ConfigError
from tether.models.precision import with_precision
from tether.plan.machine import Machine, machine_for, parse_memory
from tether.plan.plan import advice, make_plan
from tether.plan.table import Measured
from tether.plan.workload import Lengths, Shape, shape_of, shape_of_config, work_of

GIB = 2**30
BIG = Machine("cuda", "a device", 80 * GIB, 400e12, 3e12, "as given")


def billion() -> Shape:
    return shape_of_config(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=True,
        )
    )


def plan_of(*flags: str, method: str = "ppo", machine: Machine = BIG, prompt: int = 128):
    recipe = with_precision(load_recipe(method, None, [*flags]), torch.device(machine.kind))
    return recipe, make_plan(recipe, billion(), Lengths.assumed(prompt, "as given"), machine)


def test_a_shape_counts_every_parameter_of_the_model_it_is_read_off():
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    shape = shape_of_config(config)
    assert shape == Shape.of(model)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.output == 300 * 64
    assert shape.adapters(4, "q_proj, v_proj") == 3 * 4 * ((64 + 64) + (64 + 32))


def test_an_architecture_that_is_laid_out_otherwise_is_counted_all_the_same():
    config = GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    shape = shape_of_config(config)
    assert shape.parameters == sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert not shape.packed
    assert ("c_attn", 32, 96) in shape.linears


@pytest.mark.parametrize(
    ("method", "flags", "steps", "why"),
    [
        ("ppo", ["--rollout.prompts_per_step=256"], 16, "256 rollouts, 4 epochs, minibatches of 64: 16 steps"),
        ("rloo", ["--rollout.prompts_per_step=17"], 2, "68 rollouts, 1 epoch, minibatches of 64: 2 steps"),
        ("grpo", [], 1, "64 rollouts, 1 epoch, minibatches of 64: 1 step"),
        ("reinforce", [], 1, "64 rollouts, 1 epoch, minibatches of 64: 1 step"),
        ("trpo", [], 5, "64 rollouts: 1 trust-region step of the policy, then 4 epochs, minibatches of 64: 4 steps"),
        ("sft", ["--data.train=x"], 1, "32 demonstrations: 1 step"),
        ("dpo", ["--data.train=x"], 1, "32 pairs: 1 step"),
    ],
)  # fmt: skip
def test_how_many_optimiser_steps_and_why(method, flags, steps, why):
    work = work_of(load_recipe(method, None, flags), Lengths.assumed(10, "as given"))
    assert (work.steps, work.why) == (steps, why)


def test_weights_gradients_and_optimiser_of_full_fine_tuning_in_half_precision():
    _, plan = plan_of("--model.dtype=bfloat16")
    count = billion().parameters
    policy = next(role for role in plan.memory.roles if role.role == "policy")
    assert (policy.weights, policy.gradients) == (2 * count, 2 * count)
    assert policy.optimizer == 12 * count  # a float32 copy and two running means
    _, without = plan_of("--model.dtype=bfloat16", "--optimizer.master_weights=none")
    assert next(role for role in without.memory.roles if role.role == "policy").optimizer == 4 * count


@pytest.mark.parametrize(
    "flag",
    [
        "--optimizer.micro_batch_tokens=2048", "--model.gradient_checkpointing=true", "--optimizer.name=adamw_8bit",
        "--roles.critic=head", "--roles.mode=lora", "--roles.mode=shared_backbone", "--roles.offload_reference=true",
    ],
)  # fmt: skip
def test_what_is_meant_to_save_memory_saves_some(flag):
    flags = ("--model.dtype=bfloat16", "--rollout.prompts_per_step=256")
    assert plan_of(*flags, flag)[1].memory.peak < plan_of(*flags)[1].memory.peak


def test_graphs_keep_their_activations_while_the_optimiser_steps():
    flags = ("--model.dtype=bfloat16", "--rollout.prompts_per_step=256", "--optimizer.name=adamw_8bit")
    memory = plan_of(*flags)[1].memory
    cache = sum(role.cache for role in memory.roles)
    embedding = 4 * billion().embedding  # in float32: a bucket of its own
    assert memory.phases["update"] >= memory.phases["rollout"] - cache + 3 * embedding


def test_a_head_that_is_the_embedding_waits_for_it_once():
    flags = ("--model.dtype=bfloat16", "--model.gradient_checkpointing=true", "--optimizer.master_weights=none")
    sizes = ("--rollout.prompts_per_step=32", "--ppo.minibatch_size=32", "--rollout.max_new_tokens=128")
    memory = plan_of(*flags, *sizes, "--optimizer.micro_batch_tokens=65536")[1].memory
    before = memory.phases["rollout"] - sum(role.cache for role in memory.roles)
    waiting = memory.phases["update"] - before - sum(role.gradients for role in memory.roles)
    assert 1.0 <= waiting / (2 * billion().embedding) < 1.5  # and the sampler's work space


def test_what_does_not_fit_comes_with_changes_that_make_it_fit():
    small = Machine("cuda", "a device", 24 * GIB, 400e12, 3e12, "as given")
    recipe, plan = plan_of("--model.dtype=bfloat16", "--rollout.prompts_per_step=256", machine=small)
    assert not plan.fits
    alone, together = advice(recipe, plan)
    assert all(change.saves > 0 for change in alone)
    assert together
    flags = [f"--{change.key}={change.value}" for change in together]
    _, changed = plan_of("--model.dtype=bfloat16", "--rollout.prompts_per_step=256", *flags, machine=small)
    assert changed.fits


def test_where_nothing_helps_no_change_is_named():
    tiny = Machine("cuda", "a device", GIB, 400e12, 3e12, "as given")
    recipe, plan = plan_of("--model.dtype=bfloat16", machine=tiny)
    assert advice(recipe, plan)[1] == []


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * GIB), ("24", 24 * GIB), ("80 GB", 80 * 10**9), ("512m", 2**29)]
)
def test_sizes_of_memory_are_read_as_people_write_them(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["lots", "24XB", "-3GiB", ""])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"24GiB|above 0"):
        parse_memory(text)


def test_another_device_needs_a_size():
    with pytest.raises(ConfigError, match="--memory 24GiB"):
        machine_for("cuda", "bfloat16")


def test_a_model_that_is_nowhere_is_named():
    with pytest.raises(ConfigError, match="config"):
        shape_of("./no-such-folder")


def test_the_first_iteration_counts_only_where_it_is_alone():
    measured = Measured(on_cpu=False)
    measured.see({"seconds/step": 9.0, "seconds/update": 8.0, "memory/update": 1.0, "steps": 4.0})
    assert measured.seconds["iteration"] == 9.0
    measured.see({"seconds/step": 1.0, "seconds/update": 0.5, "memory/update": 2.0, "steps": 4.0})
    measured.see({"seconds/step": 3.0, "seconds/update": 1.5, "memory/update": 1.5, "steps": 2.0})
    assert measured.seconds == {"update": 1.0, "iteration": 2.0}
    assert (measured.steps, measured.peak) == (3.0, 2 * GIB)


def test_the_command_prints_a_table_in_plain_words(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")  # a narrow terminal breaks lines
    assert main(["plan", "recipes/tiny-ppo.yaml", "--ppo.epochs", "2"]) == 0
    text = capsys.readouterr().out
    assert "64 rollouts, 2 epochs, minibatches of 64: 2 steps" in text
    assert "It fits" in text
    assert main(["plan", "recipes/ppo-lora-1gpu.yaml", "--model.path", "tiny-bytes", "--device", "cuda"]) == 2


def test_a_plan_says_in_which_precision_weights_are_held(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elsewhere = ["plan", "ppo", "--device", "cuda", "--memory", "24GiB", "--reward.parts=[{kind: model, path: x}]"]
    assert main(elsewhere) == 0
    assert "parameters, bfloat16) on a CUDA device" in capsys.readouterr().out

    def weights(*words: str) -> tuple[str, int, int]:
        assert main([*words, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        held = {role["role"]: role["weights"] for role in told["roles"]}
        return told["model"]["dtype"], held["policy"], held["reward"]

    half, policy, reward = weights(*elsewhere)
    assert half == "bfloat16"
    assert weights(*elsewhere, "--model.dtype", "float32") == ("float32", 2 * policy, reward)
    assert weights("plan", "ppo", "--device", "cpu", elsewhere[-1]) == ("float32", 2 * policy, 2 * reward)


def test_the_command_gives_json_and_advice(capsys):
    words = ["plan", "ppo", "--device", "cuda", "--memory", "0.71GiB", "--json", "--prompt-tokens", "100"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is False
    assert told["tokens"]["prompt_mean"] == 100
    assert {change["key"] for change in told["changes"]} >= {"optimizer.micro_batch_tokens"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "nothing.yaml"], "neither a recipe's file nor a method"),
        (["plan", "recipes/tiny-ppo.yaml", "--ppo.epoch", "2"], "unknown flag --ppo.epoch"),
        (["plan", "ppo", "--memory", "many"], "write it as 24GiB"),
    ],
)
def test_mistakes_are_told(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_run_keeps_its_plan_with_what_was_measured(tmp_path, capsys):
    words = ["train", "ppo", "--run.steps=2", "--rollout.prompts_per_step=4", "--rollout.max_new_tokens=4"]
    assert main([*words, f"--run.directory={tmp_path}", "--run.name=a"]) == 0
    kept = json.loads((tmp_path / "a" / "plan.json").read_text())
    assert kept["predicted"]["optimizer_steps"] == kept["measured"]["optimizer_steps"] == 4
    assert kept["measured"]["iterations"] == 2
    assert kept["measured"]["seconds"]["iteration"] > 0
    text = capsys.readouterr()
    assert "predicted" in text.err and "measured" in text.err
    assert "predicted" not in text.out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--model.dtype", "bfloat16", "--device", "cpu"], "model.dtype is bfloat16"),
        (["--prompt-tokens", "-5"], "--prompt-tokens -5"),
        (["--prompt-tokens", "0"], "--prompt-tokens 0"),
        (["--device", "cuda:0x", "--memory", "8GiB"], "'cuda:0x' is no device"),
    ],
)
def test_what_cannot_be_run_is_not_planned(capsys, words, named):
    assert main(["plan", "recipes/tiny-ppo.yaml", *words]) == 2
    assert named in capsys.readouterr().err


def test_a_rank_of_several_copies_holds_what_those_that_share_one_hold():
    """Eight ranks as two copies of four: the weights of four ranks, and while gradients are added up a little more."""
    flags = ("--distributed.shard", "hybrid", "--distributed.shard_ranks", "4")
    recipe, plan = plan_of(*flags)
    one_copy, two, odd = (
        make_plan(recipe, plan.shape, plan.lengths, BIG, ranks=ranks).memory for ranks in (4, 8, 6)
    )  # all six share one
    assert two.roles == one_copy.roles
    assert sum(role.weights for role in odd.roles) == pytest.approx(sum(role.weights for role in two.roles) * 4 / 6)
    assert one_copy.phases["update"] < two.phases["update"] < 1.2 * one_copy.phases["update"]
    assert two.phases["rollout"] == one_copy.phases["rollout"]
