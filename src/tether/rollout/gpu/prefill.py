"""Reading prompts into slots: whole prompts through the model's own modules, padded on the right."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from tether.models.families import Norm
from tether.rollout.attention import causal_attention
from tether.rollout.gpu.layers import Trunk
from tether.rollout.gpu.reference import normed_heads, rms_norm, rotate
from tether.rollout.gpu.state import Cache, on_device

PREFILL_TOKENS = 16384  # read in one pass, padding counted, unless a single prompt is longer


def read_prompts(trunk: Trunk, cache: Cache, prompts: list[list[int]], slots: list[int]) -> None:
    """Put keys and values of `prompts[i]` into slot `slots[i]`, in passes of bounded size, like lengths together."""
    order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
    while order:
        fit = max(1, PREFILL_TOKENS // len(prompts[order[0]]))
        batch, order = order[:fit], order[fit:]
        _read(trunk, cache, [prompts[place] for place in batch], [slots[place] for place in batch])


def _read(trunk: Trunk, cache: Cache, prompts: list[list[int]], slots: list[int]) -> None:
    """One pass. It ends at the last layer's keys and values; no logits are made.

    What lies past a shorter prompt's end is overwritten before it is read, and causality hides it until then.
    """
    longest = max(map(len, prompts))
    padded = on_device([ids + [0] * (longest - len(ids)) for ids in prompts], trunk.device)
    places = on_device(slots, trunk.device)
    hidden = trunk.embed(padded)  # (prompts, longest, H)
    for index, layer in enumerate(trunk.layers):
        normed = norm_pass(hidden, layer.before_attention)
        cos, sin = (table[:longest, None] for table in trunk.angles[layer.facts.rotary])  # (longest, 1, D / 2)
        query, key, value = (
            part(normed).unflatten(-1, (-1, trunk.head_dim)) for part in (layer.query, layer.key, layer.value)
        )
        query, key = normed_heads(layer, query, key)
        query, key = rotate(query, cos, sin).transpose(1, 2), rotate(key, cos, sin).transpose(1, 2)
        value = value.transpose(1, 2)
        cache.keys[index, places, :, :longest] = key
        cache.values[index, places, :, :longest] = value
        if index + 1 == len(trunk.layers):
            return
        mixed = causal_attention(query, key, value, layer.facts)
        hidden = hidden + norm_pass(layer.output(mixed.transpose(1, 2).flatten(2)), layer.after_attention)
        normed = norm_pass(hidden, layer.before_mlp)
        inner = layer.activation(layer.gate(normed)) * layer.up(normed)
        hidden = hidden + norm_pass(layer.down(inner), layer.after_mlp)


def norm_pass(x: Tensor, norm: Norm | None) -> Tensor:
    """The norm of many tokens, or x where there is none; torch's own kernel where it has one for this."""
    if norm is None:
        return x
    plain = x.is_cuda and norm.offset == 0.0
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.epsilon) if plain else rms_norm(x, norm)
