"""Rollouts made from text, for tests of rewards that read text."""

import torch

from tether.types import Finish, Prompt, Rollout


def rollout_of(
    completion: str,
    answer: str | None = None,
    *,
    finish: Finish = "stop",
    id: str = "p",
    tokens: list[int] | None = None,
) -> Rollout:
    ids = torch.tensor(tokens or [1, 2])
    mask = torch.ones(len(ids), dtype=torch.bool)
    mask[0] = False
    zeros = torch.zeros(len(ids))
    return Rollout(Prompt.from_text(id, "question", answer), 0, 0, ids, mask, zeros, zeros, completion, finish)
