"""The Triton kernels against their plain twins, run by Triton's interpreter. Skipped where Triton is not installed."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from triton_interpreter import interpret

interpret()

from peft.tuners.lora import LoraLayer

from tether.accel.decode_gpu import fused_step, plain_step
from tether.accel.decode_gpu.gpu_decoder import GpuBatch, GpuDecoder
from tether.accel.spec import Norm
from tether.models.lora import inject_lora, lora_config
from tether.ops.sampling import truncate
from tether.protocols import Sampling

SHAPE: dict[str, Any] = {
    "vocab_size": 1100,  # two blocks of ids, the second not full
    "hidden_size": 192,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
GEMMA: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 30,
    "query_pre_attn_scalar": 24,
}


def build(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    shape = {**SHAPE, **(GEMMA if "Gemma" in kind else {}), **more}
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")(**shape)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@torch.inference_mode()
def assert_twins_agree(model: Any, sampling: Sampling) -> None:
    prompts = {0: [5, 6, 7], 1: torch.randint(0, 1100, (90,)).tolist(), 2: [9]}
    uniforms = 1.0 - torch.rand(4, 3, dtype=torch.float64)
    found = []
    for kernels in (plain_step, fused_step):
        decoder = GpuDecoder(model, 4, 128, 3, kernels=kernels)  # few slots: attention is split over the columns
        found.append(GpuBatch(decoder, 4, prompts, [0, 0, 1, 2], uniforms, sampling, {11}).run())
    for plain, fast in zip(*found, strict=True):
        assert plain.tokens.tolist() == fast.tokens.tolist()
        assert torch.allclose(plain.behavior, fast.behavior, atol=1e-4)
        assert torch.allclose(plain.untruncated, fast.untruncated, atol=1e-4)


# plain, with biases, with norms of the heads, with caps, windows and norms after each part, with two rotary tables
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Gemma2", "Gemma3"])
def test_the_kernels_draw_what_their_plain_twins_draw(kind: str):
    model = build(kind)
    assert_no_twin_is_used(model, lambda: assert_twins_agree(model, Sampling(3, temperature=0.8)))


@pytest.mark.parametrize(
    "targets", ["", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"], ids=["bare", "lora"]
)
def test_layers_without_norms_before_their_parts_draw_what_plain_twins_draw(targets: str):
    model = build("Olmo2", num_hidden_layers=2)
    with torch.no_grad():
        for parameter in inject_lora(model, lora_config(20, 30.0, targets.split()), seed=0) if targets else ():
            parameter.normal_(std=0.1)
    layers = GpuDecoder(model, 1, 4, 1).spec.layers
    assert all(fused_step.covers_gates(layer) and not fused_step.covers_attention(layer) for layer in layers)
    assert_twins_agree(model, Sampling(3, temperature=0.8))


@pytest.mark.parametrize("targets", ["q_proj v_proj", "k_proj o_proj up_proj", "gate_proj down_proj", "all"])
def test_adapters_are_added_by_the_kernels(targets: str):
    model = build("Llama")
    names = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj" if targets == "all" else targets
    with torch.no_grad():
        for parameter in inject_lora(model, lora_config(20, 30.0, names.split()), seed=0):
            parameter.normal_(std=0.1)
    assert_no_twin_is_used(model, lambda: assert_twins_agree(model, Sampling(3)))


PROMPTS = [[5, 6, 7], list(range(40, 75)), [9]]
SLOTS = [3, 0, 2]


@torch.inference_mode()
def assert_prompts_are_cached(model: Any, kernels: Any) -> None:
    """What lies in the slots that prompts are read into is what the model's own modules cache, prompt by prompt."""
    decoder = GpuDecoder(model, 5, 64, 1, kernels=kernels)
    decoder.prefill(PROMPTS, SLOTS)
    for tables, name in ((decoder.cache.keys, "keys"), (decoder.cache.values, "values")):
        for ids, slot in zip(PROMPTS, SLOTS, strict=True):
            own = model(input_ids=torch.tensor([ids]), use_cache=True).past_key_values
            for layer, found in enumerate(tables[:, slot]):
                torch.testing.assert_close(
                    found[:, : len(ids)], getattr(own.layers[layer], name)[0], atol=1e-5, rtol=1e-4
                )
        assert not tables[:, [1, 4]].any(), "other slots are left alone"
        assert not tables[..., 35:, :].any(), "and so is what lies past the longest prompt"


