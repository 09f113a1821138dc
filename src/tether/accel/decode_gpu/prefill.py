"""Reading prompts into slots: whole prompts through the layers, padded on the right.

`kernels` is `fused.py` or `reference.py`, as for a decode step.
"""

from __future__ import annotations

from typing import Any

from tether.accel.decode_cpu.cached_attention import causal_attention
from tether.accel.decode_gpu.slot_state import Cache, on_device
from tether.accel.decode_gpu.step_layers import StepBackbone

PREFILL_TOKENS = 16384  # read in one pass, padding counted, unless a single prompt is longer


def read_prompts(
    kernels: Any, backbone: StepBackbone, cache: Cache, prompts: list[list[int]], slots: list[int]
) -> None:
    """Put keys and values of `prompts[i]` into slot `slots[i]`, in passes of bounded size, like lengths together."""
    order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
    while order:
        fit = max(1, PREFILL_TOKENS // len(prompts[order[0]]))
        batch, order = order[:fit], order[fit:]
        _read(kernels, backbone, cache, [prompts[place] for place in batch], [slots[place] for place in batch])


def _read(kernels: Any, backbone: StepBackbone, cache: Cache, prompts: list[list[int]], slots: list[int]) -> None:
    """One pass. It ends at the last layer's keys and values; no logits are made.

    What lies past a shorter prompt's end is overwritten before it is read, and causality hides it until then. What a
    part adds to the hidden states is handed on apart, for the norm that comes next to add it as it reads them.
    """
    longest, width = max(map(len, prompts)), backbone.head_dim
    padded = on_device([ids + [0] * (longest - len(ids)) for ids in prompts], backbone.device)
    places = on_device(slots, backbone.device)
    tables = kernels.angles_pass(backbone, len(prompts), longest)
    hidden, change, after = backbone.embed(padded), None, None  # (prompts, longest, H)
    for index, layer in enumerate(backbone.layers):
        angles, (query_norm, key_norm) = tables[layer.facts.rotary], layer.head_norms or (None, None)
        hidden, normed = kernels.add_norm_pass(hidden, change, after, layer.before_attention)
        key = kernels.heads_pass(layer.key, key_norm, normed, width, angles)  # (prompts, longest, K, D)
        value = kernels.linear_pass(layer.value, normed).unflatten(-1, (-1, width))
        kernels.store_pass(cache, index, places, key, value)
        if index + 1 == len(backbone.layers):
            return
        query = kernels.heads_pass(layer.query, query_norm, normed, width, angles)
        mixed = causal_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), layer.facts)
        change = kernels.linear_pass(layer.output, mixed.transpose(1, 2).flatten(2))
        hidden, normed = kernels.add_norm_pass(hidden, change, layer.after_attention, layer.before_mlp)
        change, after = kernels.linear_pass(layer.down, kernels.gated_pass(layer, normed)), layer.after_mlp
