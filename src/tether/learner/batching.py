"""Splitting a batch: minibatches are optimiser steps, micro-batches are what fits in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tether.types import Sequences


def minibatches(batch: Sequences, size: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
    """Row sets of `size` units each (the last may be smaller), in order, or shuffled by `generator`.

    The first epoch is read in order, which is also how the old log-probs were evaluated: the same rows in the same
    micro-batches give the same bits, so that on the first step every ratio is exactly 1.
    """
    units = batch.row_groups()
    order = torch.arange(len(units)) if generator is None else torch.randperm(len(units), generator=generator)
    for start in range(0, len(units), size):
        yield torch.tensor([row for index in order[start : start + size].tolist() for row in units[index]])


def micro_batches(batch: Sequences, max_tokens: int) -> Iterator[Tensor]:
    """Row sets whose padded size (rows x longest) stays within `max_tokens`; units are never split.

    Units of like length are put together to waste little on padding. A unit that is larger than `max_tokens` by
    itself still goes, alone: the budget bounds memory, it does not drop data.
    """
    real = batch.attention_mask.cpu()
    lengths = real.sum(dim=1).tolist()
    firsts = real.int().argmax(dim=1).tolist()
    lasts = (real.shape[1] - real.flip(1).int().argmax(dim=1)).tolist()
    units = batch.row_groups()
    longest = [max(lengths[row] for row in unit) for unit in units]
    current: list[int] = []
    first, last = 0, 0
    for index in sorted(range(len(units)), key=lambda index: -longest[index]):
        unit = units[index]
        low, high = min(firsts[row] for row in unit), max(lasts[row] for row in unit)
        if current and (len(current) + len(unit)) * (max(last, high) - min(first, low)) > max_tokens:
            yield torch.tensor(current)
            current = []
        first, last = (min(first, low), max(last, high)) if current else (low, high)
        current += unit
    if current:
        yield torch.tensor(current)
