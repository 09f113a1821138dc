"""A cluster's plan: links, placement, memory by rank, communication, and the errors of nonsense."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.cli import main
from tether.config.load import load_recipe
from tether.config.recipes import RLRecipe
from tether.errors import ConfigError, UsageError
from tether.models.precision import with_precision
from tether.plan.calibration import calibrated_pace, gpu_named, network, reading_figures
from tether.plan.cluster import Cluster, parse_link, place
from tether.plan.cluster_plan import Wanted, plan_cluster, scaling_curve
from tether.plan.cluster_table import linear_shares
from tether.plan.memory import memory_of
from tether.plan.published import dense_shape, published_data
from tether.plan.workload import Lengths, Shape, work_of

GIB = 2**30
H200 = gpu_named("h200")
FLAGS = ("--rollout.prompts_per_step=512", "--rollout.max_new_tokens=512", "--ppo.minibatch_size=128")


@cache
def shape_named(name: str) -> Shape:
    return dense_shape(published_data()["shapes"][name])


def recipe_of(*flags: str) -> RLRecipe:
    recipe = with_precision(load_recipe("ppo", None, [*FLAGS, *flags]), torch.device("cuda"))
    assert isinstance(recipe, RLRecipe)
    return recipe


def cluster_of(gpus: int, gpu: str = "h200", link: str = "8x400Gb") -> Cluster:
    return Cluster(gpu_named(gpu), gpus, max(1, gpus // 8), parse_link(link))


def placed(gpus: int, name: str = "qwen2.5-7b", *flags: str, shard: str = "auto", samplers: int = 0, gpu: str = "h200"):
    recipe = recipe_of(*flags)
    work = work_of(recipe, Lengths.assumed(128, "as given"))
    return place(recipe, shape_named(name), work, cluster_of(gpus, gpu), samplers=samplers, shard=shard)


@pytest.mark.parametrize(
    ("text", "speed"),
    [("400Gb", 50e9), ("8x400Gb", 400e9), ("50GB", 50e9), ("100Gb/s", 12.5e9), ("1.6Tbps", 200e9)],
)
def test_a_link_is_in_bits_or_bytes(text, speed):
    assert parse_link(text) == pytest.approx(speed)


@pytest.mark.parametrize("text", ["400", "400gb", "Gb", "-1Gb", "400Gib", "0Gb", "x400Gb", ""])
def test_an_unknown_link_is_explained(text):
    with pytest.raises(UsageError, match="--link"):
        parse_link(text)


def test_collectives_take_the_slower_of_the_two_networks():
    """By hand: 2 nodes of 8; of 80 GB a node receives 40 GB over 50 GB/s and a GPU 70 GB over 450 GB/s."""
    cluster, assumed = Cluster(H200, 16, 2, 50e9), network()
    latency = 4 * assumed.latency
    assert cluster.gather(80e9, 16) == pytest.approx(40e9 / 50e9 / assumed.efficiency + latency)
    inside = 70e9 / 450e9 / assumed.efficiency + 3 * assumed.latency
    assert cluster.gather(80e9, 8) == pytest.approx(inside)
    assert cluster.all_reduce(80e9, 16) == 2 * cluster.gather(80e9, 16)
    assert cluster.gather(80e9, 1) == 0.0


def test_fsdp_divides_weights_gradients_and_optimizer_by_hand():
    """7.62 billion weights over 16 ranks: 2 + 2 + 12 bytes each."""
    found = placed(16, shard="full")
    policy = next(role for role in found.trainer.roles if role.role == "policy")
    count = shape_named("qwen2.5-7b").parameters
    assert policy.weights == -(-2 * count // 16)
    assert policy.gradients == -(-2 * count // 16)
    assert policy.optimizer == -(-12 * count // 16)


def test_hybrid_shards_within_a_node():
    found = placed(32, shard="hybrid")
    assert (found.shards, found.groups) == (8, 32)
    with pytest.raises(UsageError, match="--shard zero"):
        placed(8, shard="zero")


@settings(max_examples=25, deadline=None)
@given(
    power=st.integers(0, 6),
    name=st.sampled_from(["qwen2.5-1.5b", "llama3.1-8b", "qwen3-32b"]),
    mode=st.sampled_from(["separate", "lora"]),
    rows=st.sampled_from([64, 512, 1000]),
)
def test_more_gpus_never_take_more_memory_by_rank(power, name, mode, rows):
    recipe = recipe_of(f"--roles.mode={mode}", f"--rollout.prompts_per_step={rows}")
    work = work_of(recipe, Lengths.assumed(128, "as given"))

    def peak(gpus: int) -> tuple[int, int]:
        from tether.plan.cluster import share_of

        memory = memory_of(recipe, shape_named(name), share_of(work, gpus), "cuda", shards=gpus)
        return memory.peak, sum(role.held + role.gradients for role in memory.roles)

    few, more = peak(2**power), peak(2 ** (power + 1))
    assert more[0] <= few[0] and more[1] < few[1]


def test_layers_are_split_only_where_nothing_else_fits():
    small = placed(8, "qwen2.5-7b")
    assert (small.shard, small.tensor) == ("full", 1)
    flags = ("--model.gradient_checkpointing=true", "--optimizer.micro_batch_tokens=2560")
    large = placed(32, "llama2-70b", *flags, gpu="h100")
    assert large.tensor > 1 and large.trainer_peak <= gpu_named("h100").machine.usable


def test_what_cannot_fit_says_what_to_change():
    with pytest.raises(ConfigError, match=r"a trainer needs \d+ GiB at least; use more GPUs"):
        placed(1, "llama2-70b")
    assert placed(64, "llama2-70b", "--model.gradient_checkpointing=true", gpu="h100").sampler_tensor > 1
    with pytest.raises(ConfigError, match="use --shard full"):
        placed(8, "llama2-70b", shard="none")


def test_the_plan_states_time_tokens_communication_and_cost():
    recipe = recipe_of("--model.gradient_checkpointing=true", "--run.steps=10")
    shape, prompts = shape_named("qwen2.5-7b"), Lengths.assumed(128, "as given")
    plan = plan_cluster(recipe, shape, prompts, cluster_of(16), Wanted(price=2.0, steps=2))
    found = plan.as_json()
    seconds = found["seconds"]
    phases = [seconds[name] for name in ("rollout", "scores", "evaluation", "update", "handover")]
    assert seconds["step"] == pytest.approx(sum(phases))
    assert found["simulated"] is True and len(found["assumptions"]) == 5
    assert found["cost"]["run"] == pytest.approx(2.0 * 10 * seconds["step"] * 16 / 3600)
    assert found["tokens_per_second"]["step"] == pytest.approx(512 * (128 + 512) / seconds["step"])
    assert found["communication_seconds"]["gather_and_reduce"] > 0
    assert {each["samplers"] for each in found["layouts"]} == {0, 2, 4, 6, 8, 10, 12, 14}


def test_the_curve_is_never_better_than_linear():
    recipe, prompts = recipe_of("--model.gradient_checkpointing=true"), Lengths.assumed(128, "as given")
    points = scaling_curve(recipe, shape_named("qwen2.5-1.5b"), prompts, H200, 50e9, 8, Wanted(steps=2), (1, 8, 64))
    shares = [share for share in linear_shares(points) if share]
    assert len(shares) == 3 and shares[0] == 1.0
    assert all(share <= 1.001 for share in shares)


def test_measured_prompt_reading_replaces_the_assumption():
    """By hand: a pass costs 30 x 0.1 ms; 32,768 tokens are two passes."""
    short = {"shape": "135m", "layers": 30, "prompts": 4, "prompt": 128, "seconds": 0.003, "operations": 1e11}
    long = {"shape": "135m", "layers": 30, "prompts": 64, "prompt": 512, "seconds": 0.026, "operations": 8e12}
    rate, layer = reading_figures([short, long])
    assert layer == pytest.approx(1e-4)
    assert rate == pytest.approx(8e12 / 0.020)
    assert calibrated_pace().reading_share > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpus", "65", "--nodes", "8"], "use --gpus 64"),
        (["--gpus", "8", "--link", "fast"], "write bits as 400Gb"),
        (["--gpus", "8", "--gpu", "h9000"], "there are figures for h200"),
        (["--nodes", "2"], "say how many GPUs"),
        (["--gpus", "8", "--samplers", "8"], "at least one of the 8 GPUs must train"),
        (["--gpus", "8", "--lag", "1"], "set --samplers as well"),
        (["--gpus", "8", "--stragglers", "often"], "0.02:1.5"),
        (["--gpus", "8", "--ranks", "2"], "leave them out"),
        (["--link", "400Gb"], "--link: say how many GPUs with --gpus"),
        (["--answer-tokens", "8", "--seed", "1"], "--seed, --answer-tokens: say how many GPUs"),
        (["--gpus", "13"], "use --gpus 16, or say --nodes"),
        (["--gpus", "80000000000"], "up to 1,000,000 GPUs"),
        (["--gpus", "8", "--steps", "1000000"], "up to 10,000 are simulated"),
        (["--gpus", "8", "--price", "nan"], "must be a number"),
        (["--ranks", "2", "--distributed.shard", "full", "--roles.mode", "shared_backbone"], "needs whole weights"),
        (["--gpus", "8", "--price", "-1"], "cannot be below 0"),
        (["--gpus", "8", "--answer-tokens", "9999"], "rollout.max_new_tokens is"),
        (["--gpus", "8", "--memory", "24GiB"], "leave them out"),
        (["--svg", "scaling.svg"], "add --simulate"),
    ],
)
def test_nonsense_is_explained(flags, words, capsys):
    assert main(["plan", "ppo", "--prompt-tokens", "16", *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_method_that_does_not_sample_has_no_cluster_plan(capsys):
    assert main(["plan", "sft", "--gpus", "8", "--data.train", "x.jsonl"]) == 2
    assert "methods that sample" in capsys.readouterr().err


def test_the_command_prints_a_table_json_and_a_picture(tmp_path: Path, capsys):
    flags = ["plan", "ppo", "--prompt-tokens", "16", "--gpus", "8", "--steps", "2", "--rollout.max_new_tokens", "16"]
    assert main(flags) == 0
    text = capsys.readouterr().out
    assert "Simulated. No cluster was measured" in text and "GPU-hours a step" in text
    picture = tmp_path / "curve.svg"
    assert main([*flags, "--simulate", "--json", "--svg", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [point["gpus"] for point in found["scaling"]] == [2**n for n in range(11)]
    assert all(point["simulated"] for point in found["scaling"])
    assert "Simulated" in picture.read_text() and picture.read_text().startswith("<svg")
    assert main([*flags, "--simulate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
