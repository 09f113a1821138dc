"""The parts of a Llama-like model that a decode step reads, taken from its own modules: nothing is copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation


class Layer:
    """One block's modules and norm weights, and which of its parts the fused kernels may compute.

    A module that is not a plain `nn.Linear` (an adapter) is called as it is, by the plain way.
    """

    def __init__(self, block: Any) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.before_attention: Tensor = block.input_layernorm.weight.detach()
        self.before_mlp: Tensor = block.post_attention_layernorm.weight.detach()
        self.epsilon: float = block.input_layernorm.variance_epsilon
        self.query, self.key, self.value = attention.q_proj, attention.k_proj, attention.v_proj
        self.output: nn.Module = attention.o_proj
        self.query_norm: Tensor | None = attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None
        self.key_norm: Tensor | None = attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None
        self.head_dim: int = attention.head_dim
        self.gate, self.up, self.down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.activation: Any = mlp.act_fn
        is_silu = isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)
        self.fused_attention = all(map(is_plain, (self.query, self.key, self.value)))
        self.fused_gates = is_silu and all(is_plain(part) and part.bias is None for part in (self.gate, self.up))


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a linear layer whose weight lies as the kernels read it."""
    return type(module) is nn.Linear and module.weight.is_contiguous()


class Trunk:
    """A model's layers, embedding, last norm and output layer, and its table of rotary positions."""

    def __init__(self, model: Any, length: int) -> None:
        """`length` is how many positions the table has."""
        trunk, config = model.model, model.config
        self.layers = [Layer(block) for block in trunk.layers]
        self.embedding: nn.Module = trunk.embed_tokens
        self.norm: Tensor = trunk.norm.weight.detach()
        self.epsilon: float = trunk.norm.variance_epsilon
        self.head: Any = model.lm_head
        attention = trunk.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.hidden: int = config.hidden_size
        self.inner: int = config.intermediate_size
        self.scaling: float = attention.scaling
        weight: Tensor = model.lm_head.weight
        self.vocabulary, self.device, self.dtype = weight.shape[0], weight.device, weight.dtype
        positions = torch.arange(length, device=self.device)[None]
        cos, sin = trunk.rotary_emb(torch.empty(0, dtype=self.dtype, device=self.device), positions)
        half = self.head_dim // 2  # the second half of each row repeats the first
        self.cos: Tensor = cos[0, :, :half].contiguous()  # (length, D / 2)
        self.sin: Tensor = sin[0, :, :half].contiguous()


def storages(model: nn.Module) -> tuple[int, ...]:
    """Where the model's parameters lie: while this stays the same, so does everything a captured step reads."""
    return tuple(parameter.data_ptr() for parameter in model.parameters())
