"""A decode step's parts in plain torch: what the fused kernels compute, on any device, and safe to capture.

`n` slots, 0 to n - 1, take one token each. Every function works on the first n rows of the buffers it is given. No
shape depends on what the buffers hold, so nothing is read back by the host.

The functions whose names end in `_pass` are for whole prompts, P of them padded to L tokens; these are never captured.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tether.accel.cached_attention import capped, out_of_window
from tether.accel.decode_gpu.slots import Cache, SlotState, StepWorkspace
from tether.accel.spec import DecoderSpec, Layer, Linear, Norm, Tables
from tether.ops.sampling import Draw, draw_columns
from tether.protocols import Sampling


def rms_norm(x: Tensor, norm: Norm | None) -> Tensor:
    """x · (offset + weight) / sqrt(mean x² + ε) over the last dimension, in float32 at least; x without a norm."""
    if norm is None:
        return x
    wide = x.float() if x.dtype.itemsize < 4 else x
    scale = (wide.square().mean(dim=-1, keepdim=True) + norm.epsilon).rsqrt()
    return (wide * scale * (norm.weight.to(wide.dtype) + norm.offset)).to(x.dtype)


def grouped_norm(x: Tensor, norm: Norm | None) -> Tensor:
    """The norm of each group of features of x (..., features) that is as wide as the norm's weight."""
    return x if norm is None else rms_norm(x.unflatten(-1, (-1, len(norm.weight))), norm).flatten(-2)


def embed(work: StepWorkspace, n: int, spec: DecoderSpec, state: SlotState, norm: Norm | None) -> None:
    """hidden = the embeddings of the slots' next inputs; normed = their norm."""
    work.hidden[:n].copy_(spec.embedding(state.tokens[:n]))
    work.normed[:n].copy_(rms_norm(work.hidden[:n], norm))


def add_norm(work: StepWorkspace, n: int, parts: Tensor, after: Norm | None, norm: Norm | None) -> None:
    """hidden += the sum of `parts` (P, n, H), normed first where `after` is a norm; normed = hidden's norm."""
    added = parts.sum(dim=0)
    if after is not None:
        added = rms_norm(added.to(work.hidden.dtype), after)
    work.hidden[:n].copy_(work.hidden[:n] + added)
    work.normed[:n].copy_(rms_norm(work.hidden[:n], norm))


def project(
    work: StepWorkspace,
    n: int,
    layer: Layer,
    spec: DecoderSpec,  # noqa: ARG001
    state: SlotState,
    cache: Cache,
    index: int,
) -> None:
    """Queries of the normed states, turned to their positions; keys and values go into the cache."""
    normed, columns = work.normed[:n], state.columns[:n]
    query, key = grouped_norm(layer.query(normed), layer.query_norm), grouped_norm(layer.key(normed), layer.key_norm)
    query, key, value = (x.unflatten(-1, (-1, layer.head_dim)) for x in (query, key, layer.value(normed)))
    cos, sin = (table[columns][:, None] for table in cache.angles[layer.rotary])  # (n, 1, D / 2)
    work.query[:n].copy_(rotate(query, cos, sin).flatten(1))
    slots = torch.arange(n, device=columns.device)
    cache.keys[index].transpose(1, 2).index_put_((slots, columns), rotate(key, cos, sin))
    cache.values[index].transpose(1, 2).index_put_((slots, columns), value)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x (..., D): pairs (i, i + D/2) turned by angles whose cos and sin are (..., D / 2).

    Some families (OLMo 2) keep their tables in float32: the product is rounded to the type of x, as theirs is.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def attend(
    work: StepWorkspace, n: int, layer: Layer, spec: DecoderSpec, state: SlotState, cache: Cache, index: int
) -> None:
    """mixed = attention of each slot's query to the columns of its own slot that it sees; of no meaning where idle."""
    keys, values = cache.keys[index, :n], cache.values[index, :n]  # (n, K, T, D)
    query = work.query[:n].view(n, spec.kv_heads, -1, spec.head_dim)  # heads that share a key head side by side
    unseen = out_of_window(keys.shape[2], state.columns[:n], layer.window)
    scores = (query @ keys.transpose(2, 3)).float() * layer.scaling
    scores = scores if layer.score_cap is None else capped(scores, layer.score_cap)
    weights = scores.masked_fill(unseen[:, None, None], -torch.inf).softmax(dim=-1)
    work.mixed[:n].copy_((weights.to(values.dtype) @ values).reshape(n, -1))


def gated(work: StepWorkspace, n: int, layer: Layer) -> None:
    """inner = act(gate · normed) * (up · normed)."""
    normed = work.normed[:n]
    work.inner[:n].copy_(layer.activation(layer.gate(normed)) * layer.up(normed))


