"""Groups of answers to one prompt: which of them teach something, and which take the place of those that do not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def has_spread(scores: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) bool: whether two scores of the row's group differ. `scores` and `group_ids` are (B,).

    A group whose answers all have one score has advantages of 0 relative to it: it adds nothing to the gradient (DAPO,
    Yu et al. 2025).
    """
    same = group_ids[:, None] == group_ids[None, :]  # (B, B)
    highest = torch.where(same, scores[None, :], -torch.inf).amax(dim=1)
    lowest = torch.where(same, scores[None, :], torch.inf).amin(dim=1)
    return highest > lowest


def refilled(places: Sequence[bool], candidates: Sequence[bool]) -> list[int | None]:
    """For each place the candidate that takes it, None where it keeps its group; both say whether a group has spread.

    The first place without spread gets the first candidate with it, and so on. What is left of either changes nothing.
    """
    found = iter([index for index, spread in enumerate(candidates) if spread])
    return [None if spread else next(found, None) for spread in places]
