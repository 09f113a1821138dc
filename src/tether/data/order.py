"""Holding out a part of the records, and the order in which a run takes them.

Holding out a part of the training records: by prompt, so that no prompt is on both sides.

Where a run is in its data: one integer, from which everything else follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from tether.data.examples import Ranking, Row
from tether.errors import DataError
from tether.seeds import derive_seed

Example = TypeVar("Example", Row, Ranking)


def split_by_prompt(
    examples: Sequence[Example], fraction: float, seed: int, source: str
) -> tuple[list[Example], list[Example]]:
    """`(training, held out)`, both in the order of the file.

    Prompts are drawn in an order that follows from the seed until their records are `fraction` of all, rounded.
    """
    groups: dict[bytes, list[int]] = {}
    for index, example in enumerate(examples):
        groups.setdefault(prompt_key(example), []).append(index)
    if len(groups) < 2:
        raise DataError(
            f"data.held_out_fraction: {source} has {len(groups)} prompt, and one of two must be held out: name a file "
            "with data.held_out, or add prompts"
        )
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    wanted, drawn = max(1, round(fraction * len(examples))), set[int]()
    shuffled = [list(groups.values())[place] for place in order]
    for members in shuffled[:-1]:  # one prompt is always left to train on
        if len(drawn) >= wanted:
            break
        drawn.update(members)
    training = [example for index, example in enumerate(examples) if index not in drawn]
    return training, [example for index, example in enumerate(examples) if index in drawn]


def prompt_key(example: Row | Ranking) -> bytes:
    """What two examples with the same prompt have in common: the tokens before the first that is trained on.

    A text without a prompt (nothing, or a begin token, before it) is known by all of its tokens.
    """
    row = example.rows[0] if isinstance(example, Ranking) else example
    trained = row.response_mask.nonzero()
    before = int(trained[0]) if len(trained) else len(row.tokens)
    return row.tokens[: before if before > 1 else None].numpy().tobytes()


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
