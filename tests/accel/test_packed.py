"""The pass over packed tokens against the model's own modules: states, gradients, and when it is not taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma2Config,
    Gemma2Model,
    Gemma3TextConfig,
    Gemma3TextModel,
    GPT2Config,
    GPT2Model,
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
from transformers.masking_utils import sdpa_mask

from tether.accel.fused_pass.packed import packed_states
from tether.models.acceleration import training_unsupported
from tether.models.backbones import Backbone, backbone_notices, hidden_states
from tether.models.shared_backbone import SharedBackbone, TopBackbone
from tether.ops.masks import Packing
from tether.types import Sequences

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 5, "sliding_window": 4}  # a window that shows
GEMMA["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
KINDS = {
    "llama": (LlamaModel, LlamaConfig(**SHAPE)),
    "mistral": (MistralModel, MistralConfig(**SHAPE, sliding_window=None, head_dim=6)),
    "mistral, window": (MistralModel, MistralConfig(**SHAPE, sliding_window=4, head_dim=6)),
    "qwen2": (Qwen2Model, Qwen2Config(**SHAPE)),
    "qwen2, windows": (
        Qwen2Model,
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    ),
    "qwen3": (Qwen3Model, Qwen3Config(**SHAPE, head_dim=8)),
    "gemma2": (Gemma2Model, Gemma2Config(**SHAPE, **GEMMA, attn_logit_softcapping=2.0)),
    "gemma2, no cap": (Gemma2Model, Gemma2Config(**SHAPE, **GEMMA, attn_logit_softcapping=None)),
    "gemma3": (Gemma3TextModel, Gemma3TextConfig(**SHAPE, **GEMMA)),
    "olmo2": (Olmo2Model, Olmo2Config(**SHAPE)),
}


def exact_norm(module: Any, x: Tensor) -> Tensor:
    """The norm as transformers writes it, less its rounding to float32."""
    gemma = hasattr(module, "eps")
    epsilon = module.eps if gemma else module.variance_epsilon
    return (module.weight + (1.0 if gemma else 0.0)) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))


def exact_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any) -> Any:
    """Attention as transformers writes it for `eager`, less its rounding to float32; the mask is of bools."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores, cap = query @ key.transpose(2, 3) * given["scaling"], given.get("softcap")
    scores = scores if cap is None else torch.tanh(scores / cap) * cap
    seen = torch.ones(scores.shape[-2:]).tril().bool() if mask is None else mask
    return (scores.masked_fill(~seen, -1e9).softmax(dim=-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("exact", exact_attention)
AttentionMaskInterface.register("exact", sdpa_mask)


def backbone(kind: str = "llama") -> Any:
    """A random backbone in float64 throughout, its norms away from 1 so that a forgotten weight shows."""
    model_class, config = KINDS[kind]
    torch.manual_seed(0)
    model = model_class(config).double().eval()
    model.set_attn_implementation("exact")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.__class__ = type("ExactNorm", (type(module),), {"forward": exact_norm})
    return model


def batch(spans: list[tuple[int, int]], width: int) -> Sequences:
    """Rows of random tokens that are real in the given columns."""
    mask = torch.zeros(len(spans), width, dtype=torch.bool)
    for row, (start, end) in enumerate(spans):
        mask[row, start:end] = True
    tokens = torch.randint(0, 40, mask.shape, generator=torch.Generator().manual_seed(len(spans)))
    return Sequences(tokens=tokens, attention_mask=mask, response_mask=mask & (torch.arange(width) > 2))


def gradients(model: nn.Module, states: Tensor, read: Tensor) -> list[Tensor]:
    """Of a random weighting of the states that are read."""
    model.zero_grad()
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(5), dtype=states.dtype)
    (states * weights)[read].sum().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


UNEVEN = batch([(0, 9), (4, 7), (0, 5), (2, 9)], 9)
EVEN = batch([(0, 6), (0, 6)], 6)


@pytest.mark.parametrize("rows", [UNEVEN, EVEN], ids=["uneven", "even"])
@pytest.mark.parametrize("kind", KINDS)
def test_states_and_gradients_are_the_models_own(kind: str, rows: Sequences):
    model, real = backbone(kind), rows.attention_mask
    ours, theirs = packed_states(model, rows), hidden_states(model, rows)
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-10, atol=1e-12)
    assert (ours[~real] == 0).all()
    for mine, own in zip(gradients(model, ours, real), gradients(model, theirs, real), strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-9, atol=1e-11)


@settings(max_examples=25, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=4),
    draw=st.integers(0, 2**20),
)
def test_only_what_is_wanted_is_found_and_it_is_the_same(spans: list[tuple[int, int]], draw: int):
    model, rows = backbone(), batch([(start, start + length) for start, length in spans], 9)
    chance = torch.rand(rows.tokens.shape, generator=torch.Generator().manual_seed(draw))
    wanted = rows.attention_mask & (chance < 0.5)
    ours, theirs = packed_states(model, rows, wanted=wanted), hidden_states(model, rows)
    torch.testing.assert_close(ours[wanted], theirs[wanted], rtol=1e-10, atol=1e-12)
    assert (ours[~wanted] == 0).all()
    for mine, own in zip(gradients(model, ours, wanted), gradients(model, theirs, wanted), strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-9, atol=1e-11)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=5))
