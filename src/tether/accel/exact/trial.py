"""A trial of the exact pass on the shapes of a model: no number may depend on where a token stands.

Which order of sums the processor's library takes for a shape is not documented. So before a run relies on it, every
product of the model, its attention and its activations are computed twice with the tokens in other places.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tether.accel.exact.exact_logprobs import LogitTile
from tether.accel.exact.key_blocks import KEYS, Columns, read_row, read_slots
from tether.accel.exact.products import ROWS, activated, tiled
from tether.accel.spec import DecoderSpec, Layer

TURNS = (1, ROWS // 2 + 1)  # by how many places a tile's tokens are moved


@torch.no_grad()
def misplaced(model: Any) -> str | None:
    """What gives a token another number in another place; None where nothing does."""
    spec = DecoderSpec.from_model(model).detached()
    random = torch.Generator().manual_seed(0)
    seen: set[torch.Size] = set()
    for weight in _weights(spec):
        if weight.shape not in seen and not _place_is_free(weight, random):
            out, width = weight.shape
            return f"products with its weights of {out} x {width} depend on a token's place on this machine"
        seen.add(weight.shape)
    for layer in {(each.head_dim, each.window, each.score_cap): each for each in spec.layers}.values():
        if not _attention_agrees(layer, spec, random):
            return "attention gives one token of a prompt and the same token alone other numbers on this machine"
    return None


def _weights(spec: DecoderSpec) -> list[Tensor]:
    parts = [part for layer in spec.layers for part in layer.linears] + ([] if spec.output is None else [spec.output])
    return [tensor for part in parts for tensor in part.tensors() if tensor.dim() == 2]


def _place_is_free(weight: Tensor, random: torch.Generator) -> bool:
    """Whether a tile's products, their log-softmax and their activation stay the same where its tokens are moved."""
    x = torch.randn(ROWS, weight.shape[1], generator=random)
    found = tiled(x, weight)
    sums = LogitTile.of(found.clone()).mass
    for turn in TURNS:
        moved = tiled(torch.cat((x.flip(0), x.roll(turn, 0), x[: turn + 1])), weight)
        beside, again, last = moved[:ROWS], moved[ROWS : 2 * ROWS], moved[2 * ROWS :]
        if not (torch.equal(beside.flip(0), found) and torch.equal(last, found[: turn + 1])):
            return False
        if not (torch.equal(again, found.roll(turn, 0)) and torch.equal(LogitTile.of(again).mass, sums.roll(turn, 0))):
            return False
    return True


def _attention_agrees(layer: Layer, spec: DecoderSpec, random: torch.Generator) -> bool:
    """Whether tokens in a row get what each gets alone in a slot, over more than one block of keys."""
    length = KEYS + 3
    query = torch.randn(length, spec.heads, layer.head_dim, generator=random)
    keys, values = torch.randn(2, spec.kv_heads, 2 * KEYS, layer.head_dim, generator=random)
    columns = [0, KEYS // 2, KEYS - 1, KEYS, length - 1]
    together = read_row(query, keys, values, list(range(length)), layer)[columns]
    slots = [x.expand(len(columns), *x.shape) for x in (keys, values)]
    places = Columns(torch.tensor(columns).repeat_interleave(spec.kv_heads))
    alone = read_slots(query[columns], slots[0], slots[1], places, layer)
    gate = torch.randn(length, spec.inner, generator=random)
    acted = torch.cat([activated(layer, gate[place : place + 1]) for place in range(length)])
    return torch.equal(together, alone) and torch.equal(activated(layer, gate), acted)
