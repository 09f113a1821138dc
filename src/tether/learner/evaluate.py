"""What the roles say of a batch before the first update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tether.device_transfer import brought
from tether.learner.batching import micro_batches, minibatches, within_memory
from tether.models.roles import Roles, TokenEvaluation, onto
from tether.types import EvaluatedBatch, Sequences, TokenBatch, extend

ShrinkMicroBatch = Callable[[Sequence[Sequences]], int]
"""Makes the micro-batches of the given batches smaller, and says how many tokens they may have now."""


def evaluate_tokens(
    batch: TokenBatch,
    roles: Roles,
    *,
    minibatch_size: int,
    micro_batch_tokens: int,
    device: torch.device | str,
    shrink_micro_batch: ShrinkMicroBatch | None = None,
    top_tokens: int = 0,
) -> EvaluatedBatch:
    """Old and reference log-probs and values, in the very micro-batches that the first epoch will train on.

    With `top_tokens`, also so many tokens that the policy held likeliest at each place.

    The same rows in the same shapes go through the same kernels, so that on the first step old and new log-probs are
    equal to the bit and every ratio is exactly 1.

    When memory runs out, `shrink_micro_batch` gives a smaller `micro_batch_tokens` and all is run again. Should
    memory run out later, in the update, its micro-batches are no longer those of this evaluation, and for that one
    iteration the first ratios are 1 only up to rounding.
    """
    steps = list(minibatches(batch, minibatch_size))

    def attempt() -> EvaluatedBatch:
        parts = [
            minibatch[rows]
            for minibatch in steps
            for rows in micro_batches(batch.select(minibatch), micro_batch_tokens)
        ]
        return _evaluate(batch, roles, parts, device, top_tokens)

    def make_room() -> None:
        nonlocal micro_batch_tokens
        assert shrink_micro_batch is not None
        micro_batch_tokens = shrink_micro_batch([batch.select(minibatch) for minibatch in steps])

    return attempt() if shrink_micro_batch is None else within_memory(attempt, make_room)


def _evaluate(
    batch: TokenBatch, roles: Roles, parts: Sequence[Tensor], device: torch.device | str, top_tokens: int
) -> EvaluatedBatch:
    """Each part's rows evaluated by themselves, and put together as columns of the batch once all are under way."""
    found: list[tuple[Tensor, slice, TokenEvaluation]] = []
    with roles.present():
        for places in parts:
            micro = batch.select(places)
            evaluation = roles.evaluate(onto(micro.trimmed(), device), ahead=len(parts) == 1, top_tokens=top_tokens)
            found.append((places, slice(*micro.span()), evaluation))
    columns = {
        name: _column(batch, [(places, span, getattr(evaluation, name)) for places, span, evaluation in found])
        for name in TokenEvaluation.__dataclass_fields__
    }
    return extend(batch, EvaluatedBatch, **columns)


def _column(batch: TokenBatch, found: Sequence[tuple[Tensor, slice, Tensor | None]]) -> Tensor | None:
    """(B, ...) or (B, T, ...) of what was found of each part's rows and columns; 0 elsewhere."""
    parts = brought([part for _, _, part in found if part is not None])  # every part has the column, or none
    if not parts:
        return None
    by_token = parts[0].dim() >= 2
    shape = (*batch.tokens.shape, *parts[0].shape[2:]) if by_token else (len(batch),)
    column = torch.zeros(shape, dtype=parts[0].dtype)
    for (places, span, _), part in zip(found, parts, strict=True):
        column[(places, span) if by_token else places] = part
    return column
