"""The training pass over packed tokens, for every family of `families.py`: its entry point and its plain backend.

Rows of a batch differ in length, and most of a layer's work (products, norms, activations) looks at one token at a
time. So padding is taken out before the first layer. The last layer finds keys and values of every token, but goes on
only with the tokens that are wanted: those before a sampled token for a policy, the last one for a reward model.

The weights are the model's own, so adapters and shared backbones work alike. `supported.py` picks one of two backends
by device and type: plain (torch with autograd; attention puts padding back, on the right, where causality hides it) and
fused (`fused_layer.py`, for half precision on a CUDA device). Neither has a second derivative; `hidden_states` in
`models/backbones.py` has.

Norms and rotary positions of the plain backend have backward passes written out: where memory bounds them, that halves
what autograd reads and writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tether.accel.cached_attention import out_of_window
from tether.accel.spec import DecoderSpec, Layer, Linear, Norm, Tables, read_layer
from tether.accel.supported import Backend
from tether.device_transfer import at
from tether.gathering import gatherer_of, with_weights
from tether.mask_cache import packed_rows, packing_of
from tether.ops.masks import Packing, Rows
from tether.types import Sequences

LayerPass = Callable[[Layer, Tensor, tuple[Tensor, Tensor], Packing, Rows | None], Tensor]
_captured: WeakSet[Any] = WeakSet()


def cuda_graphs() -> Any:
    """Room for the graphs of a backbone's fused pass."""
    from tether.accel.fused_pass.fused_pass import CudaGraphs

    made = CudaGraphs()
    _captured.add(made)
    return made


def release_cuda_graphs() -> None:
    """Let go of the graphs of every pass: their memory is wanted."""
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
    pass, and keeps nothing but its inputs until then. `captured` is where the fused backend may hold graphs of its
    pass. None where the fused backend does not know one of the layers.
    """
    if backend == "plain":
        return plain_states(backbone, batch, embeddings, wanted, recompute=recompute)
    spec = DecoderSpec.from_model(backbone)
    packing, rows, hidden, tables = _packed(spec, batch, embeddings, wanted, backend)
    from tether.accel.fused_pass import fused_layer, fused_pass

    if not spec.layers or not all(map(fused_layer.known, spec.layers)):
        return None
    tables = {name: (cos.contiguous(), sin.contiguous()) for name, (cos, sin) in tables.items()}
    shared = [block for block in backbone.layers if gatherer_of(block) is not None]

    def run_fused(hidden: Tensor) -> Tensor:
        inputs = fused_pass.PassInputs(hidden, tables, packing, rows)
        if not shared:
            return fused_pass.run(spec, inputs, recompute=recompute, captured=captured)
        # Gathered weights lie elsewhere in each pass, where no graph finds them.
        return fused_pass.run(DecoderSpec.from_model(backbone), inputs, recompute=recompute, captured=None)

    run: Callable[[Tensor], Tensor] = run_fused
    for block in shared:  # the pass is one node, which needs all of them at once
        run = functools.partial(with_weights, block, run)
    with at(hidden.device):
        states = run(hidden)
    return packing.unpack(states, None if rows is None else rows.tokens)


def plain_states(
    backbone: Any,
    batch: Sequences,
    embeddings: Tensor | None = None,
    wanted: Tensor | None = None,
    *,
    recompute: bool = False,
    layer_pass: LayerPass | None = None,
) -> Tensor:
    """As `packed_states`, by torch and autograd; `layer_pass` stands in place of this file's layer."""
    spec = DecoderSpec.from_model(backbone)
    packing, rows, hidden, tables = _packed(spec, batch, embeddings, wanted, "plain")
    states = _plain_layers(backbone, spec, hidden, tables, packing, rows, recompute, layer_pass or _layer)
    return packing.unpack(states, None if rows is None else rows.tokens)


def _packed(
    spec: DecoderSpec, batch: Sequences, embeddings: Tensor | None, wanted: Tensor | None, backend: Backend
) -> tuple[Packing, Rows | None, Tensor, Tables]:
    """The packing, the rows that are wanted, the first layer's inputs (N, H), and the rotary tables."""
    packing = packing_of(batch.attention_mask)
    rows = None if wanted is None else packed_rows(wanted, packing)
    if embeddings is not None:
        hidden = packing.pack(embeddings)
        hidden = hidden if spec.embedding.after_module == 1.0 else hidden * spec.embedding.after_module
    else:
        hidden = _embedded(spec, packing.pack(batch.tokens), backend)
    return packing, rows, hidden, spec.angles(packing.positions, hidden.dtype)


def _embedded(spec: DecoderSpec, tokens: Tensor, backend: Backend) -> Tensor:
    """(N, H) the embeddings of tokens (N,)."""
    if backend == "plain":
        return spec.embedding(tokens)
    from tether.accel.fused_pass.linear import embedded

    return embedded(spec.embedding, tokens)


