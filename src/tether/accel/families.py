"""The families of decoders that this package knows: one entry each, which says where a family keeps what.

An entry names the modules and attributes of transformers that `spec.py` reads; nothing else in this package does. To
add a family whose layers are made of the same parts, add an entry here and a case to `tests/accel/test_spec.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import (
    Gemma2ForCausalLM,
    Gemma2Model,
    Gemma3ForCausalLM,
    Gemma3TextModel,
    LlamaForCausalLM,
    LlamaModel,
    MistralForCausalLM,
    MistralModel,
    Olmo2ForCausalLM,
    Olmo2Model,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3ForCausalLM,
    Qwen3Model,
)


@dataclass(frozen=True)
class Family:
    """A backbone, the causal language model around it, and how its layers differ from Llama's, the default."""

    backbone: type
    causal_lm: type
    # the names of a block's norms; None where it has none at that place
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    # a norm's epsilon, and what is added to its weight
    epsilon: str = "variance_epsilon"
    offset: float = 0.0
    # q_norm and k_norm, over each head or over the whole projection, as long as their weight is
    query_key_norms: bool = False
    # where `sliding_window` is said: for all layers in the configuration, or in each layer's attention
    window: Literal["config", "attention"] | None = None
    # whether attention has `attn_logit_softcapping`; Gemma 3 has the attribute and does not use it
    score_cap: bool = False
    # whether embeddings are multiplied by the square root of the hidden size
    scaled_embeddings: bool = False


GEMMA = {
    "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
    "epsilon": "eps",
    "offset": 1.0,
    "window": "attention",
    "scaled_embeddings": True,
}
FAMILIES = (
    Family(LlamaModel, LlamaForCausalLM),
    Family(MistralModel, MistralForCausalLM, window="config"),
    Family(Qwen2Model, Qwen2ForCausalLM, window="attention"),
    Family(Qwen3Model, Qwen3ForCausalLM, window="attention", query_key_norms=True),
    Family(Gemma2Model, Gemma2ForCausalLM, **GEMMA, score_cap=True),
    Family(Gemma3TextModel, Gemma3ForCausalLM, **GEMMA, query_key_norms=True),
    Family(
        Olmo2Model,
        Olmo2ForCausalLM,
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
        query_key_norms=True,
    ),
)
BACKBONES = {family.backbone: family for family in FAMILIES}
CAUSAL_LMS = {family.causal_lm: family for family in FAMILIES}
