"""The fused parts of a layer against their plain twins, run by Triton's interpreter. Skipped where there is none."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import numpy
import pytest
import torch
from transformers import LlamaConfig, LlamaModel, Qwen2Config, Qwen2Model, Qwen3Config, Qwen3Model

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a device", allow_module_level=True)
if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("Triton's interpreter needs an older numpy", allow_module_level=True)
if "triton" in sys.modules and not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("Triton was imported before it could be told to interpret", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

from tether.models import layer_fused, plain_ops
from tether.models.lora import inject_lora, lora_config
from tether.models.packed import packed_states
from tether.ops import logprob_fused
from tether.ops.logprobs import chunked_logprobs
from tether.types import Sequences


class PlainAttention:
    """What flash attention computes, for which a CPU has no kernel over rows laid end to end."""

    @staticmethod
    def forward(query, key, value, packing, rows, scaling):
        return plain_ops.attend(query, key, value, packing, rows, scaling), torch.empty(0)

    @staticmethod
    def backward(grad, query, key, value, mixed, lse, packing, rows, scaling):
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        with torch.enable_grad():
            again = plain_ops.attend(*inputs, packing, rows, scaling)
        assert torch.equal(again, mixed) and lse.numel() == 0
        return tuple(found.contiguous() for found in torch.autograd.grad(again, inputs, grad))


@pytest.fixture(autouse=True)
def attention_on_a_cpu(monkeypatch):
    monkeypatch.setattr(layer_fused, "Attention", PlainAttention)


SHAPE = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaModel, LlamaConfig(**SHAPE)),
    "qwen2": (Qwen2Model, Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3Model, Qwen3Config(**SHAPE, head_dim=8)),
}


def trunk(kind: str, adapters: bool = False) -> Any:
    model_class, config = KINDS[kind]
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    if adapters:
        inject_lora(model, lora_config(4, 8.0, ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]), 1)
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


def states_and_gradients(model: Any, way: Any, wanted: Any, times: int = 1, recompute: bool = False) -> list[Any]:
    model.zero_grad()
    batch = rows()
    for _ in range(times):
        states = packed_states(model, batch, wanted=wanted, way=way, recompute=recompute)
        assert states is not None
        (states * torch.sin(torch.arange(states.numel()).view(states.shape) * 1.0)).sum().backward()
    return [states.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("wanted", [False, True], ids=["all", "wanted"])
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("kind", KINDS)
def test_states_and_gradients_are_those_of_the_plain_parts(kind: str, adapters: bool, wanted: bool):
    model, read = trunk(kind, adapters), rows().response_mask if wanted else None
    plain, fused = (states_and_gradients(model, way, read) for way in ("plain", "fused"))
    assert len(plain) > 8
    for expected, found in zip(plain, fused, strict=True):
        assert (found - expected).norm() <= 1e-4 * expected.norm()  # float32, whose sums cancel in keys


def test_a_second_micro_batch_adds_to_the_gradient():
    model = trunk("qwen2")
    once, twice = (states_and_gradients(model, "fused", None, times) for times in (1, 2))
    for single, double in zip(once[1:], twice[1:], strict=True):
        assert (double - 2 * single).norm() <= 1e-5 * single.norm()


def test_who_watches_a_gradient_sees_it_pass():
    model, seen = trunk("llama"), []
    weight = model.layers[0].mlp.down_proj.weight
    expected = states_and_gradients(model, "fused", None)
    hook = weight.register_hook(lambda grad: seen.append(grad))
    found = states_and_gradients(model, "fused", None)
    hook.remove()
    assert torch.equal(seen[0], weight.grad)
    for before, now in zip(expected, found, strict=True):
        torch.testing.assert_close(now, before)


def test_layers_that_are_run_again_give_the_same_gradient():
    model = trunk("llama")
    kept, again = (states_and_gradients(model, "fused", None, recompute=again) for again in (False, True))
    for before, now in zip(kept, again, strict=True):
        assert torch.equal(now, before)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("through", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("frozen", [False, True])
def test_fused_logprobs_are_the_plain_ones(through: str, bias: bool, frozen: bool):
    torch.manual_seed(0)
    states, weight = torch.randn(7, 12), torch.randn(5000, 12)  # two blocks of logits, the second not full
    shift, targets = torch.randn(5000), torch.randint(0, 5000, (7,))
    results = []
    for fused in (False, True):
        x, w = states.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
        b = shift.clone().requires_grad_(not frozen) if bias else None
        if fused:
            found: Any = logprob_fused.FusedLogprobs.apply(x, w, b, targets, 2.0 / 0.7, 3)
        else:
            found = chunked_logprobs(x, w, targets, bias=b, scale=2.0, temperature=0.7)
        total = torch.zeros(())
        if through != "entropy":
            total = total + (found[0] * torch.arange(7.0)).sum()
        if through != "logprobs":
            total = total + (found[1] * torch.arange(3.0, 10.0)).sum()
        total.backward()
        results.append([*found, x.grad, *([] if frozen else [w.grad]), *([] if frozen or b is None else [b.grad])])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)
