"""Reading prompts into slots: whole prompts through the model's own modules, padded on the right."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tether.rollout.gpu.layers import Trunk
from tether.rollout.gpu.reference import normed_heads, rms_norm, rotate
from tether.rollout.gpu.state import Cache

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
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in prompts])
    places = torch.tensor(slots)
    if trunk.device.type == "cuda":
        padded, places = padded.pin_memory(), places.pin_memory()
    padded, places = padded.to(trunk.device, non_blocking=True), places.to(trunk.device, non_blocking=True)
    cos, sin = trunk.cos[:longest, None], trunk.sin[:longest, None]  # (longest, 1, D / 2)
    hidden: Tensor = trunk.embedding(padded)  # (prompts, longest, H)
    for index, layer in enumerate(trunk.layers):
        normed = rms_norm_pass(hidden, layer.before_attention, layer.epsilon)
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
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=trunk.scaling, enable_gqa=True
        )  # fmt: skip
        hidden = hidden + layer.output(mixed.transpose(1, 2).flatten(2))
        normed = rms_norm_pass(hidden, layer.before_mlp, layer.epsilon)
        hidden = hidden + layer.down(layer.activation(layer.gate(normed)) * layer.up(normed))


def rms_norm_pass(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`rms_norm` for many tokens: torch's own kernel where there is one for the device."""
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon) if x.is_cuda else rms_norm(x, weight, epsilon)
