"""A batch in the parts that go through a model one after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from tether.learner.batching import micro_batches
from tether.models.roles import onto
from tether.types import Sequences


@dataclass(frozen=True)
class BatchPart:
    """A micro-batch, and where it stands in its batch."""

    micro: Any  # a Sequences, of whatever stage
    rows: Tensor  # (B,) its rows' places in the batch
    first: int  # the batch's column that is its first


class Parts:
    """Cuts batches into parts that fit in memory, trimmed of needless padding, and puts these on a device.

    Parts are made one by one, each while the device is at work on those before. Only for the first one of a batch would
    it stand idle, so that one can be made beforehand.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._begun: tuple[Sequences, int, Iterator[BatchPart]] | None = None

    def begin(self, batch: Sequences, max_tokens: int) -> None:
        """Make the first part of a batch that will be asked for."""
        self._begun = None
        parts = self._cut(batch, max_tokens)
        first = list(islice(parts, 1))
        self._begun = batch, max_tokens, chain(first, parts)

    def of(self, batch: Sequences, max_tokens: int) -> Iterator[BatchPart]:
        """The batch's parts of at most so many tokens."""
        if self._begun is None or self._begun[0] is not batch:
            return self._cut(batch, max_tokens)
        (_, cut_for, parts), self._begun = self._begun, None
        return parts if cut_for == max_tokens else self._cut(batch, max_tokens)

    def _cut(self, batch: Sequences, max_tokens: int) -> Iterator[BatchPart]:
        for rows in micro_batches(batch, max_tokens):
            selected = batch.select(rows)
            yield BatchPart(onto(selected.trimmed(), self.device), rows, selected.span()[0])
