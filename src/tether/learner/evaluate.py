"""What the roles say of a batch before the first update."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.learner.batching import micro_batches, minibatches
from tether.models.roles import Evaluation, Roles
from tether.types import EvaluatedBatch, TokenBatch, extend


def evaluate_tokens(
    batch: TokenBatch, roles: Roles, *, minibatch_size: int, micro_tokens: int, device: torch.device | str
) -> EvaluatedBatch:
    """Old and reference log-probs and values, in the very micro-batches that the first epoch will train on.

    The same rows in the same shapes go through the same kernels, so that on the first step old and new log-probs are
    equal to the bit and every ratio is exactly 1.
    """
    columns: dict[str, Tensor | None] = {}
    parts = [
        minibatch[rows]
        for minibatch in minibatches(batch, minibatch_size)
        for rows in micro_batches(batch.select(minibatch), micro_tokens)
    ]
    for places in parts:
        micro = batch.select(places)
        first, last = micro.span()
        evaluation = roles.evaluate(micro.trimmed().to(device), ahead=len(parts) == 1)
        for name in Evaluation.__dataclass_fields__:
            part: Tensor | None = getattr(evaluation, name)
            if part is None:
                columns[name] = None
                continue
            column = columns.get(name)
            if column is None:
                shape = batch.tokens.shape if part.dim() == 2 else (len(batch),)
                column = columns[name] = torch.zeros(shape, dtype=part.dtype)
            if part.dim() == 2:
                column[places, first:last] = part.cpu()
            else:
                column[places] = part.cpu()
    return extend(batch, EvaluatedBatch, **columns)