@pytest.mark.parametrize("kernels", [plain_step, fused_step], ids=["plain", "fused"])
@pytest.mark.parametrize("width", [32, 24])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Olmo2"])
def test_prompts_are_read_as_the_models_own_modules_read_them(kind: str, width: int, kernels: Any):
    # a window that the longest prompt fits into: past it, the model's own cache forgets
    gemma = {"sliding_window": 48} if "Gemma" in kind else {}
    model = build(kind, num_hidden_layers=2, head_dim=width, **gemma)
    assert_prompts_are_cached(model, kernels)


@pytest.mark.parametrize("rank", [20, 80])
def test_adapters_are_added_to_the_prompts_that_are_read(rank: int):
    model = build("Qwen2", num_hidden_layers=2)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    with torch.no_grad():
        for parameter in inject_lora(model, lora_config(rank, 1.5 * rank, names), seed=0):
            parameter.normal_(std=0.05)
    parts = [part for layer in GpuDecoder(model, 1, 4, 1).spec.layers for part in layer.linears]
    assert all(part.adapter and fused_step.known(part) for part in parts)
    assert all(fused_step.covered(part) == (rank <= 64) for part in parts)
    assert_prompts_are_cached(model, fused_step)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.enable_adapters(False)
    assert_prompts_are_cached(model, fused_step)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma2"])
@torch.inference_mode()
def test_in_half_precision_fused_reading_is_no_farther_from_the_exact_than_plain_reading(kind: str):
    model = build(kind, num_hidden_layers=2)
    for parameter in inject_lora(model, lora_config(20, 30.0, ["k_proj", "gate_proj", "up_proj", "down_proj"]), seed=0):
        parameter.normal_(std=0.05)
    model.half()  # in this half precision the interpreter rounds as a device does
    found = []
    for read, kernels in (
        (copy.deepcopy(model).double(), plain_step),
        (model, plain_step),
        (model, fused_step),
    ):
        decoder = GpuDecoder(read, 5, 64, 1, kernels=kernels)
        decoder.prefill(PROMPTS, SLOTS)
        both = torch.cat([decoder.cache.keys, decoder.cache.values]).double()
        found.append(torch.cat([both[:, slot, :, : len(ids)] for ids, slot in zip(PROMPTS, SLOTS, strict=True)], dim=2))
    exact, plain, fast = found
    assert 0.0 < (fast - exact).norm() <= 1.1 * (plain - exact).norm()


def exact_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    root = (x.double().pow(2).mean(-1, keepdim=True) + norm.epsilon).sqrt()
    return x.double() / root * (norm.weight.double() + norm.offset)


