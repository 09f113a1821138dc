"""The fused parts of a layer against their plain twins, run by Triton's interpreter. Skipped where there is none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
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
from triton_interpreter import interpret

interpret()

from tether.accel import logprobs as fused_logprobs
from tether.accel.fused_pass import fused_layer, fused_pass, packed
from tether.accel.fused_pass.linear import embedded
from tether.accel.fused_pass.packed import packed_states
from tether.accel.kernels import lora as lora_kernels
from tether.accel.kernels.lora import GateAdapters
from tether.accel.kernels.norm import add_rows
from tether.accel.spec import DecoderSpec, Embedding, LoraAdapter
from tether.models.lora import inject_lora, lora_config
from tether.ops.logprobs import chunked_logprobs
from tether.ops.masks import Packing
from tether.types import Sequences


class PlainAttention:
    """What flash attention computes, for which a CPU has no kernel over rows laid end to end."""

    @staticmethod
    def forward(query, key, value, packing, rows, layer):
        return packed.attend(query, key, value, packing, rows, layer), torch.empty(0)

    @staticmethod
    def backward(grad, query, key, value, mixed, lse, packing, rows, layer):
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        with torch.enable_grad():
            again = packed.attend(*inputs, packing, rows, layer)
        assert torch.equal(again, mixed) and lse.numel() == 0
        return tuple(found.contiguous() for found in torch.autograd.grad(again, inputs, grad))


@pytest.fixture(autouse=True)
def attention_on_a_cpu(monkeypatch):
    monkeypatch.setattr(fused_layer, "Attention", PlainAttention)


SHAPE = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GEMMA: dict[str, Any] = {  # caps and windows that show, and layers that differ in them
    "head_dim": 8,
    "query_pre_attn_scalar": 5,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaModel, LlamaConfig(**SHAPE)),
    "mistral": (MistralModel, MistralConfig(**SHAPE, sliding_window=4)),
    "qwen2": (Qwen2Model, Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3Model, Qwen3Config(**SHAPE, head_dim=8)),
    "gemma2": (Gemma2Model, Gemma2Config(**SHAPE, **GEMMA, attn_logit_softcapping=2.0)),
    "gemma3": (Gemma3TextModel, Gemma3TextConfig(**SHAPE, **GEMMA)),
    "olmo2": (Olmo2Model, Olmo2Config(**SHAPE)),
}


MIXED = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")  # a gate whose up has none
ADAPTED: dict[str, tuple[str, ...]] = {
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "gate and up": ("gate_proj", "up_proj"),
    "gate": ("gate_proj",),
    "down": ("down_proj",),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
}


def backbone(kind: str, adapted: tuple[str, ...] = (), rank: int = 4, alpha: float = 8.0) -> Any:
    model_class, config = KINDS[kind]
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # around zero: large biases of keys cancel in float32, in the plain parts too
                parameter.uniform_(-0.5, 0.5)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return adapt(model, lora_config(rank, alpha, list(adapted))) if adapted else model


def adapt(model: Any, config: LoraConfig) -> Any:
    """The model with adapters that have learned something."""
    inject_lora(model, config, 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model


def rows() -> Sequences:
    mask = torch.zeros(3, 9, dtype=torch.bool)
    mask[0, :9] = mask[1, 4:7] = mask[2, 2:9] = True
    tokens = torch.randint(0, 40, mask.shape, generator=torch.Generator().manual_seed(3))
    return Sequences(tokens=tokens, attention_mask=mask, response_mask=mask & (torch.arange(9) > 5))


def states_and_gradients(model: Any, backend: Any, wanted: Any, times: int = 1, recompute: bool = False) -> list[Any]:
    model.zero_grad()
    batch = rows()
    for _ in range(times):
        states = packed_states(model, batch, wanted=wanted, backend=backend, recompute=recompute)
        assert states is not None
        (states * torch.sin(torch.arange(states.numel()).view(states.shape) * 1.0)).sum().backward()
    return [states.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("wanted", [False, True], ids=["all", "wanted"])
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("kind", KINDS)
def test_states_and_gradients_are_those_of_the_plain_parts(kind: str, adapters: bool, wanted: bool):
    model, read = backbone(kind, MIXED if adapters else ()), rows().response_mask if wanted else None
    assert assert_near_the_plain_parts(model, read) > 8


def assert_near_the_plain_parts(model: Any, wanted: Any, times: int = 1) -> int:
    """How many tensors were compared with what the plain parts give in float64."""
    exact = states_and_gradients(copy.deepcopy(model).double(), "plain", wanted, times)
    fused = states_and_gradients(model, "fused", wanted, times)
    for expected, found in zip(exact, fused, strict=True):
        assert (found - expected).norm() <= 1e-4 * expected.norm()  # float32, whose sums cancel in keys
    return len(exact)


@pytest.mark.parametrize("wanted", [False, True], ids=["all tokens", "wanted"])
@pytest.mark.parametrize("adapted", ADAPTED)
def test_whatever_has_adapters_states_and_gradients_are_those_of_the_plain_parts(adapted: str, wanted: bool):
    model, read = backbone("llama", ADAPTED[adapted], rank=8, alpha=12.0), rows().response_mask if wanted else None
    assert assert_near_the_plain_parts(model, read, times=2) == 1 + 2 * 2 * len(ADAPTED[adapted])


@pytest.mark.parametrize("adapted", ["all", "gate"])
@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "olmo2"])
def test_adapters_on_every_family_give_the_plain_gradients(kind: str, adapted: str):
    assert_near_the_plain_parts(backbone(kind, ADAPTED[adapted], rank=8), rows().response_mask, times=2)


@pytest.mark.parametrize("rank", [4, 16, 24, 65])
def test_adapters_of_any_rank_give_the_plain_gradients(rank: int):
    model = backbone("qwen2", ADAPTED["all"], rank=rank)
    assert_near_the_plain_parts(model, rows().response_mask)


def test_an_adapter_too_wide_for_a_tile_behind_gates_that_are_not_gives_the_plain_gradients():
    config = LoraConfig(r=4, target_modules=list(ADAPTED["all"]), rank_pattern={"down_proj": 70})
    model = adapt(backbone("llama"), config)
    assert_near_the_plain_parts(model, None)


def test_what_is_only_looked_at_has_the_same_bits_as_what_is_trained():
    model, batch = backbone("llama", ADAPTED["all"]), rows()
    with torch.no_grad():
        looked = packed_states(model, batch, wanted=None, backend="fused")
    trained, again = (states_and_gradients(model, "fused", None, recompute=again) for again in (False, True))
    assert looked is not None and torch.equal(looked, trained[0])
    for before, now in zip(trained, again, strict=True):
        assert torch.equal(now, before)


def test_layers_that_are_run_again_leave_one_tensor_each():
    model, packing = backbone("llama"), Packing.of(rows().attention_mask)
    hidden = model.embed_tokens(packing.pack(rows().tokens)).detach()
    spec = DecoderSpec.from_model(model)
    inputs = fused_pass.PassInputs(hidden, spec.angles(packing.positions), packing, None)
    with torch.no_grad():
        _, trace = fused_pass.forward(spec, inputs, keep=True, recompute=True)
    assert [tuple(kept.shape) for kept in trace.inputs] == [tuple(hidden.shape)] * 2 and trace.kept == []
    assert trace.inputs[0] is hidden  # the first layer's own input: nothing is copied


def gate_adapters(ranks: tuple[int, int, int | None], width: int, kind: Any, hidden: int = 12) -> GateAdapters:
    """Adapters of gate, up and down; scalings that are no powers of two."""
    gate, up, down = (
        None if rank is None else LoraAdapter(torch.randn(rank, into), torch.randn(out, rank) / rank, scaling)
        for rank, into, out, scaling in zip(
            ranks, (hidden, hidden, width), (width, width, hidden), (0.7, 1.3, 0.9), strict=True
        )
    )
    assert gate is not None and up is not None
    return GateAdapters(gate, up, down, kind)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("again", [False, True], ids=["", "product again"])
@pytest.mark.parametrize("ranks", [(8, 8, 8), (16, 4, 24), (3, 20, None)], ids=str)
@pytest.mark.parametrize("shape", [(37, 70), (5, 24)], ids=str)
def test_the_adapted_gate_is_the_plain_product_and_its_slopes(
    monkeypatch, shape: tuple[int, int], ranks: tuple[int, int, int | None], again: bool, kind: str
):
    chosen = lora_kernels.tiles_for  # with a span of 1, so that the columns are summed in several parts
    monkeypatch.setattr(lora_kernels, "tiles_for", lambda padded: chosen(padded)._replace(span=1))
    torch.manual_seed(0)
    count, adapters = shape[0], gate_adapters(ranks, shape[1], kind)
    base = [torch.randn(shape, requires_grad=True) for _ in range(2)]
    thin, grad = torch.randn(count, ranks[0] + ranks[1]), torch.randn(shape)
    narrow_down = None if ranks[2] is None else torch.randn(count, ranks[2])
    opened = base[0] + 0.7 * thin[:, : ranks[0]] @ adapters.gate.up.t()
    raised = base[1] + 1.3 * thin[:, ranks[0] :] @ adapters.up.up.t()
    functional = torch.nn.functional
    product = (functional.silu(opened) if kind == "silu" else functional.gelu(opened, approximate="tanh")) * raised
    arriving = grad if narrow_down is None or adapters.down is None else grad + narrow_down @ adapters.down.down
    expected = torch.autograd.grad(product, base, arriving)
    narrow = torch.cat([0.7 * expected[0] @ adapters.gate.up, 1.3 * expected[1] @ adapters.up.up], dim=1)
    gate, up = (x.detach() for x in base)
    torch.testing.assert_close(adapters.product(gate, up, thin), product.detach())
    filled = torch.full_like(gate, torch.nan) if again else None
    found = adapters.backward(gate, up, thin, grad.clone(), narrow_down, filled)
    for got, wanted in zip(found, (*expected, narrow), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    if filled is not None:
        torch.testing.assert_close(filled, product.detach())


def test_a_second_micro_batch_adds_to_the_gradient():
    model = backbone("qwen2")
    once, twice = (states_and_gradients(model, "fused", None, times) for times in (1, 2))
    for single, double in zip(once[1:], twice[1:], strict=True):
        assert (double - 2 * single).norm() <= 1e-5 * single.norm()


@given(
    ids=st.one_of(st.lists(st.integers(0, 6), max_size=70), st.integers(1, 50).map(lambda count: [3] * count)),
    width=st.sampled_from([1, 24, 256, 300]),
    skipped=st.integers(-1, 3),
)
@settings(max_examples=25, deadline=None)
def test_rows_are_added_to_those_of_their_ids(ids: list[int], width: int, skipped: int):
    places, before = torch.tensor(ids, dtype=torch.int64), torch.randn(7, width)
    rows, total = torch.randn(len(ids), width), before.clone()
    add_rows(total, places, rows, skipped)
    added = places != skipped
    expected = before.double().index_add(0, places[added], rows[added].double())
    torch.testing.assert_close(total.double(), expected, rtol=0, atol=1e-4)


def test_the_padding_tokens_embedding_is_not_trained():
    model = backbone("llama")
    model.embed_tokens.padding_idx = int(rows().tokens[0, 4])
    assert_near_the_plain_parts(model, None, times=2)
    assert not model.embed_tokens.weight.grad[model.embed_tokens.padding_idx].any()


@pytest.mark.parametrize("told", [None, "turned", "from the end", "heard"])
def test_embeddings_of_any_table_have_torchs_gradient(told: str | None):
    torch.manual_seed(0)
    ours, heard = torch.nn.Embedding(9, 5, padding_idx=2), []
    if told == "turned":
        ours.weight = torch.nn.Parameter(torch.randn(5, 9).t())
    if told == "from the end":
        ours.padding_idx = -3
    if told == "heard":
        ours.register_full_backward_hook(lambda *_: heard.append(True))
    theirs, tokens, slope = copy.deepcopy(ours), torch.tensor([2, 6, 6, 1, 8]), torch.randn(5, 5)
    for _ in range(2):
        embedded(Embedding(ours, ours.weight, 1.0, 1.0), tokens).backward(slope)
        theirs(tokens).backward(slope)
    assert ours.weight.grad is not None and theirs.weight.grad is not None
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    assert len(heard) == (4 if told == "heard" else 0)


@pytest.mark.parametrize("name", ["layers.0.mlp.down_proj", "embed_tokens"])
def test_who_watches_a_gradient_sees_it_pass(name: str):
    model, seen = backbone("llama"), []
    weight: Any = model.get_submodule(name).weight
    expected = states_and_gradients(model, "fused", None)
    hook = weight.register_hook(lambda grad: seen.append(grad))
    found = states_and_gradients(model, "fused", None)
    hook.remove()
    assert torch.equal(seen[0], weight.grad)
    for before, now in zip(expected, found, strict=True):
        torch.testing.assert_close(now, before)


def test_layers_that_are_run_again_give_the_same_gradient():
    model = backbone("llama")
    kept, again = (states_and_gradients(model, "fused", None, recompute=again) for again in (False, True))
    for before, now in zip(kept, again, strict=True):
        assert torch.equal(now, before)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("through", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("frozen", [False, True])
def test_fused_logprobs_are_the_plain_ones(through: str, bias: bool, frozen: bool, softcap: float | None):
    torch.manual_seed(0)
    states, weight = torch.randn(7, 12), torch.randn(5000, 12)  # two blocks of logits, the second not full
    shift, targets = torch.randn(5000), torch.randint(0, 5000, (7,))
    results = []
    for fused in (False, True):
        x, w = states.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
        b = shift.clone().requires_grad_(not frozen) if bias else None
        if fused:
            found: Any = fused_logprobs.FusedLogprobs.apply(x, w, b, targets, 2.0 / 0.7, 3, (softcap or 0.0) / 2.0)
        else:
            found = chunked_logprobs(x, w, targets, bias=b, scale=2.0, temperature=0.7, softcap=softcap)
        total = torch.zeros(())
        if through != "entropy":
            total = total + (found[0] * torch.arange(7.0)).sum()
        if through != "logprobs":
            total = total + (found[1] * torch.arange(3.0, 10.0)).sum()
        total.backward()
        results.append([*found, x.grad, *([] if frozen else [w.grad]), *([] if frozen or b is None else [b.grad])])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)
