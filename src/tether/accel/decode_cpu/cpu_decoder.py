"""The mathematics of decoding for Llama and its relatives: Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3.

Activations are kept feature-major, (features, N) for N tokens, so that a linear layer is `weight @ x` on the weight as
the model holds it. For few tokens this is the layout in which a CPU's matrix product runs at its best: measured with 32
tokens and two threads, two to three times as fast as `F.linear`, which then uses one thread only.

Every weight is read from the model's own modules when a decoder is made, and nothing is copied; make a decoder for each
call to `generate`. A module that is not a plain `nn.Linear` (an adapter) is called as it is.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation

from tether.accel import families
from tether.accel.decode_cpu.cached_attention import Decode, Prefill, capped
from tether.accel.decode_cpu.kv_slots import SlotCache

FEW = 128  # tokens up to which a weight in blocks is no slower than a whole one
TALL = 8192  # rows of a weight from which its blocks are of a fixed size


def pieces(rows: int) -> int:
    """Into how many blocks of rows a weight is cut for a product with few tokens; 1 leaves it whole.

    MKL splits a product between its threads as suits large ones, and packs a tall matrix in pieces that fit no cache.
    Measured with two threads, blocks against whole: with 64 tokens a 1536 x 576 or 576 x 576 weight is 1.3 times as
    fast and a 576 x 1536 one 1.5 times; with 32 tokens the last is 1.6 times as fast, the others the same; the 49152 x
    576 output layer 1.1 times.
    """
    if rows >= TALL:
        return next((rows // size for size in (512, 256, 128) if rows % size == 0), 1)
    return 4 if rows % 4 == 0 else 1


@cache
def column_multiple() -> int:
    """The number of tokens that a pass is filled up to a multiple of; 1 leaves it as it is.

    On AMD processors MKL multiplies by whole blocks of 16 columns at full speed, and by any other number at a half
    down to an eighth of it. Measured on an EPYC with AVX-512, one thread, a 1536 x 576 weight, in useful GFLOP/s: 2
    tokens 3.5 and filled up 9.7, 8 tokens 14 and 39, 15 tokens 23 and 73, 31 tokens 40 and 86, 63 tokens 53 and 90.
    """
    try:
        vendor = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")[:400]
    except OSError:
        return 1
    return 16 if "AuthenticAMD" in vendor else 1


def filled(x: Tensor, multiple: int) -> Tensor:
    """x (..., N) with its last column repeated until N is a multiple; one column alone stays alone."""
    missing = -x.shape[-1] % multiple if x.shape[-1] > 1 else 0
    return torch.cat((x, x[..., -1:].expand(*x.shape[:-1], missing)), dim=-1) if missing else x


class Projection:
    """A linear module on feature-major activations."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.weight: Tensor | None = None  # (out, in)
        self.blocks: Tensor | None = None  # (pieces, out / pieces, in), the same memory, where that is faster
        self.bias: Tensor | None = None  # (out, 1)
        if type(module) is nn.Linear:
            self.weight = module.weight.detach()
            count = pieces(module.out_features) if module.weight.is_contiguous() else 1
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


class CpuNorm:
    """RMS norm over the second to last dimension."""

    def __init__(self, facts: families.Norm) -> None:
        weight = facts.weight if facts.offset == 0.0 else facts.weight + facts.offset
        self.weight: Tensor = weight.unsqueeze(-1)  # (features, 1)
        self.epsilon = facts.epsilon

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., features, N) · weight / sqrt(mean over features of x² + ε)."""
        scale = (x * x).sum(dim=-2, keepdim=True).mul_(1.0 / x.shape[-2]).add_(self.epsilon).rsqrt_()
        return (x * scale).mul_(self.weight)


class CpuLayer:
    """One block's modules."""

    def __init__(self, block: Any, facts: families.LayerFacts) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.facts = facts
        first, after_attention, second, after_mlp = families.block_norms(block)
        self.before_attention, self.before_mlp = CpuNorm(first), CpuNorm(second)
        self.after_attention = CpuNorm(after_attention) if after_attention else None
        self.after_mlp = CpuNorm(after_mlp) if after_mlp else None
        self.query, self.key = Projection(attention.q_proj), Projection(attention.k_proj)
        self.value, self.output = Projection(attention.v_proj), Projection(attention.o_proj)
        norms = families.head_norms(attention)
        self.query_norm, self.key_norm = (None, None) if norms is None else map(CpuNorm, norms)
        self.gate, self.up = Projection(mlp.gate_proj), Projection(mlp.up_proj)
        self.down, self.activation = Projection(mlp.down_proj), mlp.act_fn
        self.is_silu = isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)