@pytest.mark.parametrize("kernels", [plain_step, fused_step], ids=["plain", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset, after", [(0.0, False), (1.0, True)], ids=["Llama", "Gemma"])
def test_sums_and_norms_are_rounded_where_they_are_written_and_nowhere_else(
    dtype: torch.dtype, offset: float, after: bool, kernels: Any
):
    torch.manual_seed(0)
    unit = torch.finfo(dtype).eps  # the interpreter cuts bits off, a device rounds to the nearest
    hidden, change = torch.randn(2, 2, 7, 24).to(dtype)
    first, second = (Norm(torch.randn(24).to(dtype), 1e-5, offset) for _ in range(2))
    added, normed = kernels.add_norm_pass(hidden, change, first if after else None, second)
    assert added.dtype == normed.dtype == dtype
    part = exact_norm(change, first) if after else change.double()
    error = (added - (hidden.double() + part)).abs()
    assert (error <= unit * (1.01 * added.abs() + (part.abs() if after else 0.0)) + 1e-6).all()
    assert torch.allclose(normed.double(), exact_norm(added, second), rtol=1.01 * unit, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_stored_unchanged(dtype: torch.dtype):
    model = build("Llama", num_hidden_layers=2, head_dim=96)  # 32 tokens a program, of which the last has 6
    caches = [GpuDecoder(model, 4, 128, 1).cache for _ in range(2)]
    key, value = torch.randn(2, 3, 70, 2, 96).to(dtype)
    for kernels, cache in zip((plain_step, fused_step), caches, strict=True):
        cache.keys, cache.values = cache.keys.to(dtype), cache.values.to(dtype)
        kernels.store_pass(cache, 1, torch.tensor([2, 0, 3]), key, value)
    assert caches[1].keys.any()
    assert torch.equal(caches[0].keys, caches[1].keys) and torch.equal(caches[0].values, caches[1].values)


def assert_no_twin_is_used(model: Any, check: Any) -> None:
    """The fused kernels cover this model themselves."""
    layers = GpuDecoder(model, 1, 4, 1).spec.layers
    assert all(fused_step.covers_attention(layer) and fused_step.covers_gates(layer) for layer in layers)
    assert all(fused_step.covered(layer.output) and fused_step.covered(layer.down) for layer in layers)
    check()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(3, top_k=5),
        Sampling(3, top_p=0.6),
        Sampling(3, temperature=1.7, top_k=40, top_p=0.8),
        Sampling(3, temperature=0.0),
        Sampling(3, top_k=1),
        Sampling(3, top_p=1e-9),
    ],
    ids=str,
)
def test_truncated_draws_are_those_of_the_plain_twin(sampling: Sampling):
    assert_twins_agree(build("Llama"), sampling)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k, top_p", [(3, 1.0), (0, 0.7), (4, 0.6), (0, 0.999), (2000, 0.2)])
@torch.inference_mode()
def test_the_ids_that_are_kept_are_those_of_the_definition(dtype: torch.dtype, top_k: int, top_p: float):
    decoder = GpuDecoder(build("Llama", num_hidden_layers=1), 8, 8, 1, kernels=fused_step)
    work, state = decoder.work, decoder.state
    work.logits = (3.0 * torch.randn(8, 1100)).round(decimals=0 if top_k else 2).to(dtype)  # with ties
    decoder.sample_by(Sampling(1, top_k=top_k, top_p=top_p, temperature=0.7), set())
    state.live.fill_(True)
    fused_step.draw(work, 8, state, Sampling(1, top_k=top_k, top_p=top_p, temperature=0.7))
    whole = (work.logits.float() / 0.7).log_softmax(-1)
    expected = truncate(whole, top_k=top_k, top_p=top_p)
    orders = order(work.logits.float(), 16 if dtype == torch.bfloat16 else 0)
    assert torch.equal(orders >= work.thresholds[:8, None], expected > -torch.inf)
    drawn = state.answers[:, :1]
    assert torch.allclose(state.behavior[:, :1], expected.gather(1, drawn), atol=1e-5)
    assert torch.allclose(state.untruncated[:, :1], whole.gather(1, drawn), atol=1e-5)


@torch.inference_mode()
def test_parts_that_are_rounded_to_the_models_type_are_summed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tether.accel.decode_gpu.fused_step.ROUNDED", 0)
    assert_twins_agree(build("Llama", intermediate_size=512), Sampling(3))  # 8 blocks: a sum in four parts


def order(logits: torch.Tensor, shift: int) -> torch.Tensor:
    bits = logits.view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> shift


@pytest.mark.parametrize(
    "logits, uniform, token",
    [
        ([0.0, 0.0, 0.0, 0.0], 0.25, 0),
        ([0.0, 0.0, 0.0, 0.0], 0.26, 1),
        ([0.0, -torch.inf, 0.0, 0.0], 0.5, 2),
        ([0.0, 0.0, 0.0, -torch.inf], 1.0, 2),
        ([0.0, torch.nan, 0.0, 0.0], 0.5, -1),
        ([0.0, torch.inf, 0.0, 0.0], 0.5, -1),
        ([-torch.inf] * 4, 0.5, -1),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, where inf - inf is what is meant
@torch.inference_mode()
def test_a_draw_is_the_first_id_whose_cumulative_probability_reaches_the_uniform(
    logits: list[float], uniform: float, token: int
):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))  # pyright: ignore[reportCallIssue]
    decoder = GpuDecoder(model, 2, 8, 2, kernels=fused_step)
    decoder.work.logits[:2].fill_(-torch.inf)
    decoder.work.logits[0, [3, 700, 1050, 1099]] = torch.tensor(logits)
    decoder.work.logits[1, 4] = 0.0
    state = decoder.state
    state.live.copy_(torch.tensor([True, False]))
    state.uniforms.fill_(uniform)
    state.limits.fill_(2)
    fused_step.draw(decoder.work, 2, state, Sampling(2))
    drawn = [3, 700, 1050, 1099][token] if token >= 0 else -1
    assert state.answers[:, 0].tolist() == [drawn, 0], "the idle slot keeps what it had"
    assert state.live.tolist() == [drawn >= 0, False]
    assert state.drawn.tolist() == state.columns.tolist() == [1, 0]
    if drawn >= 0:
        possible = sum(value == 0.0 for value in logits)
        assert float(state.behavior[0, 0]) == pytest.approx(-math.log(possible), abs=1e-6)
