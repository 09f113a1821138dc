"""The mathematics of decoding for Llama and its relatives: Mistral, Qwen2 and Qwen3.

Activations are kept feature-major, (features, N) for N tokens, so that a linear layer is `weight @ x` on the weight as
the model holds it. For few tokens this is the layout in which a CPU's matrix product runs at its best: measured with 32
tokens and two threads, two to three times as fast as `F.linear`, which then uses one thread only.

Every weight is read from the model's own modules when a decoder is made, and nothing is copied; make a decoder for each
call to `generate`. A module that is not a plain `nn.Linear` (an adapter) is called as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation

from tether.rollout.slots import SlotCache

FEW = 64  # tokens up to which a matrix product is bound by reading the weight
TALL = 8192  # rows of a weight from which it is cut into blocks


def pieces(rows: int, columns: int) -> int:
    """Into how many blocks of rows a weight is cut for a product with few tokens; 1 leaves it whole.

    MKL splits a long inner dimension over its threads, and packs a tall matrix in pieces that fit no cache. Measured
    with 32 tokens: blocks make a 576 x 1536 weight 1.5 times as fast, and the 49152 x 576 output layer 1.1 times.
    """
    if rows >= TALL:
        return next((rows // size for size in (512, 256, 128) if rows % size == 0), 1)
    return 4 if columns > rows and rows % 4 == 0 else 1


class Projection:
    """A linear module on feature-major activations."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.weight: Tensor | None = None  # (out, in)
        self.blocks: Tensor | None = None  # (pieces, out / pieces, in), the same memory, where that is faster
        self.bias: Tensor | None = None  # (out, 1)
        if type(module) is nn.Linear:
            self.weight = module.weight.detach()
            count = pieces(*module.weight.shape) if module.weight.is_contiguous() else 1
            self.blocks = self.weight.view(count, -1, module.in_features) if count > 1 else None
            self.bias = None if module.bias is None else module.bias.detach().unsqueeze(-1)

    def into(self, out: Tensor, x: Tensor) -> None:
        """out (out, N) = W x + b, for x (in, N)."""
        if self.weight is None:
            out.copy_(self.module(x.t()).t())
        elif self.bias is not None:
            torch.addmm(self.bias, self.weight, x, out=out)
        elif self.blocks is not None and x.shape[1] <= FEW:
            torch.bmm(self.blocks, x.expand(len(self.blocks), *x.shape), out=out.view(*self.blocks.shape[:2], -1))
        else:
            torch.mm(self.weight, x, out=out)

    def added_to(self, total: Tensor, x: Tensor) -> None:
        """total (out, N) += W x + b, for x (in, N)."""
        if self.weight is None:
            total.add_(self.module(x.t()).t())
            return
        if self.blocks is not None and x.shape[1] <= FEW:
            parts = total.view(*self.blocks.shape[:2], -1)
            parts.baddbmm_(self.blocks, x.expand(len(self.blocks), *x.shape))
        else:
            total.addmm_(self.weight, x)
        if self.bias is not None:
            total.add_(self.bias)


class Norm:
    """RMS norm over the second to last dimension."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight.detach().unsqueeze(-1)  # (features, 1)
        self.epsilon: float = module.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., features, N) · weight / sqrt(mean over features of x² + ε)."""
        scale = (x * x).sum(dim=-2, keepdim=True).mul_(1.0 / x.shape[-2]).add_(self.epsilon).rsqrt_()
        return (x * scale).mul_(self.weight)


class Layer:
    """One block's modules."""

    def __init__(self, block: Any) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.before_attention, self.before_mlp = Norm(block.input_layernorm), Norm(block.post_attention_layernorm)
        self.query, self.key = Projection(attention.q_proj), Projection(attention.k_proj)
        self.value, self.output = Projection(attention.v_proj), Projection(attention.o_proj)
        self.query_norm = Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = Norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.gate, self.up = Projection(mlp.gate_proj), Projection(mlp.up_proj)
        self.down, self.activation = Projection(mlp.down_proj), mlp.act_fn
        self.is_silu = isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)


