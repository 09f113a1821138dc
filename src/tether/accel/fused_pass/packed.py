"""A backbone's pass over packed tokens, for Llama and its relatives: Mistral, Qwen2 and Qwen3.

Rows of a batch differ in length, and most of a layer's work (products, norms, activations) looks at one token at a
time. So padding is taken out before the first layer. The last layer finds keys and values of every token, but goes on
only with the tokens that are wanted: those before a sampled token for a policy, the last one for a reward model.

The weights are the model's own modules', so adapters and tops work alike. There are two ways, chosen by device and type
in `backend_for`: plain (torch alone; attention puts padding back, on the right, where causality hides it) and fused
(`fused_layer.py`, for half precision on a CUDA device). Neither has a second derivative; `hidden_states` in
`forward.py` has.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tether.accel.fused_pass import plain_ops as plain
from tether.device_transfer import at
from tether.mask_cache import packed_rows, packing_of
from tether.ops.masks import Packing, Rows
from tether.types import Sequences

HALF = (torch.bfloat16, torch.float16)
# tokens x twice a layer's large weights, up to which a fused pass is captured: the host may be slower than the device
MAX_WORK = 8 * 10**11


Backend = Literal["plain", "fused"]


def backend_for(backbone: Any) -> Backend | None:
    """How the backbone's layers are computed on its device and in its dtype; None where they are not supported."""
    device, dtype = backbone.device, backbone.dtype
    if dtype in (torch.float32, torch.float64):
        return "plain"
    if device.type != "cuda" or dtype not in HALF or importlib.util.find_spec("triton") is None:
        return None
    width = backbone.layers[0].self_attn.head_dim if len(backbone.layers) else 8
    # what flash attention is made for
    return "fused" if width % 8 == 0 and width <= 256 and torch.cuda.get_device_capability(device)[0] >= 8 else None


_captured: WeakSet[Any] = WeakSet()


def cuda_graphs() -> Any:
    """Room for the graphs of a backbone's fused pass."""
    from tether.accel.fused_pass.cuda_graph import CudaGraphs

    made = CudaGraphs()
    _captured.add(made)
    return made


def release_cuda_graphs() -> None:
    """Let go of all graphs of passes, whoever's they are: their memory is wanted."""
    for each in _captured:
        each.release()


def packed_states(
    backbone: Any,
    batch: Sequences,
    embeddings: Tensor | None = None,
    wanted: Tensor | None = None,
    *,
    backend: Backend = "plain",
    recompute: bool = False,
    captured: Any = None,
) -> Tensor | None:
    """(B, T, H) the backbone's hidden states after its last layer and norm; 0 on padding and on what is not wanted.

    `embeddings` (B, T, H), where given, stand in place of those of the batch's tokens. `wanted` (B, T) bool says whose
    states will be read; by default those of all real tokens. With `recompute` each layer is run again in the backward
    pass, and keeps nothing but its inputs until then. `captured` is where the fused way may hold graphs of its pass.
    None where the fused way does not know one of the layers.
    """
    packing = packing_of(batch.attention_mask)
    rows = None if wanted is None else packed_rows(wanted, packing)
    hidden = (
        packing.pack(embeddings) if embeddings is not None else _embedded(backbone, packing.pack(batch.tokens), backend)
    )
    cos, sin = backbone.rotary_emb(hidden, packing.positions[None])
    if backend == "plain":
        states = _plain_layers(backbone, hidden, (cos[0, :, None], sin[0, :, None]), packing, rows, recompute)
        return packing.unpack(states, None if rows is None else rows.tokens)
    from tether.accel.fused_pass import fused_pass

    layers = fused_pass.Layers.of(backbone)
    if layers is None:
        return None
    inputs = fused_pass.PassInputs(hidden, cos[0].contiguous(), sin[0].contiguous(), packing, rows)
    with at(hidden.device):
        states = fused_pass.run(layers, inputs, recompute=recompute, captured=captured)
    return packing.unpack(states, None if rows is None else rows.tokens)


def _embedded(backbone: Any, tokens: Tensor, backend: Backend) -> Tensor:
    """(N, H) the embeddings of tokens (N,)."""
    if backend == "plain":
        return backbone.embed_tokens(tokens)
    from tether.accel.fused_pass.embedding import embedded

    return embedded(backbone.embed_tokens, tokens)


def _plain_layers(
    backbone: Any, hidden: Tensor, angles: tuple[Tensor, Tensor], packing: Packing, rows: Rows | None, recompute: bool
) -> Tensor:
    """(n, H) states after the last norm, by the plain parts; angles are (N, 1, D) each."""
    run: Any = functools.partial(checkpoint, _layer, use_reentrant=False) if recompute else _layer
    layers = list(backbone.layers)
    for index, layer in enumerate(layers):
        hidden = run(layer, hidden, angles, packing, rows if index + 1 == len(layers) else None)
    if not layers and rows is not None:
        hidden = hidden.index_select(0, rows.tokens)
    return plain.norm(backbone.norm, hidden)


def _layer(layer: Any, hidden: Tensor, angles: tuple[Tensor, Tensor], packing: Packing, rows: Rows | None) -> Tensor:
    """(N, H) after one block, or (n, H) of the tokens of `rows` alone."""
    attention, mlp = layer.self_attn, layer.mlp
    normed = plain.norm(layer.input_layernorm, hidden)
    asking, going_on = (normed, hidden) if rows is None else (normed[rows.tokens], hidden[rows.tokens])
    query = _heads(attention.q_proj(asking), attention.head_dim, getattr(attention, "q_norm", None))
    key = _heads(attention.k_proj(normed), attention.head_dim, getattr(attention, "k_norm", None))
    value = attention.v_proj(normed).unflatten(-1, (-1, attention.head_dim))
    own = angles if rows is None else (angles[0][rows.tokens], angles[1][rows.tokens])
    query, key = plain.rotate(query, *own), plain.rotate(key, *angles)
    hidden = going_on + attention.o_proj(plain.attend(query, key, value, packing, rows, attention.scaling))
    normed = plain.norm(layer.post_attention_layernorm, hidden)
    return hidden + mlp.down_proj(mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed))


def _heads(x: Tensor, width: int, norm: nn.Module | None) -> Tensor:
    """(N, heads, D), normed by head where the model does so."""
    x = x.unflatten(-1, (-1, width))
    return x if norm is None else norm(x)
