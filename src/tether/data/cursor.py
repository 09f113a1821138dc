"""Where a run is in its data: one integer, from which everything else follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from tether.seeds import derive_seed

Item = TypeVar("Item")


@dataclass(frozen=True)
class DataOrder(Generic[Item]):
    """Items in an order that is shuffled anew each epoch; `take` is a function of the position alone."""

    items: Sequence[Item]
    seed: int

    def __post_init__(self) -> None:
        if not self.items:
            raise ValueError("there is nothing to train on: the data set is empty")

    def take(self, position: int, count: int) -> list[Item]:
        """The `count` items from `position` on, running over into the next epochs."""
        taken: list[Item] = []
        while len(taken) < count:
            epoch, start = divmod(position + len(taken), len(self.items))
            order = self._order(epoch)[start : start + count - len(taken)]
            taken += [self.items[index] for index in order]
        return taken

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        return torch.randperm(len(self.items), generator=generator).tolist()
