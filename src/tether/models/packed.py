"""A trunk's pass over packed tokens, for Llama and its relatives: Mistral, Qwen2 and Qwen3.

Rows of a batch differ in length, and most of a layer's work (products, norms, activations) looks at one token at a
time. So padding is taken out before the first layer. The last layer finds keys and values of every token, but goes on
only with the tokens that are wanted: those before a sampled token for a policy, the last one for a reward model.

The weights are the model's own modules', so adapters and tops work alike. What a layer is made of comes in two kinds,
chosen by device and type in `parts_for`: `layer_plain` (torch alone; padding is put back for attention, on the right,
where causality hides it) and `layer_fused` (Triton kernels and attention over rows laid end to end). Neither has a
second derivative; `hidden_states` in `forward.py` has.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tether.models import layer_plain
from tether.models.packing import Packing, Rows
from tether.ops.remember import remembered
from tether.types import Sequences

HALF = (torch.bfloat16, torch.float16)


@remembered
def _packing(mask: Tensor) -> Packing:
    return Packing.of(mask)


@remembered
def _rows(wanted: Tensor, packing: Packing) -> Rows:
    return packing.rows(wanted)


def parts_for(trunk: Any) -> Any:
    """What the trunk's layers are computed by; None where the pass is not made for its device and type."""
    device, dtype = trunk.device, trunk.dtype
    if dtype in (torch.float32, torch.float64):
        return layer_plain
    if device.type != "cuda" or dtype not in HALF or importlib.util.find_spec("triton") is None:
        return None
    width = trunk.layers[0].self_attn.head_dim if len(trunk.layers) else 8
    if width % 8 or width > 256 or torch.cuda.get_device_capability(device)[0] < 8:  # what flash attention is made for
        return None
    from tether.models import layer_fused

    return layer_fused


def packed_states(
    trunk: Any,
    batch: Sequences,
    embeddings: Tensor | None = None,
    wanted: Tensor | None = None,
    *,
    parts: Any = layer_plain,
    recompute: bool = False,
) -> Tensor:
    """(B, T, H) the trunk's hidden states after its last layer and norm; 0 on padding and on what is not wanted.

    `embeddings` (B, T, H), where given, stand in place of those of the batch's tokens. `wanted` (B, T) bool says whose
    states will be read; by default those of all real tokens. With `recompute` each layer is run again in the backward
    pass, and keeps nothing but its inputs until then.
    """
    packing = _packing(batch.attention_mask)
    rows = None if wanted is None else _rows(wanted, packing)
    hidden = packing.pack(embeddings) if embeddings is not None else trunk.embed_tokens(packing.pack(batch.tokens))
    cos, sin = trunk.rotary_emb(hidden, packing.positions[None])
    angles = cos[0, :, None], sin[0, :, None]  # (N, 1, D) each
    run: Any = functools.partial(checkpoint, _layer, use_reentrant=False) if recompute else _layer
    layers = list(trunk.layers)
    change: Tensor | None = None
    for index, layer in enumerate(layers):
        asked = rows if index + 1 == len(layers) else None
        hidden, change = run(parts, layer, hidden, change, angles, packing, asked)
    if change is not None:
        return packing.unpack(parts.add_norm(trunk.norm, hidden, change)[1], None if rows is None else rows.tokens)
    hidden = hidden if rows is None else parts.take(hidden, rows)
    return packing.unpack(parts.norm(trunk.norm, hidden), None if rows is None else rows.tokens)


def _layer(
    parts: Any,
    layer: Any,
    hidden: Tensor,
    change: Tensor | None,
    angles: tuple[Tensor, Tensor],
    packing: Packing,
    rows: Rows | None,
) -> tuple[Tensor, Tensor]:
    """One block of `hidden + change` (N, H), as `(hidden', change')`: of all tokens, or of those in `rows` alone.

    What a block adds is handed on apart, for whoever norms the sum to add it in the same pass.
    """
    attention = layer.self_attn
    if change is None:
        normed = parts.norm(layer.input_layernorm, hidden)
    else:
        hidden, normed = parts.add_norm(layer.input_layernorm, hidden, change)
    if rows is None:
        query, key, value = parts.linears((attention.q_proj, attention.k_proj, attention.v_proj), normed)
        own = angles
    else:
        (query,) = parts.linears((attention.q_proj,), parts.take(normed, rows))
        key, value = parts.linears((attention.k_proj, attention.v_proj), normed)
        own = angles[0].index_select(0, rows.tokens), angles[1].index_select(0, rows.tokens)
        hidden = parts.take(hidden, rows)
    width = attention.head_dim
    query = parts.rotate(_heads(parts, query, width, getattr(attention, "q_norm", None)), *own)
    key = parts.rotate(_heads(parts, key, width, getattr(attention, "k_norm", None)), *angles)
    mixed = parts.attend(query, key, value.unflatten(-1, (-1, width)), packing, rows, attention.scaling)
    (change,) = parts.linears((attention.o_proj,), mixed)
    hidden, normed = parts.add_norm(layer.post_attention_layernorm, hidden, change)
    return hidden, parts.gated(layer.mlp, normed)


def _heads(parts: Any, x: Tensor, width: int, norm: nn.Module | None) -> Tensor:
    """(N, heads, D), normed by head where the model does so."""
    x = x.unflatten(-1, (-1, width))
    return x if norm is None else parts.head_norm(norm, x)
