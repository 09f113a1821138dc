"""`DecoderSpec` reads each family's modules: what it holds, whose tensors, and which adapters it describes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from tether.accel import families
from tether.accel.families import FAMILIES
from tether.accel.spec import DecoderSpec, Linear
from tether.models.lora import inject_lora, lora_config

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
SLIDING: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
# a family's options, and its layers' norms (before and after attention, before and after the MLP, of a query)
KNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "Llama": ({}, "before before"),
    "Mistral": ({"sliding_window": 5}, "before before"),
    "Qwen2": ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, "before before"),
    "Qwen3": ({}, "before before head"),
    "Gemma2": ({**SLIDING, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}, "before after before after"),
    "Gemma3": (SLIDING, "before after before after head"),
    "Olmo2": ({}, "after after projection"),
}
WINDOWS = {"Mistral": [5, 5], "Qwen2": [None, 5], "Gemma2": [5, None], "Gemma3": [5, None]}


def build(kind: str, **more: Any) -> Any:
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config(**{**SHAPE, **KNOWN[kind][0], **more})).eval()


def test_every_family_is_tested_here():
    assert {family.causal_lm.__name__ for family in FAMILIES} == {f"{kind}ForCausalLM" for kind in KNOWN}


def test_only_the_spec_knows_the_modules_of_transformers():
    names = re.compile(r"\btransformers\b.*\bimport\b|self_attn|_proj\b|embed_tokens|lm_head|rotary_emb|layernorm")
    for file in Path(families.__file__).parent.rglob("*.py"):
        if file.name not in ("spec.py", "families.py"):
            assert not names.search(file.read_text(encoding="utf-8")), file


def norms(layer: Any, width: int) -> str:
    places = ("before_attention", "after_attention", "before_mlp", "after_mlp")
    found = [place.split("_")[0] for place in places if getattr(layer, place) is not None]
    if layer.query_norm is not None:
        found.append("head" if len(layer.query_norm.weight) == width else "projection")
    return " ".join(found)


@pytest.mark.parametrize("kind", KNOWN)
def test_a_family_is_read_from_its_modules(kind: str):
    model = build(kind)
    spec = DecoderSpec.from_model(model)
    assert (spec.hidden, spec.inner, spec.heads, spec.kv_heads, spec.head_dim, spec.vocabulary) == (24, 36, 4, 2, 8, 40)
    assert [norms(layer, 8) for layer in spec.layers] == [KNOWN[kind][1]] * 2
    assert [layer.window for layer in spec.layers] == WINDOWS.get(kind, [None, None])
    gemma = kind.startswith("Gemma")
    assert {norm.offset for layer in spec.layers for norm in layer.norms} == {1.0 if gemma else 0.0}
    assert [layer.activation_kind for layer in spec.layers] == ["gelu_tanh" if gemma else "silu"] * 2
    assert [layer.score_cap for layer in spec.layers] == [2.0 if kind == "Gemma2" else None] * 2
    assert spec.logit_cap == (5.0 if kind == "Gemma2" else None)
    assert len(spec.angles(torch.arange(4))) == (2 if kind == "Gemma3" else 1)
    assert spec.tied == model.config.tie_word_embeddings
    assert spec.layers[0].query.bias is None or kind == "Qwen2"


@pytest.mark.parametrize("kind", KNOWN)
def test_every_parameter_is_described_once_and_is_the_models_own(kind: str):
    model = build(kind)
    spec = DecoderSpec.from_model(model)
    assert spec.output is not None and spec.final_norm is not None
    found = [*spec.trained(), spec.embedding.table, *([] if spec.tied else spec.output.tensors())]
    assert sorted(map(id, found)) == sorted(map(id, model.parameters()))
    shared = {tensor.data_ptr() for tensor in model.parameters()}
    detached = spec.detached()
    assert not detached.trained()
    assert {tensor.data_ptr() for layer in detached.layers for tensor in layer.tensors()} <= shared


@pytest.mark.parametrize("kind", KNOWN)
def test_embeddings_are_scaled_as_the_model_scales_them(kind: str):
    model, tokens = build(kind), torch.tensor([3, 9])
    spec = DecoderSpec.from_model(model.model)
    assert spec.output is None and spec.embedding.table is not None
    own = model.model(input_ids=tokens[None], output_hidden_states=True).hidden_states[0][0]
    assert torch.equal(spec.embedding(tokens), own)
    assert torch.allclose(spec.embedding.table[tokens] * spec.embedding.scale, own)


def test_a_cut_backbone_has_no_final_norm():
    model = build("Gemma2").model
    model.norm = nn.Identity()
    assert DecoderSpec.from_model(model).final_norm is None


def adapted() -> Any:
    model = build("Llama")
    inject_lora(model, lora_config(4, 8.0, ["q_proj"]), seed=0)
    return model.model.layers[0].self_attn.q_proj


def test_a_plain_adapter_is_described():
    module = adapted()
    part = Linear.of(module)
    assert part.weight is module.base_layer.weight and part.adapter is not None
    assert part.adapter.rank == 4 and part.adapter.scaling == 2.0 and part.adapter.down is module.lora_A.default.weight


def test_an_adapter_that_is_off_or_merged_is_left_out():
    module = adapted()
    module.merge()
    assert Linear.of(module).adapter is None and Linear.of(module).weight is module.base_layer.weight
    module.enable_adapters(False)
    assert Linear.of(module).weight is None  # the next call takes the adapter out of the weight
    module.unmerge()
    assert Linear.of(module).adapter is None and Linear.of(module).weight is module.base_layer.weight


@pytest.mark.parametrize("given", [{"use_dora": True}, {"lora_dropout": 0.5}, {"lora_bias": True}], ids=str)
def test_an_adapter_of_an_unusual_kind_is_called(given: dict[str, Any]):
    model = inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"], **given), build("Llama").model).train()
    module = next(module for module in model.modules() if isinstance(module, LoraLayer))
    assert Linear.of(module).weight is None


def test_a_layer_that_is_not_linear_is_called():
    assert Linear.of(nn.Identity()).weight is None
    assert Linear.of(type("Scaled", (nn.Linear,), {})(3, 4)).weight is None
