"""The fused pass on a CUDA device: against the model's own modules, and its graphs against itself, to the bit."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2Model,
    Gemma3TextConfig,
    Gemma3TextModel,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    Olmo2Config,
    Olmo2Model,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3Model,
)

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device here", allow_module_level=True)

from tether.accel.fused_pass.fused_layer import Attention
from tether.accel.fused_pass.linear import embedded
from tether.accel.fused_pass.packed import packed_states
from tether.accel.kernels import attention as row_kernels
from tether.accel.kernels.lora import GateAdapters
from tether.accel.logprobs import logprobs
from tether.accel.spec import Embedding, LoraAdapter
from tether.device_transfer import brought, sent
from tether.hub.tiny_model import VOCABULARY, tiny_model
from tether.models.backbones import Backbone, ScalarHead, hidden_states
from tether.models.lora import inject_lora, lora_config
from tether.models.precision import hold_in
from tether.models.roles import Roles, onto
from tether.models.scalar_models import ScalarModel
from tether.models.sharing import Separate
from tether.ops.masks import Packing, last_true
from tether.types import Sequences

SHAPE = {
    "vocab_size": 500,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
GEMMA: dict[str, Any] = {
    "query_pre_attn_scalar": 48,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaModel, LlamaConfig(**SHAPE)),
    "mistral": (MistralModel, MistralConfig(**SHAPE, sliding_window=20)),
    "qwen2": (Qwen2Model, Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3Model, Qwen3Config(**SHAPE, head_dim=64)),
    "gemma2": (Gemma2Model, Gemma2Config(**SHAPE, **GEMMA, head_dim=64, attn_logit_softcapping=2.0)),
    "gemma2 wide": (Gemma2Model, Gemma2Config(**SHAPE, **GEMMA, head_dim=256)),
    "gemma3": (Gemma3TextModel, Gemma3TextConfig(**SHAPE, **GEMMA, head_dim=64)),
    # Its heads are normed, so the scale of scores must match their width, or attention is too sharp for bfloat16.
    "gemma3 wide": (Gemma3TextModel, Gemma3TextConfig(**SHAPE, **GEMMA | {"query_pre_attn_scalar": 256}, head_dim=256)),
    "olmo2": (Olmo2Model, Olmo2Config(**SHAPE)),
}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def backbone(kind: str, adapters: bool, rank: int = 8, targets: Sequence[str] = LINEAR) -> Any:
    """Weights that are bf16 numbers, held in float32."""
    model_class, config = KINDS[kind]
    torch.manual_seed(0)
    model = model_class(config).cuda().eval()
    if adapters:
        inject_lora(model, lora_config(rank, 16.0, list(targets)), 1)
    for name, parameter in model.named_parameters():
        parameter.data = (torch.randn_like(parameter) * 0.05 if "lora_" in name else parameter.data).bfloat16().float()
    return model


def rows(gaps: bool, seed: int = 0) -> Sequences:
    draws = torch.Generator().manual_seed(seed)
    mask = torch.zeros(4, 70, dtype=torch.bool)
    mask[0, :] = mask[1, 10:30] = mask[2, 5:70] = mask[3, :33] = True
    response = mask & (torch.arange(70) >= 20)
    if gaps:
        response &= torch.rand(mask.shape, generator=draws) < 0.6
    tokens = torch.randint(0, 500, mask.shape, generator=draws)
    return Sequences(tokens=tokens, attention_mask=mask, response_mask=response).to("cuda")


def distance(found: Any, expected: Any) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("gaps", [False, True], ids=["answers", "gaps"])
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_as_near_to_float32_as_the_models_own_modules(kind: str, adapters: bool, gaps: bool):
    assert_as_near_as_the_models_own_modules(backbone(kind, adapters), rows(gaps))


@pytest.mark.parametrize("rank", [4, 16, 24, 64, 80])
def test_adapters_of_any_rank_are_as_near(rank: int):
    assert_as_near_as_the_models_own_modules(backbone("llama", True, rank), rows(False))


@pytest.mark.parametrize("targets", [LINEAR[:4], LINEAR[4:5], LINEAR[4:6], LINEAR[6:], LINEAR[1:5]], ids=" ".join)
def test_adapters_on_some_layers_are_as_near(targets: list[str]):
    assert_as_near_as_the_models_own_modules(backbone("qwen2", True, 16, targets), rows(False))


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_states_alone_are_as_near(kind: str):
    """What a reward model is trained through: every row asks once."""
    batch = rows(False)
    ends = dataclasses.replace(batch, response_mask=last_true(batch.attention_mask))
    assert_as_near_as_the_models_own_modules(backbone(kind, False), ends)


def assert_as_near_as_the_models_own_modules(exact: Any, batch: Sequences) -> None:
    fused, own = copy.deepcopy(exact).bfloat16(), copy.deepcopy(exact).bfloat16()
    wanted = batch.response_mask
    weights = torch.randn(4, 70, 256, device="cuda") * wanted[..., None]
    states = [hidden_states(exact, batch), packed_states(fused, batch, wanted=wanted, backend="fused")]
    states.append(hidden_states(own, batch))
    for each in states:
        assert each is not None
        (each.float() * weights).sum().backward()
    assert distance(states[1][wanted], states[0][wanted]) < 1.2 * distance(states[2][wanted], states[0][wanted])
    gradients = [[p.grad for p in model.parameters() if p.grad is not None] for model in (exact, fused, own)]
    ours, theirs = ([distance(a, b) for a, b in zip(given, gradients[0], strict=True)] for given in gradients[1:])
    assert max(ours) < 1.5 * max(theirs) < 0.06


@pytest.mark.parametrize("rank", [16, 24, 64])
def test_the_adapted_gate_is_that_of_float32_rounded_and_the_same_every_time(rank: int):
    torch.manual_seed(0)
    count, width = 1000, 2000  # blocks that are not full, sums in several parts
    half = [torch.randn(count, width, device="cuda").bfloat16() for _ in range(3)]
    thin, narrow_down = (torch.randn(count, n * rank, device="cuda").bfloat16() for n in (2, 1))
    up = [(torch.randn(width, rank, device="cuda") / rank).bfloat16() for _ in range(2)]
    down = (torch.randn(rank, width, device="cuda") / rank).bfloat16()
    adapters = GateAdapters(*(LoraAdapter(down, each, 1.5) for each in up), LoraAdapter(down, up[0], 1.5))
    base = [x.float().requires_grad_() for x in half[:2]]
    opened, raised = (
        x + 1.5 * part.float() @ each.float().t() for x, part, each in zip(base, thin.split(rank, 1), up, strict=True)
    )
    product = torch.nn.functional.silu(opened) * raised
    expected = list(torch.autograd.grad(product, base, half[2].float() + narrow_down.float() @ down.float()))
    expected.append(torch.cat([1.5 * slope @ each.float() for slope, each in zip(expected, up, strict=True)], dim=1))
    assert distance(adapters.product(half[0], half[1], thin), product.detach()) < 0.004
    found = []
    for _ in range(3):
        again = torch.full_like(half[0], torch.nan)
        slopes = adapters.backward(half[0], half[1], thin, half[2].clone(), narrow_down, again)
        found.append([*slopes, again])
    for got, wanted in zip(found[0], [*expected, product.detach()], strict=True):
        assert distance(got, wanted) < 0.004
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("most", [50_000, 40, 1], ids=["rare", "frequent", "one token"])
def test_the_gradient_of_embeddings_is_that_of_float64_rounded_and_the_same_every_time(most: int):
    torch.manual_seed(0)
    module = torch.nn.Embedding(50_000, 576, padding_idx=0, device="cuda", dtype=torch.bfloat16)
    tokens, grad = torch.randint(0, most, (4000,), device="cuda"), torch.randn(4000, 576, device="cuda").bfloat16()
    found = []
    for _ in range(3):
        module.weight.grad = None
        embedded(Embedding(module, module.weight, 1.0, 1.0), tokens).backward(grad)
        found.append(module.weight.grad)
    real = tokens != 0
    exact = torch.zeros(50_000, 576, device="cuda", dtype=torch.float64)
    exact.index_add_(0, tokens[real], grad[real].double())
    assert all(torch.equal(found[0], other) for other in found[1:])
    torch.testing.assert_close(found[0].double(), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "run again"])
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3", "olmo2"])
def test_a_replayed_pass_and_layers_run_again_give_the_same_bits(kind: str, adapters: bool, recompute: bool):
    model = backbone(kind, adapters).bfloat16()
    plain, other = Backbone(model), Backbone(copy.deepcopy(model))
    assert plain.fast.reason is None and other.fast.reason is None
    plain.fast.captured = None
    if recompute:
        other.recompute()
    for seed in range(5):
        batch = rows(False, seed)
        with torch.no_grad():
            looked = other(batch, batch.response_mask)
        found = [each(batch, batch.response_mask) for each in (plain, other)]
        for states in found:
            states.float().square().sum().backward()
        assert torch.equal(found[0], found[1]) and torch.equal(looked, found[1])
        if seed == 2:
            plain.zero_grad()
            other.zero_grad()
    assert other.fast.captured.captures == (0 if recompute else 1)  # graphs would hold what is to be run again
    for ours, theirs in zip(plain.parameters(), other.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def test_a_batch_that_is_put_onto_the_device_is_never_waited_for():
    roles = Roles.build(Separate(tiny_model(seed=1).bfloat16().cuda()), critic="separate", with_reference=True, seed=0)
    here = rows(False).to("cpu")
    here = dataclasses.replace(here, tokens=here.tokens % VOCABULARY)
    for _ in range(3):  # kernels and graphs are made
        roles.evaluate(onto(here, "cuda"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = onto(here, "cuda")
        roles.evaluate(moved)
        outputs = roles.actor(moved)
        (outputs.logprobs.sum() + outputs.values.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    captured: Any = roles.actor.backbone.fast.captured
    assert captured.captures == 1  # passes with and without a gradient are replayed by the same graph


def test_a_batch_that_comes_home_is_whole_when_it_is_read():
    there = rows(False)
    torch.cuda._sleep(10**9)  # the device is busy for some tenths of a second, and what is copied is made after that
    seen = there.map_tensors(lambda column: column + 0 if column.dtype != torch.bool else ~~column).to("cpu")
    tokens, mask = seen.tokens.clone(), seen.attention_mask.clone()
    assert torch.equal(tokens, there.tokens.cpu()) and torch.equal(mask, there.attention_mask.cpu())


def test_what_is_sent_and_brought_is_the_same_however_busy_the_device_is():
    large, small = torch.arange(1_000_000), torch.rand(3, 5)
    torch.cuda._sleep(10**9)
    there = [sent(large, "cuda"), sent(small, "cuda"), sent(large[::2].view(5, -1)[:, 3:], "cuda")]
    large_again, small_again, cut = brought(there)
    assert torch.equal(large_again, large) and torch.equal(small_again, small)
    assert torch.equal(cut, large[::2].view(5, -1)[:, 3:])


def test_a_saved_reward_model_is_run_by_the_fused_pass_like_one_that_was_made_here(tmp_path):
    head = ScalarHead(256, deviation=0.1, seed=0, like=torch.zeros(1, device="cuda"))
    head.weight.data = head.weight.data.bfloat16().float()  # as it is saved
    model = backbone("llama", False)
    hold_in(model, torch.bfloat16, torch.device("cuda"))
    made = ScalarModel(Backbone(model), head, "reward")
    made.save_pretrained(tmp_path)
    loaded = ScalarModel.load(tmp_path, "bfloat16", "cuda")
    assert loaded.backbone.fast.backend == made.backbone.fast.backend == "fused"
    assert torch.equal(loaded(rows(False)).scores, made(rows(False)).scores)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("asked", ["all", "answers", "once"])
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(8, 2, 64), (9, 3, 64), (4, 4, 64), (7, 1, 128), (4, 2, 32)])
def test_short_rows_attend_as_near_to_float64_as_flash_attention_and_the_same_every_time(
    heads: int, key_heads: int, width: int, asked: str, window: int | None, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    lengths = torch.randint(1, 300, (120,), device="cuda")
    place = torch.arange(299, device="cuda")
    mask = place < lengths[:, None]
    packing = Packing.of(mask)
    starts = {"answers": lengths[:, None] // 3, "once": lengths[:, None] - 1}
    rows = None if asked == "all" else packing.rows(mask & (place >= starts[asked]))
    tokens, asks = int(lengths.sum()), int(lengths.sum()) if rows is None else len(rows.tokens)
    query, grad = torch.randn(2, asks, heads, width, device="cuda").bfloat16()
    key, value = torch.randn(2, tokens, key_heads, width, device="cuda").bfloat16()
    found = []
    for short in (False, True, True):
        monkeypatch.setattr(row_kernels, "SHORT_ROWS", short)
        assert row_kernels.usable(query, key, packing, rows) == short
        inputs = (query, key, value)
        layer: Any = SimpleNamespace(scaling=width**-0.5, window=window, score_cap=None)
        mixed, lse = Attention.forward(*inputs, packing, rows, layer)
        slopes = Attention.backward(grad.flatten(1), *inputs, mixed, lse, packing, rows, layer)
        found.append([mixed.unflatten(1, (heads, width)), *slopes])
    places = torch.arange(tokens, device="cuda") if rows is None else rows.tokens
    kind = SimpleNamespace(scaling=width**-0.5, window=window, score_cap=None)
    expected = plain_attention(query, key, value, grad, packing, places, kind)
    for flash, ours, again, exact in zip(*found, expected, strict=True):
        assert torch.equal(ours, again) and ours.is_contiguous()
        assert distance(ours, exact) < 1.2 * distance(flash, exact) < 0.02


def plain_attention(query: Any, key: Any, value: Any, grad: Any, packing: Packing, places: Any, kind: Any) -> list[Any]:
    """Mixed values and the gradients of queries, keys and values in float64, a row at a time."""
    inputs = [x.double().requires_grad_() for x in (query, key, value)]
    group, mixed, starts, positions = query.shape[1] // key.shape[1], [], packing.starts, packing.positions
    for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        own = (places >= first) & (places < end)
        keys, values = (x[first:end].repeat_interleave(group, dim=1).transpose(0, 1) for x in inputs[1:])
        scores = inputs[0][own].transpose(0, 1) @ keys.transpose(1, 2) * kind.scaling
        scores = scores if kind.score_cap is None else torch.tanh(scores / kind.score_cap) * kind.score_cap
        asking = positions[places[own]][:, None]
        hidden = positions[first:end] > asking
        hidden = hidden if kind.window is None else hidden | (positions[first:end] <= asking - kind.window)
        mixed.append((scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ values).transpose(0, 1))
    whole = torch.cat(mixed)
    return [whole.detach(), *torch.autograd.grad(whole, inputs, grad.double())]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("gaps", [False, True], ids=["answers", "gaps"])
@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
def test_capped_scores_attend_near_to_float64_and_the_same_every_time(width: int, gaps: bool, window: int | None):
    torch.manual_seed(0)
    lengths = torch.randint(1, 700, (12,), device="cuda")
    place = torch.arange(int(lengths.max()), device="cuda")
    mask = place < lengths[:, None]
    packing = Packing.of(mask)
    asked = torch.rand(mask.shape, device="cuda") < 0.5 if gaps else place >= lengths[:, None] // 3
    rows = packing.rows(mask & asked)
    query, grad = torch.randn(2, len(rows.tokens), 8, width, device="cuda").bfloat16()
    key, value = torch.randn(2, int(lengths.sum()), 4, width, device="cuda").bfloat16()
    kind: Any = SimpleNamespace(scaling=width**-0.5, window=window, score_cap=1.5)
    found = []
    for _ in range(2):
        mixed, lse = Attention.forward(query, key, value, packing, rows, kind)
        slopes = Attention.backward(grad.flatten(1), query, key, value, mixed, lse, packing, rows, kind)
        found.append([mixed.unflatten(1, (8, width)), *slopes])
    expected = plain_attention(query, key, value, grad, packing, rows.tokens, kind)
    for ours, again, exact in zip(*found, expected, strict=True):
        assert torch.equal(ours, again) and distance(ours, exact) < 0.02


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_capped_logits_give_the_logprobs_of_float64(frozen: bool):
    torch.manual_seed(0)
    states, weight = torch.randn(300, 64, device="cuda").bfloat16(), torch.randn(5000, 64, device="cuda").bfloat16()
    targets, found = torch.randint(0, 5000, (300,), device="cuda"), []
    for dtype in (torch.bfloat16, torch.float64):
        x, w = states.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_(not frozen)
        chosen, entropy = logprobs(x, w, targets, temperature=0.7, softcap=5.0)
        (chosen.sum() + entropy.square().sum()).backward()
        found.append([chosen, entropy, x.grad, *([] if frozen else [w.grad])])
    for ours, exact in zip(*found, strict=True):
        assert distance(ours, exact) < 0.02


def test_short_rows_in_a_replayed_pass_give_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_kernels, "LEAST_PROGRAMS", 1)
    test_a_replayed_pass_and_layers_run_again_give_the_same_bits("llama", True, False)
