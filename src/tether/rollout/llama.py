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

from tether.rollout.slots import SlotCache


class Projection:
    """A linear module on feature-major activations."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.weight = module.weight.detach() if type(module) is nn.Linear else None  # (out, in)
        bias = module.bias if type(module) is nn.Linear else None
        self.bias = None if bias is None else bias.detach().unsqueeze(-1)  # (out, 1)

    def into(self, out: Tensor, x: Tensor) -> None:
        """out (out, N) = W x + b, for x (in, N)."""
        if self.weight is None:
            out.copy_(self.module(x.t()).t())
        elif self.bias is None:
            torch.mm(self.weight, x, out=out)
        else:
            torch.addmm(self.bias, self.weight, x, out=out)

    def added_to(self, total: Tensor, x: Tensor) -> None:
        """total (out, N) += W x + b, for x (in, N)."""
        if self.weight is None:
            total.add_(self.module(x.t()).t())
            return
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
        scale = (x * x).mean(dim=-2, keepdim=True).add_(self.epsilon).rsqrt_()
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


class LlamaDecoder:
    """A model's decoding pass over the slots of a cache; see `supported.py` for which models it is right for."""

    def __init__(self, model: Any, slots: int, length: int) -> None:
        """Room for `slots` sequences of `length` tokens."""
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
        positions = torch.arange(length, device=self.device)[None]
        cos, sin = trunk.rotary_emb(torch.empty(0, dtype=dtype, device=self.device), positions)
        self.cos, self.sin = cos[0].t().contiguous(), sin[0].t().contiguous()  # (D, length)

    def prefill(self, prompts: list[list[int]], slots: list[int]) -> None:
        """Read `prompts[i]` into slot `slots[i]`. No logits: the pass ends at the last layer's keys and values."""
        lengths = [len(ids) for ids in prompts]
        tokens = torch.tensor([id for ids in prompts for id in ids], device=self.device)
        columns = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        rows = torch.arange(len(prompts)).repeat_interleave(torch.tensor(lengths)).to(self.device)
        self._trunk(tokens, torch.tensor(slots, device=self.device)[rows], columns, Prefill(rows, columns, lengths))

    def step(self, tokens: Tensor, columns: Tensor, length: int) -> Tensor:
        """(V, n) logits after one more token in each of the slots 0 to n - 1: `tokens` (n,) at `columns` (n,).

        `length` is the longest slot's, this token counted.
        """
        attend = Decode(self.cache, columns, length, self.kv_heads)
        hidden = self._trunk(tokens, torch.arange(len(tokens), device=self.device), columns, attend)
        logits = hidden.new_empty(self.vocabulary, len(tokens))
        self.head.into(logits, self.norm(hidden))
        return logits

    def _trunk(self, tokens: Tensor, slots: Tensor, columns: Tensor, attend: Prefill | Decode) -> Tensor:
        """(H, N) hidden states before the last norm; of no meaning after a prefill, which stops early."""
        hidden = self.embedding(tokens).t().contiguous()
        cos, sin = self.cos[:, columns], self.sin[:, columns]  # (D, N)
        features = (self.heads + 2 * self.kv_heads) * self.head_dim
        qkv = hidden.new_empty(features, len(tokens))
        gates = hidden.new_empty(2 * self.inner, len(tokens))
        for index, layer in enumerate(self.layers):
            query, key, value = self._project(layer, layer.before_attention(hidden), qkv, cos, sin)
            self.cache.write(index, slots, columns, key, value)
            if attend.reads_only and index + 1 == len(self.layers):
                break
            layer.output.added_to(hidden, attend(index, query, key, value, self.scaling))
            normed = layer.before_mlp(hidden)
            gate, up = gates[: self.inner], gates[self.inner :]
            layer.gate.into(gate, normed)
            layer.up.into(up, normed)
            layer.down.added_to(hidden, layer.activation(gate).mul_(up))
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

    def __init__(self, rows: Tensor, columns: Tensor, lengths: list[int]) -> None:
        """Token n stands at column `columns[n]` of prompt `rows[n]`."""
        self.places = (rows, columns)
        self.shape = (len(lengths), max(lengths))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:  # noqa: ARG002
        """(heads * D, N) for query (N, heads, D) and key and value (N, K, D)."""
        padded = [self._pad(x) for x in (query, key, value)]
        mixed = F.scaled_dot_product_attention(*padded, is_causal=True, scale=scaling, enable_gqa=True)
        return mixed.transpose(1, 2)[self.places].flatten(1).t().contiguous()

    def _pad(self, x: Tensor) -> Tensor:
        """(prompts, heads, longest, D), zeros where a prompt has ended."""
        padded = x.new_zeros(*self.shape, *x.shape[1:])
        padded[self.places] = x
        return padded.transpose(1, 2)


class Decode:
    """Attention of one new token in each of the slots 0 to n - 1 to all that its slot holds.

    The query heads that share a key head are rows of one small product, so keys and values are never repeated.
    """

    reads_only = False

    def __init__(self, cache: SlotCache, columns: Tensor, length: int, kv_heads: int) -> None:
        self.cache = cache
        self.length = length
        hidden = torch.arange(length, device=columns.device) > columns[:, None]  # (n, length), past each slot's end
        self.mask: Tensor | None = None  # (n * K, 1, length)
        if hidden.any():
            mask = cache.keys.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            self.mask = mask.repeat_interleave(kv_heads, dim=0).unsqueeze(1)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:  # noqa: ARG002
        """(heads * D, n) for query (n, heads, D); key and value, (n, K, D), are in the cache already."""
        count, heads, width = query.shape
        keys, values = self.cache.read(layer, count, self.length)
        groups = query.reshape(len(keys), -1, width)  # (n * K, heads / K, D)
        if self.mask is None:
            scores = torch.baddbmm(keys.new_empty(1, 1, 1), groups, keys, beta=0.0, alpha=scaling)
        else:
            scores = torch.baddbmm(self.mask, groups, keys, alpha=scaling)
        mixed = torch.bmm(scores.softmax(dim=-1), values)
        return mixed.view(count, heads * width).t().contiguous()
