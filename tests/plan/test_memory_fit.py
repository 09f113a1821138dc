"""A run that does not fit is refused or split before its first step; one that fits never is."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig

from tether.config.load import load_recipe
from tether.errors import ConfigError
from tether.models.precision import with_precision
from tether.plan.machine import Machine, resolve_device
from tether.plan.plan import GIB, free_memory, make_plan, weights_fit, whole_fits
from tether.plan.workload import Lengths, Shape, shape_of_config
from tether.train.build import load_policy
from tether.train.run_plan import RunPlan, check_room, check_weights
from tether.train.training import build_training

SEVEN = LlamaConfig(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000
)
GPU = Machine("cuda", "a CUDA device", 80 * GIB, 300e12, 2e12, "stated")
CPU = Machine("cpu", "this machine's CPU", 64 * GIB, 2e11, 3e10, "stated")


@pytest.fixture(scope="module")
def seven() -> Shape:
    return shape_of_config(SEVEN)


def recipe_of(method: str, *flags: str):
    data = ("--data.train", "x.jsonl") if method in ("sft", "dpo", "reward") else ()
    return load_recipe(method, None, ["--model.dtype", "bfloat16", *data, *flags])


def plan_of(recipe, shape, machine=GPU, tokens=512):
    return make_plan(recipe, shape, Lengths.assumed(tokens, "as given"), machine)


def test_what_the_plan_says_fits_is_never_touched_nor_what_may_fit(seven):
    recipe = recipe_of("sft")
    plan = plan_of(recipe, seven)
    peak = plan.memory.peak
    assert whole_fits(recipe, plan, peak).verdict == "fits"
    assert whole_fits(recipe, plan, round(0.95 * peak)).verdict == "tight"
    assert whole_fits(recipe, plan, round(0.905 * peak)).verdict == "tight"
    assert whole_fits(recipe, plan, round(0.5 * peak)).verdict == "refused"
    on_cpu = recipe_of("sft", "--model.dtype", "float32")
    plan = plan_of(on_cpu, seven, CPU)
    assert whole_fits(on_cpu, plan, round(0.8 * plan.memory.peak)).verdict == "tight", "a CPU is known less well"


def test_passes_are_split_where_that_is_enough(seven):
    recipe = recipe_of(
        "ppo", "--roles.mode", "lora", "--optimizer.micro_batch_tokens", "65536", "--rollout.max_num_seqs", "8"
    )
    plan = plan_of(recipe, seven)
    judged = whole_fits(recipe, plan, round(0.6 * plan.memory.peak))
    assert judged.verdict == "split"
    assert judged.micro_batch_tokens in (32768, 16384, 8192)
    assert "optimizer.micro_batch_tokens" in judged.sentence
    smaller = plan_of(
        recipe_of("ppo", "--roles.mode", "lora", "--optimizer.micro_batch_tokens", str(judged.micro_batch_tokens)),
        seven,
    )
    assert smaller.memory.phases["update"] <= 0.6 * plan.memory.peak


def test_a_refusal_names_what_would_fit_and_that_does(seven):
    recipe = recipe_of("ppo")
    judged = whole_fits(recipe, plan_of(recipe, seven), 30 * GIB)
    assert judged.verdict == "refused"
    assert "30.0 GiB of a CUDA device are free" in judged.sentence
    assert "accurate to about 10%" in judged.sentence
    assert "--run.memory_check warn" in judged.sentence
    flags = judged.sentence.partition("it would fit with ")[2].partition(", or start")[0].split()
    changed = load_recipe("ppo", None, ["--model.dtype", "bfloat16", *flags])
    assert whole_fits(changed, plan_of(changed, seven), 30 * GIB).verdict == "fits"


def test_weights_alone_are_judged_without_data(seven):
    recipe = recipe_of("ppo")
    assert weights_fit(recipe, seven, GPU, 400 * GIB).verdict == "fits"
    judged = weights_fit(recipe, seven, GPU, 60 * GIB)
    assert judged.verdict == "refused"
    assert "weights, gradients and optimizer" in judged.sentence


def test_a_sampler_that_sizes_itself_on_a_gpu_is_not_counted(seven):
    """`rollout.max_num_seqs: auto` takes what is free there: its cache refuses nothing."""
    flags = ("--roles.mode", "lora", "--rollout.prompts_per_step", "1024", "--rollout.max_new_tokens", "2048")
    auto, fixed = recipe_of("ppo", *flags), recipe_of("ppo", *flags, "--rollout.max_num_seqs", "1024")
    peak = plan_of(auto, seven).memory.phases
    assert peak["rollout"] > 2 * peak["update"]
    free = round(1.05 * max(peak["update"], peak["evaluation"]))
    assert whole_fits(auto, plan_of(auto, seven), free).verdict == "fits"
    assert whole_fits(fixed, plan_of(fixed, seven), free).verdict == "refused"


def test_a_run_is_refused_warned_of_or_split_as_its_recipe_says(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q{n}", "completion": "a" * 150}) + "\n" for n in range(64)))
    told: list[str] = []

    def check(free: float, *flags: str):
        recipe = load_recipe("sft", None, ["--data.train", str(file), "--model.device", "cpu", *flags])
        recipe = with_precision(recipe, resolve_device("cpu"))
        policy = load_policy(recipe)
        shape, training = Shape.of(policy.model), build_training(recipe, policy)
        plan = RunPlan.of(recipe, shape, training, policy).plan
        assert plan.lengths.longest == max(len(row.tokens) for row in training.parts.examples.items)
        check_room(recipe, plan, training, round(free * plan.memory.peak), told.append)
        return training.learner.micro_batch_tokens

    assert check(1.0) == 8192
    assert told == []
    assert 256 <= check(0.6) < 8192
    assert "each batch is split into passes of" in told.pop()
    with pytest.raises(ConfigError, match=r"does not fit.*--run.memory_check warn"):
        check(0.01)
    assert check(0.01, "--run.memory_check", "warn") == 8192
    assert "does not fit" in told.pop()
    assert check(0.01, "--run.memory_check", "off") == 8192
    assert told == []


def test_a_small_model_is_not_looked_at_before_it_is_loaded_and_free_memory_is_a_number():
    check_weights(load_recipe("ppo", None, []), free=0)  # tiny-bytes
    assert 2**20 < free_memory(resolve_device("cpu")) < 2**50


def test_a_large_model_is_refused_from_its_config_alone(tmp_path):
    """A sparse file stands for 13 GB of weights: nothing of it is read."""
    SEVEN.architectures = ["LlamaForCausalLM"]
    SEVEN.save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(13 * GIB)
    recipe = load_recipe("ppo", None, ["--model.path", str(tmp_path), "--model.device", "cpu"])
    recipe = with_precision(recipe, resolve_device("cpu"))
    with pytest.raises(ConfigError, match="this run does not fit: the weights, gradients and optimizer"):
        check_weights(recipe, free=24 * GIB)
