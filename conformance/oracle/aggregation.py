"""From per-token losses to one number: the size is known for the whole batch before any part of it is summed."""

import math

from conformance.oracle.grids import Grid, Mask, picked, sampled_columns
from conformance.oracle.masks import mean


def _batch_size(mask: Mask, mode: str, fixed_length: int | None) -> float:
    """What the summed loss of the whole batch is divided by: tokens, rows that have a token, or rows * fixed length."""
    if mode == "token":
        return sum(len(sampled_columns(row)) for row in mask)
    if mode == "sequence":
        return sum(1 for row in mask if any(row))
    if mode == "fixed":
        if fixed_length is None:
            raise ValueError("mode 'fixed' needs fixed_length")
        return len(mask) * fixed_length
    raise ValueError(f"mode must be token, sequence or fixed, not {mode!r}")


def _row_sum(loss_row: list[float], mask_row: list[bool], mode: str) -> float:
    """What one row adds to the sum: its tokens' losses, or their mean in mode "sequence"."""
    losses = [loss_row[t] for t in sampled_columns(mask_row)]
    if not losses:
        return 0.0
    return mean(losses) if mode == "sequence" else math.fsum(losses)


def aggregate(losses: Grid, mask: Mask, mode: str, fixed_length: int | None) -> dict[str, float]:
    """L = (sum of the rows' parts) / size."""
    parts = [_row_sum(loss_row, mask_row, mode) for loss_row, mask_row in zip(losses, mask, strict=True)]
    return {"loss": math.fsum(parts) / _batch_size(mask, mode, fixed_length)}


def aggregate_micro_batches(
    losses: Grid, mask: Mask, mode: str, fixed_length: int | None, micro_batches: list[list[int]]
) -> dict[str, float]:
    """L = sum over micro-batches of (sum of its rows' parts / size of the *whole* batch)."""
    size = _batch_size(mask, mode, fixed_length)
    accumulated = [math.fsum(_row_sum(losses[b], mask[b], mode) for b in rows) / size for rows in micro_batches]
    return {"loss": math.fsum(accumulated)}


def sft_loss(logprobs: Grid, mask: Mask) -> dict[str, float]:
    """L = -(sum over True of log pi) / number of True."""
    return {"loss": -mean(picked(logprobs, mask))}