class LlamaDecoder:
    """A model's decoding pass over the slots of a cache; see `supported.py` for which models it is right for."""

    def __init__(self, model: Any, slots: int, length: int, traced: int | None = None) -> None:
        """Room for `slots` sequences of `length` tokens; what layer `traced` is given is kept in the cache's states."""
        trunk, config = model.model, model.config
        attention = trunk.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.inner: int = config.intermediate_size
        self.scaling: float = attention.scaling
        self.embedding: nn.Module = trunk.embed_tokens
        self.layers = [Layer(block) for block in trunk.layers]
        self.norm, self.head = Norm(trunk.norm), Projection(model.lm_head)
        self.vocabulary: int = model.lm_head.weight.shape[0]
        self.device: torch.device = model.lm_head.weight.device
        dtype: torch.dtype = model.lm_head.weight.dtype
        self.cache = SlotCache(
            len(self.layers), slots, self.kv_heads, self.head_dim, length, dtype=dtype, device=self.device
        )
        self.traced = traced
        if traced is not None:
            self.cache.keep_states(config.hidden_size)
        positions = torch.arange(length, device=self.device)[None]
        cos, sin = trunk.rotary_emb(torch.empty(0, dtype=dtype, device=self.device), positions)
        self.cos, self.sin = cos[0].t().contiguous(), sin[0].t().contiguous()  # (D, length)

    def prefill(self, prompts: list[list[int]], slots: list[int]) -> None:
        """Read `prompts[i]` into slot `slots[i]`. No logits: the pass ends at the last layer's keys and values."""
        lengths = [len(ids) for ids in prompts]
        tokens = torch.tensor([id for ids in prompts for id in ids], device=self.device)
        columns = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        self._trunk(tokens, columns, Prefill(self.cache, slots, lengths, self.scaling))

    def step(self, tokens: Tensor, columns: Tensor, length: int) -> Tensor:
        """(V, n) logits after one more token in each of the slots 0 to n - 1: `tokens` (n,) at `columns` (n,).

        `length` is the longest slot's, this token counted.
        """
        hidden = self._trunk(tokens, columns, Decode(self.cache, columns, length, self.scaling))
        logits = hidden.new_empty(self.vocabulary, len(tokens))
        self.head.into(logits, self.norm(hidden))
        return logits

    def _trunk(self, tokens: Tensor, columns: Tensor, attend: Prefill | Decode) -> Tensor:
        """(H, N) hidden states before the last norm; of no meaning after a prefill, which stops early."""
        hidden = self.embedding(tokens).t().contiguous()
        cos, sin = self.cos[:, columns], self.sin[:, columns]  # (D, N)
        features = (self.heads + 2 * self.kv_heads) * self.head_dim
        qkv = hidden.new_empty(features, len(tokens))
        gates = hidden.new_empty(2 * self.inner, len(tokens))
        for index, layer in enumerate(self.layers):
            if index == self.traced:
                assert self.cache.states is not None
                self.cache.states.index_put_((attend.slots, columns), hidden.t())
            query, key, value = self._project(layer, layer.before_attention(hidden), qkv, cos, sin)
            attend.store(index, key, value)
            if attend.reads_only and index + 1 == len(self.layers):
                break
            layer.output.added_to(hidden, attend(index, query))
            normed = layer.before_mlp(hidden)
            gate, up = gates[: self.inner], gates[self.inner :]
            layer.gate.into(gate, normed)
            layer.up.into(up, normed)
            gate = F.silu(gate, inplace=True) if layer.is_silu else layer.activation(gate)
            layer.down.added_to(hidden, gate.mul_(up))
        return hidden

    def _project(self, layer: Layer, x: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (N, heads, D) and keys (N, K, D), and values (N, K, D), as views; `qkv` is work space."""
        first, second = self.heads * self.head_dim, (self.heads + self.kv_heads) * self.head_dim
        layer.query.into(qkv[:first], x)
        layer.key.into(qkv[first:second], x)
        layer.value.into(qkv[second:], x)
        by_head = qkv.unflatten(0, (-1, self.head_dim))  # (heads + 2 K, D, N)
        value = by_head[self.heads + self.kv_heads :]
        both = by_head[: self.heads + self.kv_heads]
        if layer.query_norm and layer.key_norm:
            both = torch.cat((layer.query_norm(both[: self.heads]), layer.key_norm(both[self.heads :])))
        both = rotate(both, cos, sin).permute(2, 0, 1)
        return both[:, : self.heads], both[:, self.heads :], value.permute(2, 0, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x (heads, D, N): pairs (i, i + D/2) turned by the angles of cos and sin, (D, N) each."""
    half = x.shape[1] // 2
    turned = x * cos
    turned[:, :half].addcmul_(x[:, half:], sin[:half], value=-1.0)
    turned[:, half:].addcmul_(x[:, :half], sin[half:])
    return turned


class Prefill:
    """Causal attention of whole prompts among themselves, padded on the right, where causality hides the padding."""

    reads_only = True

    def __init__(self, cache: SlotCache, slots: list[int], lengths: list[int], scaling: float) -> None:
        """Tokens come prompt after prompt; prompt i has `lengths[i]` of them and goes into `slots[i]`."""
        self.cache, self.places, self.scaling = cache, slots, scaling
        self.slots = torch.tensor(slots).repeat_interleave(torch.tensor(lengths)).to(cache.keys.device)  # by token
        self.shape = (len(lengths), max(lengths))
        self.real: Tensor | None = None  # (prompts, longest) bool, where there is padding
        if min(lengths) < max(lengths):
            ends = torch.tensor(lengths, device=cache.keys.device)
            self.real = torch.arange(max(lengths), device=ends.device) < ends[:, None]
        self.key = self.value = torch.empty(0)  # (prompts, K, longest, D)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take key and value, (N, K, D) each, into the cache."""
        self.key, self.value = self._padded(key), self._padded(value)
        self.cache.write_prompts(layer, self.places, self.key, self.value)

    def __call__(self, layer: int, query: Tensor) -> Tensor:  # noqa: ARG002
        """(heads * D, N) for query (N, heads, D) and the keys and values stored last."""
        mixed = F.scaled_dot_product_attention(
            self._padded(query), self.key, self.value, is_causal=True, scale=self.scaling, enable_gqa=True
        ).transpose(1, 2)
        return (mixed.flatten(0, 1) if self.real is None else mixed[self.real]).flatten(1).t().contiguous()

    def _padded(self, x: Tensor) -> Tensor:
        """(prompts, heads, longest, D) of x (N, heads, D), zeros where a prompt has ended."""
        if self.real is None:
            return x.contiguous().view(*self.shape, *x.shape[1:]).transpose(1, 2)
        padded = x.new_zeros(*self.shape, *x.shape[1:])
        padded[self.real] = x
        return padded.transpose(1, 2)


class Decode:
    """Attention of one new token in each of the slots 0 to n - 1 to all that its slot holds.

    The query heads that share a key head are rows of one small product, so keys and values are never repeated.
    """

    reads_only = False

    def __init__(self, cache: SlotCache, columns: Tensor, length: int, scaling: float) -> None:
        """The new tokens stand at `columns` (n,), and the longest slot has `length` tokens with them."""
        self.cache, self.columns, self.length, self.scaling = cache, columns, length, scaling
        self.slots = torch.arange(len(columns), device=columns.device)
        hidden = torch.arange(length, device=columns.device) > columns[:, None]  # (n, length), past each slot's end
        self.mask: Tensor | None = None  # (n * K, 1, length)
        if hidden.any():
            mask = cache.keys.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            self.mask = mask.repeat_interleave(cache.keys.shape[2], dim=0).unsqueeze(1)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take key and value, (n, K, D) each, into the cache."""
        self.cache.write(layer, self.slots, self.columns, key, value)

    def __call__(self, layer: int, query: Tensor) -> Tensor:
        """(heads * D, n) for query (n, heads, D)."""
        count, heads, width = query.shape
        keys, values = self.cache.read(layer, count, self.length)
        groups = query.reshape(len(keys), -1, width)  # (n * K, heads / K, D)
        if self.mask is None:
            scores = torch.baddbmm(keys.new_empty(1, 1, 1), groups, keys, beta=0.0, alpha=self.scaling)
        else:
            scores = torch.baddbmm(self.mask, groups, keys, alpha=self.scaling)
        mixed = torch.bmm(scores.softmax(dim=-1), values)
        return mixed.view(count, heads * width).t().contiguous()
