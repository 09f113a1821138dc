"""The parts of a Llama-like model that a decode step reads, taken from its own modules: nothing is copied."""

from __future__ import annotations

from typing import Any, cast

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from tether.accel.families import (
    LayerFacts,
    Norm,
    block_norms,
    embedding_scale,
    head_norms,
    layer_facts,
    rotary_tables,
)
from tether.accel.fused_pass.lora_linear import LoraAdapter

MAX_RANK = 64  # of an adapter that the kernels compute


class StepLinear:
    """A linear layer: its module, and where no more than this is in it, what it computes with.

    That is a weight, a bias and at most one adapter, which a decode step's kernels compute where its rank is small. Any
    other module is called as it is.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.adapter: LoraAdapter | None = None
        base: Any = module
        self.known = True
        if type(module) is LoraLinear:
            base = cast(Any, module).get_base_layer()
            names = [name for name in module.active_adapters if name in module.lora_A]
            if module.disable_adapters:
                self.known = not module.merged  # else the call takes the adapters out of the weight first
            elif names and not module.merged:
                self.adapter = plain_adapter(module, names)
                self.known = self.adapter is not None
        self.known = self.known and type(base) is nn.Linear and base.weight.is_contiguous()
        self.fused = self.known and (self.adapter is None or len(self.adapter.down) <= MAX_RANK)
        self.weight: Tensor = base.weight.detach() if self.known else torch.empty(0)
        self.bias: Tensor | None = base.bias.detach() if self.known and base.bias is not None else None

    def __call__(self, x: Tensor) -> Tensor:
        """The module's output."""
        return self.module(x)


def plain_adapter(module: Any, names: list[str]) -> LoraAdapter | None:
    """The module's adapter, where it is one and of the plain kind."""
    if len(names) > 1 or names[0] in module.lora_variant or module.lora_bias.get(names[0]):
        return None
    down, up = module.lora_A[names[0]].weight.detach(), module.lora_B[names[0]].weight.detach()
    dropout = module.lora_dropout[names[0]]
    if dropout.training and not isinstance(dropout, nn.Identity):
        return None
    if not (down.is_contiguous() and up.is_contiguous()):
        return None
    return LoraAdapter(down, up, module.scaling[names[0]])


def one_rank(*parts: StepLinear) -> bool:
    """Whether the adapters among some linear layers can be computed together: of one rank and one type."""
    return len({(len(part.adapter.down), part.adapter.up.dtype) for part in parts if part.adapter}) <= 1


class StepLayer:
    """One block's modules and norms, and which of its parts the fused kernels may compute."""

    def __init__(self, block: Any, facts: LayerFacts) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.facts = facts
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = block_norms(block)
        self.query, self.key, self.value = (
            StepLinear(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        self.output = StepLinear(attention.o_proj)
        self.head_norms = head_norms(attention)
        self.head_dim: int = attention.head_dim
        self.gate, self.up, self.down = StepLinear(mlp.gate_proj), StepLinear(mlp.up_proj), StepLinear(mlp.down_proj)
        self.activation: Any = mlp.act_fn
        self.is_silu = isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)
        self.is_gelu = isinstance(mlp.act_fn, GELUTanh)
        heads = (self.query, self.key, self.value)
        biases = {part.bias is None for part in heads}
        self.fused_attention = all(part.fused for part in heads) and len(biases) == 1 and one_rank(*heads)
        gates = (self.gate, self.up)
        self.fused_gates = (self.is_silu or self.is_gelu) and one_rank(*gates)
        self.fused_gates = self.fused_gates and all(part.fused and part.bias is None for part in gates)


class StepBackbone:
    """A model's layers, embedding, last norm and output layer, and its tables of rotary positions."""

    def __init__(self, model: Any, length: int) -> None:
        """`length` is how many positions the tables have."""
        backbone, config = model.model, model.config
        facts = layer_facts(backbone)
        self.layers = [StepLayer(block, own) for block, own in zip(backbone.layers, facts, strict=True)]
        self.embedding: nn.Module = backbone.embed_tokens
        self.embedding_scale = embedding_scale(backbone)
        self.norm = Norm.of(backbone.norm)
        self.head: Any = model.lm_head
        self.logit_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.head_dim: int = backbone.layers[0].self_attn.head_dim
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.hidden: int = config.hidden_size
        self.inner: int = config.intermediate_size
        weight: Tensor = model.lm_head.weight
        self.vocabulary, self.device, self.dtype = weight.shape[0], weight.device, weight.dtype
        half = self.head_dim // 2  # the second half of each row repeats the first
        self.angles: dict[str | None, tuple[Tensor, Tensor]] = {  # cos and sin, (length, D / 2) each
            kind: (cos[:, :half].contiguous(), sin[:, :half].contiguous())
            for kind, (cos, sin) in rotary_tables(backbone, length, self.dtype).items()
        }

    def embed(self, tokens: Tensor) -> Tensor:
        """(..., H) the first layer's inputs."""
        found = self.embedding(tokens)
        return found if self.embedding_scale == 1.0 else found * self.embedding_scale


def fingerprint(model: nn.Module) -> tuple[object, ...]:
    """Where the model's parameters lie and which adapters act: while this stays, so does all that a step reads."""
    acting = [
        (tuple(module.active_adapters), module.disable_adapters, tuple(module.merged_adapters), *module.scaling.items())
        for module in model.modules()
        if isinstance(module, LoraLayer)
    ]
    return tuple(parameter.data_ptr() for parameter in model.parameters()), *acting
