"""What `dtype: auto` is, by device, for the policy and for reward models; and that what is said aloud stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tether.config.load import load_recipe
from tether.config.recipes import RECIPES
from tether.errors import ConfigError
from tether.models.load import load_causal_lm
from tether.models.precision import hold_in, precision_notice, resolve_dtype, with_precision

CPU, CUDA, MPS = (torch.device(kind) for kind in ("cpu", "cuda", "mps"))
PARTS = """--reward.parts=[
    {kind: model, path: a}, {kind: model, path: b, name: b, device: cpu}, {kind: model, path: c, name: c, shared: true},
    {kind: model, path: d, name: d, dtype: float32}, {kind: ended}]"""


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda:0 multiplies in bfloat16 and cuda:1 does not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5) if device.index == 1 else (8, 0))


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 0), "float32"), ((7, 5), "float32"), ((8, 0), "bfloat16"), ((8, 9), "bfloat16"), ((10, 0), "bfloat16")],
)
def test_auto_on_a_cuda_device_follows_what_it_multiplies_in(monkeypatch, capability, expected: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_dtype("auto", CUDA) is getattr(torch, expected)


def test_auto_is_float32_everywhere_else():
    assert resolve_dtype("auto", CPU) is torch.float32
    assert resolve_dtype("auto", MPS) is torch.float32


def test_auto_for_a_cuda_device_that_is_not_here_is_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_dtype("auto", CUDA) is torch.bfloat16
    assert resolve_dtype("auto", torch.device("cuda:3")) is torch.bfloat16


@pytest.mark.usefixtures("two_gpus")
def test_what_is_said_aloud_stays():
    assert resolve_dtype("float32", CUDA) is torch.float32
    assert resolve_dtype("bfloat16", torch.device("cuda:1")) is torch.bfloat16
    assert with_precision(load_recipe("sft", None, ["--data.train=x", "--model.dtype=float32"]), CUDA).model.dtype == (
        "float32"
    )


def test_a_dtype_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"model\.dtype is 'int8': choose one of auto, float32"):
        resolve_dtype("int8", CPU)


@pytest.mark.parametrize("method", RECIPES)
@pytest.mark.usefixtures("two_gpus")
def test_every_method_but_trpo_and_reward_models_trains_in_bfloat16_where_it_can(method: str):
    recipe = load_recipe(method, None, ["--data.train=x"] if method in ("sft", "reward", "dpo") else [])
    assert with_precision(recipe, CUDA).model.dtype == ("float32" if method in ("trpo", "reward") else "bfloat16")
    assert with_precision(recipe, torch.device("cuda:1")).model.dtype == "float32"
    assert with_precision(recipe, CPU).model.dtype == "float32"


@pytest.mark.usefixtures("two_gpus")
def test_a_reward_model_follows_its_own_device_or_the_backbone_that_it_shares():
    def dtypes(device: torch.device, *flags: str) -> list[str]:
        recipe = load_recipe("ppo", None, [PARTS, *flags])
        held = with_precision(recipe, device)
        assert held.reward.parts[-1] == recipe.reward.parts[-1]
        return [part.dtype for part in held.reward.parts[:-1]]

    assert dtypes(CUDA) == ["bfloat16", "float32", "bfloat16", "float32"]
    assert dtypes(CPU) == ["float32"] * 4
    assert dtypes(CUDA, "--model.dtype=float32") == ["bfloat16", "float32", "float32", "float32"]
    elsewhere = load_recipe("ppo", None, ["--reward.parts=[{kind: model, path: a, device: 'cuda:1'}]"])
    assert with_precision(elsewhere, CUDA).reward.parts[0].dtype == "float32"


def test_a_reward_models_device_that_is_none_is_named():
    recipe = load_recipe("ppo", None, ["--reward.parts=[{kind: model, path: a, device: gpu}]"])
    with pytest.raises(ConfigError, match=r"reward\.parts: device 'gpu' of model is no device"):
        with_precision(recipe, CPU)


def test_only_a_choice_that_changes_numbers_is_told():
    asked = load_recipe("ppo", None, [])
    assert precision_notice(asked, with_precision(asked, CPU)) is None
    aloud = load_recipe("ppo", None, ["--model.dtype=bfloat16"])
    assert precision_notice(aloud, aloud) is None
    assert "held in bfloat16 on this device" in str(precision_notice(asked, aloud))


def test_a_model_on_the_cpu_is_the_same_by_auto_and_by_float32():
    ours, theirs = (load_causal_lm("tiny-bytes", dtype=dtype, device="cpu", seed=3) for dtype in ("auto", "float32"))
    for (name, left), (_, right) in zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True):
        assert left.dtype is torch.float32 and torch.equal(left, right), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_positions_are_as_exact_in_half_precision_as_in_float32(dtype: torch.dtype):
    sizes: Any = {"vocab_size": 40, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes["num_attention_heads"] = 2
    exact, held, rounded = (LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)) for _ in range(3))
    hold_in(held, dtype, CPU)
    assert {parameter.dtype for parameter in held.parameters()} == {dtype}
    assert held.lm_head.weight is held.model.embed_tokens.weight
    positions, like = torch.arange(0, 4000, 7)[None], torch.zeros(1, 1, 1)
    angles = [model.model.rotary_emb(like, positions) for model in (exact, held, rounded.bfloat16())]
    for expected, found, by_torch in zip(*angles, strict=True):
        assert torch.equal(found, expected)
        assert (by_torch - expected).abs().max() > 1  # what this is about: torch rounds the frequencies along