def test_packing_comes_back(spans: list[tuple[int, int]]):
    rows = batch([(start, start + length) for start, length in spans], 9)
    packing = Packing.of(rows.attention_mask)
    numbers = torch.arange(rows.tokens.numel(), dtype=torch.float64).view(*rows.tokens.shape, 1) + 1
    packed = packing.pack(numbers)
    assert torch.equal(packing.unpack(packed, None), numbers * rows.attention_mask[..., None])
    heads = packed[:, None, :]
    assert torch.equal(packing.from_attention(packing.for_attention(heads)), packed)
    assert packing.positions[0] == 0 and (packing.positions.diff()[packing.positions[1:] > 0] == 1).all()


def test_a_top_on_a_shared_backbone_is_the_whole():
    model = backbone()
    top = TopBackbone(model, SharedBackbone(model, depth=1))
    real = UNEVEN.attention_mask
    torch.testing.assert_close(top(UNEVEN)[real], hidden_states(model, UNEVEN)[real], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(top.plain(UNEVEN)[real], top(UNEVEN)[real], rtol=1e-10, atol=1e-12)


def test_a_hook_is_honoured():
    model = backbone()
    fast = Backbone(model)
    with_hook = model.layers[1].mlp.register_forward_hook(lambda *given: given[-1] * 2.0)
    real = UNEVEN.attention_mask
    assert torch.equal(fast(UNEVEN)[real], hidden_states(model, UNEVEN)[real])
    with_hook.remove()
    assert not torch.equal(fast(UNEVEN)[real], hidden_states(model, UNEVEN)[real])  # to the bit: the other way again


def test_a_model_that_computes_something_else_is_found_out():
    model = backbone()
    model.layers[0].self_attn.scaling = 3.0  # its own code takes it from there, too: still right
    assert Backbone(model).fast.reason is None
    model.layers[0].mlp.__class__ = type("Halved", (type(model.layers[0].mlp),), {"forward": lambda self, x: 0.5 * x})
    assert Backbone(model).fast.reason is not None


def test_a_layer_that_computes_something_else_is_found_however_deep_it_lies():
    config = LlamaConfig(**SHAPE | {"num_hidden_layers": 19})
    torch.manual_seed(0)
    model = LlamaModel(config).eval()
    assert Backbone(model).fast.reason is None and backbone_notices(Backbone(model)) == ()
    mlp = model.layers[12].mlp
    mlp.__class__ = type("Halved", (type(mlp),), {"forward": lambda self, x: 0.5 * x})
    reason = Backbone(model).fast.reason
    assert reason is not None and reason.endswith("what rounding explains on layer 13")
    (notice,) = backbone_notices(nn.ModuleList([Backbone(model), Backbone(model)]))
    assert notice.startswith("Training runs the model's own modules") and notice.endswith(f"{reason}.")


def test_a_kind_that_is_not_known_says_so():
    model = GPT2Model(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32)).eval()
    known = "LlamaModel, MistralModel, Qwen2Model, Qwen3Model, Gemma2Model, Gemma3TextModel, Olmo2Model"
    assert Backbone(model).fast.reason == f"GPT2Model is not one of {known}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_that_is_known_is_run_by_the_pass(kind: str):
    model = backbone(kind)
    assert Backbone(model).fast.reason is None
    model.norm.__class__ = type("Less", (type(model.norm),), {"forward": lambda self, x: 0.5 * x})
    assert str(Backbone(model).fast.reason).endswith("on layer 3")


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "olmo2"])
def test_layers_that_are_run_again_give_the_same_gradients(kind: str):
    model, wanted = backbone(kind), UNEVEN.response_mask
    kept, again = (
        gradients(model, packed_states(model, UNEVEN, wanted=wanted, recompute=recompute), wanted)
        for recompute in (False, True)
    )
    assert all(torch.equal(mine, own) for mine, own in zip(kept, again, strict=True))


def test_capped_scores_need_heads_that_the_kernel_knows():
    model = backbone("gemma2").bfloat16()
    assert training_unsupported(model) is not None and "heads are 8 wide" in str(training_unsupported(model))
    assert training_unsupported(backbone("gemma2, no cap").bfloat16()) is None


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("part", ["mlp", "input_layernorm", "post_attention_layernorm", "norm"])
def test_whatever_part_of_a_layer_is_not_what_it_seems_is_found(part: str, index: int):
    model = backbone()
    changed: Any = model.norm if part == "norm" else model.layers[index].get_submodule(part)
    forward = type(changed).forward
    changed.__class__ = type("Less", (type(changed),), {"forward": lambda self, x: 0.5 * forward(self, x)})
    reason = Backbone(model).fast.reason
    assert reason is not None and reason.endswith(f"on layer {3 if part == 'norm' else index + 1}")


def test_a_backbone_that_is_not_as_its_configuration_says_is_run_by_its_modules():
    model = backbone()
    model.layers = model.layers[:2]
    cut = Backbone(model)
    assert cut.fast.reason == "its configuration has another number of layers"
    real = UNEVEN.attention_mask
    assert torch.equal(cut(UNEVEN)[real], hidden_states(model, UNEVEN)[real])


def test_the_second_derivative_is_refused_rather_than_wrong():
    model = backbone()
    states = packed_states(model, EVEN)
    gradient = torch.autograd.grad(states.square().sum(), model.layers[0].mlp.up_proj.weight, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()
