"""Log-probabilities in tiles of tokens: the same number for the sampler that draws a token and the pass that trains it.

A tile is always (`ROWS`, V), so its product, sums and logarithms are the same calls on the same shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tether.accel.exact.products import ROWS, tiled
from tether.ops.logprobs import ChunkedLogprobs, ToLogits, rows_at_a_time
from tether.ops.sampling import Draw, draw_columns
from tether.protocols import Sampling


class LogitTile(NamedTuple):
    """What a tile's logits z say: z - max z, exp of it, and the sum of that with its logarithm."""

    centred: Tensor  # (ROWS, V)
    exponentials: Tensor  # (ROWS, V)
    top: Tensor  # (ROWS, 1)
    mass: Tensor  # (ROWS, 1)
    log_mass: Tensor  # (ROWS, 1)

    @classmethod
    def of(cls, logits: Tensor) -> LogitTile:
        """Of logits (ROWS, V), which are overwritten."""
        top = logits.amax(dim=1, keepdim=True)
        centred = logits.sub_(top)
        exponentials = centred.exp()
        mass = exponentials.sum(dim=1, keepdim=True)
        return cls(centred, exponentials, top, mass, mass.log())

    def logprobs(self, targets: Tensor) -> Tensor:
        """(ROWS,) of one token in each row."""
        return (self.centred.gather(1, targets[:, None]) - self.log_mass)[:, 0]


def filled(x: Tensor) -> Tensor:
    """x (N, ...) with zeros after its rows until they fill tiles."""
    missing = -len(x) % ROWS
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def products(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(N, V) the output layer's products."""
    found = tiled(states, weight)
    return found if bias is None else found.add_(bias)


class ExactLogprobs(ChunkedLogprobs):
    """As `ChunkedLogprobs`, whose backward pass it has, with a forward pass in tiles."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        to_logits: ToLogits,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        """`(logprobs, entropy)`, (N,) each; `rows` is what the backward pass takes at a time."""
        every, ids = filled(states.contiguous()), filled(targets)
        logprobs, entropy, normaliser = torch.empty(3, len(ids), dtype=states.dtype)
        frozen = not any(ctx.needs_input_grad[1:3]) and to_logits.softcap is None
        mean_rows = torch.empty_like(every) if frozen and ctx.needs_input_grad[0] else None
        for start in range(0, len(ids), ROWS):
            part = slice(start, start + ROWS)
            tile = LogitTile.of(to_logits(products(every[part], weight, bias)))
            logprobs[part] = tile.logprobs(ids[part])
            normaliser[part] = (tile.log_mass + tile.top)[:, 0]
            shares = tile.exponentials.div_(tile.mass)
            if mean_rows is not None:
                torch.mm(shares, weight, out=mean_rows[part])
            entropy[part] = tile.log_mass[:, 0] - shares.mul_(tile.centred).sum(dim=1)
        count = len(targets)
        mean_rows = None if mean_rows is None else mean_rows[:count]
        ctx.save_for_backward(states, weight, bias, targets, normaliser[:count], entropy[:count], mean_rows)
        ctx.to_logits, ctx.rows = to_logits, rows
        return logprobs[:count].clone(), entropy[:count].clone()


def exact_logprobs(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `ops.logprobs.chunked_logprobs`."""
    apply = cast("Callable[..., tuple[Tensor, Tensor]]", ExactLogprobs.apply)
    to_logits = ToLogits(temperature, scale, softcap)
    return apply(states, weight, bias, targets, to_logits, rows_at_a_time(weight, chunk_elements))


def draw_exactly(made: Tensor, uniforms: Tensor, sampling: Sampling, softcap: float | None) -> Draw:
    """One token for each row of `made`, the output layer's products (N, V), with the log-prob that training will find.

    The tokens are drawn as in `ops.sampling`. Where the distribution is truncated, `behavior` is that of the truncated
    one, which training never computes.
    """
    to_logits = ToLogits(sampling.temperature or 1.0, 1.0, softcap)
    whole = sampling.temperature == 0.0 or (sampling.top_k == 0 and sampling.top_p == 1.0)
    unscaled = sampling if sampling.temperature == 0.0 else dataclasses.replace(sampling, temperature=1.0)
    found: list[Draw] = []
    every, chances = filled(made), filled(uniforms)
    for start in range(0, len(every), ROWS):
        part = slice(start, start + ROWS)
        logits = to_logits(every[part])
        drawn = draw_columns(logits.t(), chances[part], unscaled)
        exact = LogitTile.of(logits).logprobs(drawn.tokens.clamp_min(0))
        found.append(Draw(drawn.tokens, exact if whole else drawn.behavior, exact))
    count = len(made)
    return Draw(*(torch.cat(column)[:count] for column in zip(*found, strict=True)))