def linear(work: StepWorkspace, n: int, module: Linear, x: Tensor) -> Tensor:  # noqa: ARG001
    """(P, n, H) whose sum over P is the module's output for x (rows, in)."""
    return module(x[:n]).unsqueeze(0)


def logits(work: StepWorkspace, n: int, spec: DecoderSpec) -> None:
    """Logits of the normed states."""
    assert spec.output is not None
    work.logits[:n].copy_(spec.output(work.normed[:n]))
    if spec.logit_cap is not None:
        capped(work.logits[:n], spec.logit_cap)


def draw(work: StepWorkspace, n: int, state: SlotState, sampling: Sampling) -> None:
    """One token for each slot, by the uniform that is due, and the slots' next state."""
    place = state.drawn[:n].clamp(max=state.uniforms.shape[1] - 1).unsqueeze(-1)
    uniforms = state.uniforms[:n].gather(1, place).squeeze(-1)
    advance(n, state, place, draw_columns(work.logits[:n].t(), uniforms, sampling))


def advance(n: int, state: SlotState, place: Tensor, drawn: Draw) -> None:
    """Note what live slots drew at `place` (n, 1), make it their next input, and end those that are through."""
    live = state.live[:n]
    columns = ((state.answers, drawn.tokens), (state.behavior, drawn.behavior), (state.untruncated, drawn.untruncated))
    for table, values in columns:
        old = table[:n].gather(1, place)
        table[:n].scatter_(1, place, torch.where(live[:, None], values.to(table.dtype)[:, None], old))
    tokens = drawn.tokens.clamp(min=0)
    state.tokens[:n].copy_(torch.where(live, tokens, state.tokens[:n]))
    state.drawn[:n] += live
    state.columns[:n] += live
    over = state.stops[tokens] | (drawn.tokens < 0) | (state.drawn[:n] >= state.limits[:n])
    state.live[:n] &= ~over


def copy_slots(cache: Cache, sources: Tensor, targets: Tensor, lengths: Tensor, longest: int) -> None:  # noqa: ARG001
    """Make the first `lengths[i]` columns of slot `targets[i]` those of `sources[i]`, in every layer.

    None is longer than `longest`. No source may also be a target. Columns past a length, up to `longest`, may be copied
    too: they are written anew before they are read.
    """
    for table in (cache.keys, cache.values) if longest else ():
        table[:, targets, :, :longest] = table[:, sources, :, :longest]


def angles_pass(tables: Tables, prompts: int, longest: int) -> Tables:  # noqa: ARG001
    """Positions 0 to longest - 1 of each prompt, (L, 1, D / 2) for all."""
    return {kind: (cos[:longest, None], sin[:longest, None]) for kind, (cos, sin) in tables.items()}


def add_norm_pass(
    hidden: Tensor, change: Tensor | None, after: Norm | None, norm: Norm | None
) -> tuple[Tensor, Tensor]:
    """`(hidden + change, its norm)`, (P, L, H) each; the change is normed first where `after` is a norm."""
    if change is not None:
        hidden = hidden + norm_pass(change, after)
    return hidden, norm_pass(hidden, norm)


def norm_pass(x: Tensor, norm: Norm | None) -> Tensor:
    """The norm of each group of features as wide as its weight, by torch's kernel where it has one; x without one."""
    if norm is None:
        return x
    groups = x.unflatten(-1, (-1, len(norm.weight)))
    plain = x.is_cuda and norm.offset == 0.0
    normed = F.rms_norm(groups, groups.shape[-1:], norm.weight, norm.epsilon) if plain else rms_norm(groups, norm)
    return normed.flatten(-2)


def linear_pass(part: Linear, x: Tensor) -> Tensor:
    """(P, L, out) of x (P, L, in)."""
    return part(x)


def heads_pass(part: Linear, norm: Norm | None, x: Tensor, width: int, angles: tuple[Tensor, Tensor]) -> Tensor:
    """(P, L, heads, width) queries or keys of x (P, L, H): normed where there is a norm, then turned."""
    return rotate(norm_pass(part(x), norm).unflatten(-1, (-1, width)), *angles)


def gated_pass(layer: Layer, x: Tensor) -> Tensor:
    """(P, L, I) act(gate · x) * (up · x)."""
    return layer.activation(layer.gate(x)) * layer.up(x)


def store_pass(cache: Cache, index: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Put a layer's keys and values (P, L, K, D) into the first L columns of `slots` (P,)."""
    for table, new in ((cache.keys, key), (cache.values, value)):
        table[index, slots, :, : new.shape[1]] = new.transpose(1, 2)