def add_output(hidden: Tensor, projection: Projection, x: Tensor, norm: CpuNorm | None) -> None:
    """hidden (H, N) += the projection of x (in, N), normed first where the family does so."""
    if norm is None:
        projection.added_to(hidden, x)
    else:
        out = torch.empty_like(hidden)
        projection.into(out, x)
        hidden.add_(norm(out))


class LlamaDecoder:
    """A model's decoding pass over the slots of a cache; see `supported.py` for which models it is right for."""

    def __init__(self, model: Any, slots: int, length: int, traced: int | None = None) -> None:
        """Room for `slots` sequences of `length` tokens; what layer `traced` is given is kept in the cache's states."""
        backbone, config = model.model, model.config
        attention = backbone.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.inner: int = config.intermediate_size
        self.embedding: nn.Module = backbone.embed_tokens
        self.embedding_scale = families.embedding_scale(backbone)
        facts = families.layer_facts(backbone)
        self.layers = [CpuLayer(block, own) for block, own in zip(backbone.layers, facts, strict=True)]
        self.norm, self.head = CpuNorm(families.Norm.of(backbone.norm)), Projection(model.lm_head)
        self.logit_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.vocabulary: int = model.lm_head.weight.shape[0]
        self.device: torch.device = model.lm_head.weight.device
        dtype: torch.dtype = model.lm_head.weight.dtype
        self.cache = SlotCache(
            len(self.layers), slots, self.kv_heads, self.head_dim, length, dtype=dtype, device=self.device
        )
        self.column_multiple = column_multiple() if self.device.type == "cpu" else 1
        self.traced = traced
        if traced is not None:
            self.cache.keep_states(config.hidden_size)
        tables = families.rotary_tables(backbone, length, dtype)
        self.angles = {  # cos and sin, (D, length) each
            kind: (cos.t().contiguous(), sin.t().contiguous()) for kind, (cos, sin) in tables.items()
        }

    def prefill(self, prompts: list[list[int]], slots: list[int]) -> None:
        """Read `prompts[i]` into slot `slots[i]`. No logits: the pass ends at the last layer's keys and values."""
        lengths = [len(ids) for ids in prompts]
        tokens = torch.tensor([id for ids in prompts for id in ids], device=self.device)
        columns = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        self._backbone(tokens, columns, Prefill(self.cache, slots, lengths))

    def step(self, tokens: Tensor, columns: Tensor, length: int) -> Tensor:
        """(V, n) logits after one more token in each of the slots 0 to n - 1: `tokens` (n,) at `columns` (n,).

        `length` is the longest slot's, this token counted.
        """
        hidden = self._backbone(tokens, columns, Decode(self.cache, columns, length))
        logits = hidden.new_empty(self.vocabulary, hidden.shape[1])
        self.head.into(logits, self.norm(hidden))
        logits = logits[:, : len(tokens)]
        return logits if self.logit_cap is None else capped(logits, self.logit_cap)

    def _backbone(self, tokens: Tensor, columns: Tensor, attend: Prefill | Decode) -> Tensor:
        """(H, N') hidden states before the last norm, N' >= N as `column_multiple` has it, the first N of them real.

        Of no meaning after a prefill, which stops early.
        """
        count, multiple = len(tokens), self.column_multiple
        hidden = self.embedding(filled(tokens, multiple)).t().contiguous()
        if self.embedding_scale != 1.0:
            hidden.mul_(self.embedding_scale)
        places = filled(columns, multiple)
        angles = {kind: (cos[:, places], sin[:, places]) for kind, (cos, sin) in self.angles.items()}  # (D, N')
        features = (self.heads + 2 * self.kv_heads) * self.head_dim
        qkv = hidden.new_empty(features, hidden.shape[1])
        gates = hidden.new_empty(2 * self.inner, hidden.shape[1])
        for index, layer in enumerate(self.layers):
            if index == self.traced:
                assert self.cache.states is not None
                self.cache.states.index_put_((attend.slots, columns), hidden[:, :count].t())
            query, key, value = self._project(layer, layer.before_attention(hidden), qkv, *angles[layer.facts.rotary])
            attend.store(index, key[:count], value[:count])
            if attend.reads_only and index + 1 == len(self.layers):
                break
            mixed = filled(attend(index, query[:count], layer.facts), multiple)
            add_output(hidden, layer.output, mixed, layer.after_attention)
            normed = layer.before_mlp(hidden)
            gate, up = gates[: self.inner], gates[self.inner :]
            layer.gate.into(gate, normed)
            layer.up.into(up, normed)
            gate = F.silu(gate, inplace=True) if layer.is_silu else layer.activation(gate)
            add_output(hidden, layer.down, gate.mul_(up), layer.after_mlp)
        return hidden

    def _project(
        self, layer: CpuLayer, x: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
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