def _plain_layers(
    backbone: Any,
    spec: DecoderSpec,
    hidden: Tensor,
    tables: dict[str | None, tuple[Tensor, Tensor]],
    packing: Packing,
    rows: Rows | None,
    recompute: bool,
    layer_pass: LayerPass,
) -> Tensor:
    """(n, H) states after the last norm; tables are cos and sin, (N, D) each."""
    run: Any = functools.partial(checkpoint, layer_pass, use_reentrant=False) if recompute else layer_pass
    angles = {name: (cos[:, None], sin[:, None]) for name, (cos, sin) in tables.items()}
    for index, (block, layer) in enumerate(zip(backbone.layers, spec.layers, strict=True)):
        given = angles[layer.rotary], packing, rows if index + 1 == len(spec.layers) else None
        if gatherer_of(block) is None:
            hidden = run(layer, hidden, *given)
        else:
            hidden = with_weights(block, functools.partial(_gathered_layer, run, backbone, index, given), hidden)
    if not spec.layers and rows is not None:
        hidden = hidden.index_select(0, rows.tokens)
    return norm(spec.final_norm, hidden)


def _gathered_layer(run: Any, backbone: Any, index: int, given: tuple[Any, ...], hidden: Tensor) -> Tensor:
    return run(read_layer(backbone, index), hidden, *given)


def _layer(layer: Layer, hidden: Tensor, angles: tuple[Tensor, Tensor], packing: Packing, rows: Rows | None) -> Tensor:
    """(N, H) after one block, or (n, H) of the tokens of `rows` alone; angles are (N, 1, D) each."""
    normed = norm(layer.before_attention, hidden)
    asking, going_on = (normed, hidden) if rows is None else (normed[rows.tokens], hidden[rows.tokens])
    query, key = _heads(layer, layer.query, layer.query_norm, asking), _heads(layer, layer.key, layer.key_norm, normed)
    value = _heads(layer, layer.value, None, normed)
    own = angles if rows is None else (angles[0][rows.tokens], angles[1][rows.tokens])
    mixed = attend(rotate(query, *own), rotate(key, *angles), value, packing, rows, layer)
    hidden = going_on + norm(layer.after_attention, layer.output(mixed))
    normed = norm(layer.before_mlp, hidden)
    return hidden + norm(layer.after_mlp, layer.down(layer.activation(layer.gate(normed)) * layer.up(normed)))


def _heads(layer: Layer, part: Linear, own: Norm | None, x: Tensor) -> Tensor:
    """(N, heads, D) of x (N, H), normed where the model does so."""
    return norm(own, part(x)).unflatten(-1, (-1, layer.head_dim))


def norm(own: Norm | None, x: Tensor) -> Tensor:
    """The RMS norm of each group of features of x (N, features) as wide as its weight; x where there is none."""
    if own is None:
        return x
    groups = x.reshape(-1, len(own.weight))
    return _apply(_RMSNorm, groups, own.weight, own.epsilon, own.offset).view(x.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x (N, heads, D): pairs (i, i + D/2) turned by the angles of cos and sin, (N, 1, D) each."""
    return _apply(_Rotate, x, cos, sin)


def attend(query: Tensor, key: Tensor, value: Tensor, packing: Packing, rows: Rows | None, layer: Layer) -> Tensor:
    """(n, heads * D) causal attention of the query tokens to their rows: of all N, or of the n that `rows` names."""
    if rows is not None:
        everywhere = query.new_zeros(len(packing.places), *query.shape[1:])
        query = everywhere.index_copy(0, rows.tokens, query)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    query, key, value = (packing.for_attention(x) for x in (query, key, value))  # (B, heads, L, D) each
    mixed = packing.from_attention(_causal(query, key, value, layer))
    return mixed if rows is None else mixed.index_select(0, rows.tokens)


def _causal(query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
    """(B, heads, L, D) softmax(capped scores) value, over the tokens of the window."""
    length = query.shape[2]
    windowed = layer.window is not None and layer.window < length
    if layer.score_cap is None and not windowed:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=layer.scaling)
    unseen = out_of_window(length, torch.arange(length, device=query.device), layer.window)  # (L, L)
    if layer.score_cap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=~unseen, scale=layer.scaling)
    scores = torch.tanh(query @ key.transpose(2, 3) * (layer.scaling / layer.score_cap)) * layer.score_cap
    return scores.masked_fill(unseen, -torch.inf).softmax(dim=-1) @ value


def _apply(function: Any, *arguments: Any) -> Tensor:
    return cast("Callable[..., Tensor]", function.apply)(*arguments)


class _RMSNorm(torch.autograd.Function):
    """y = f x / r with f = offset + w and r = sqrt(mean(x²) + ε), so with g = dL/dy and u = x / r:

    dL/dw = sum over tokens of g u,    dL/dx = (g f - u mean(g f u)) / r.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
        inverse = (x * x).mean(dim=-1, keepdim=True).add_(epsilon).rsqrt_()
        factor = weight if offset == 0.0 else weight + offset
        ctx.save_for_backward(x, factor, inverse)
        return (x * inverse).mul_(factor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, factor, inverse = ctx.saved_tensors
        unit = x * inverse
        product = grad * unit
        grad_weight = product.sum(dim=0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None, None
        mean = torch.mv(product, factor).div_(x.shape[-1]).unsqueeze(-1)
        return (grad * factor).sub_(unit.mul_(mean)).mul_(inverse), grad_weight, None, None


class _Rotate(torch.autograd.Function):
    """A rotation; its backward pass turns in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1.0), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    half = x.shape[-1] // 2
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-direction)
    turned[..., half:].addcmul_(x[..., :half], sin[..., half:], value=direction)
    return turned
