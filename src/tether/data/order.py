"""Hold out a part of the records, and order the rest for training.

`split_by_prompt` splits by prompt, so no prompt is on both sides. `DataOrder` gives the items of a step as a function
of one integer, the position in the data.
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

    The seed shuffles the prompts; prompts are held out in that order until their records reach `fraction`, rounded.
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
    for members in shuffled[:-1]:  # keep at least one prompt for training
        if len(drawn) >= wanted:
            break
        drawn.update(members)
    training = [example for index, example in enumerate(examples) if index not in drawn]
    return training, [example for index, example in enumerate(examples) if index in drawn]


def prompt_key(example: Row | Ranking) -> bytes:
    """A key that is equal for examples with the same prompt: the tokens before the first trained token.

    For a text without a prompt (nothing, or only BOS, comes before it) the key is all of its tokens.
    """
    row = example.rows[0] if isinstance(example, Ranking) else example
    trained = row.response_mask.nonzero()
    before = int(trained[0]) if len(trained) else len(row.tokens)
    return row.tokens[: before if before > 1 else None].numpy().tobytes()


Item = TypeVar("Item")


@dataclass(frozen=True)
class DataOrder(Generic[Item]):
    """Items in an order that is reshuffled every epoch; `take` is a function of the position alone."""

    items: Sequence[Item]
    seed: int

    def __post_init__(self) -> None:
        if not self.items:
            raise ValueError("there is nothing to train on: the data set is empty")

    def take(self, position: int, count: int) -> list[Item]:
        """The `count` items from `position` on, continuing into later epochs."""
        taken: list[Item] = []
        while len(taken) < count:
            epoch, start = divmod(position + len(taken), len(self.items))
            order = self._order(epoch)[start : start + count - len(taken)]
            taken += [self.items[index] for index in order]
        return taken

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        return torch.randperm(len(self.items), generator=generator).tolist()
