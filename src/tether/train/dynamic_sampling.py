"""Dynamic sampling (DAPO, Yu et al. 2025): groups whose answers all have one score give their places to other prompts.

The candidates of a step are an order of all prompts that follows from the run's seed and the step's number, read from
its beginning in every step. The position in the data therefore remains the number of steps taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tether.data.examples import DataOrder
from tether.ops.advantages import has_spread, refilled
from tether.seeds import derive_seed
from tether.types import Prompt, Rollout, Score

Answers = tuple[Sequence[Rollout], Sequence[Score]]
"""The rollouts of some prompts, those of one prompt side by side, and their scores."""


@dataclass(frozen=True)
class AnswerGroup:
    """The answers to one prompt, with their scores."""

    rollouts: list[Rollout]
    scores: list[Score]
    spread: bool  # whether two usable scores differ


def groups_of(rollouts: Sequence[Rollout], scores: Sequence[Score]) -> list[AnswerGroup]:
    """One group for each prompt, in the order of the prompts."""
    members: dict[int, list[int]] = {}
    for place, rollout in enumerate(rollouts):
        members.setdefault(rollout.group_id, []).append(place)
    usable = [place for place, score in enumerate(scores) if score.usable]
    values = torch.tensor([scores[place].value for place in usable], dtype=torch.float32)
    numbers = torch.tensor([rollouts[place].group_id for place in usable])
    different = set(numbers[has_spread(values, numbers)].tolist()) if usable else set[int]()
    return [
        AnswerGroup([rollouts[place] for place in places], [scores[place] for place in places], number in different)
        for number, places in members.items()
    ]


def refill(
    first: Answers,
    sample: Callable[[Sequence[Prompt], int], Answers],
    *,
    prompts: DataOrder[Prompt],
    step: int,
    rounds: int,
) -> tuple[list[Rollout], list[Score], dict[str, float]]:
    """The step's answers once groups without spread were replaced, and metrics.

    Each of at most `rounds` rounds samples as many new prompts as groups lack spread. Where that is not enough, the
    groups of the first round stay, so that every step has the same number of answers. `sample` gives the answers to
    prompts in round 1, 2, ...
    """
    candidates = DataOrder(prompts.items, derive_seed(prompts.seed, "candidates", step))
    groups, drawn, taken = groups_of(*first), 0, 0
    flat = [group.spread for group in groups].count(False)
    metrics = {"dynamic_sampling/flat_groups_first": flat / len(groups)}
    metrics |= {"dynamic_sampling/score_first": score} if (score := _mean(first[1])) is not None else {}
    while flat and taken < rounds:
        taken += 1
        offered = groups_of(*sample(candidates.take(drawn, flat), taken))
        drawn += flat
        chosen = refilled([group.spread for group in groups], [group.spread for group in offered])
        for place, candidate in enumerate(chosen):
            if candidate is not None:
                groups[place] = offered[candidate]
        flat = [group.spread for group in groups].count(False)
    metrics |= {"dynamic_sampling/rounds": float(taken), "dynamic_sampling/prompts": float(len(groups) + drawn)}
    metrics["dynamic_sampling/flat_groups"] = flat / len(groups)
    rollouts = [
        dataclasses.replace(rollout, group_id=place) for place, group in enumerate(groups) for rollout in group.rollouts
    ]
    return rollouts, [score for group in groups for score in group.scores], metrics


def _mean(scores: Sequence[Score]) -> float | None:
    values = [score.value for score in scores if score.usable]
    return sum(values) / len(values) if values else None
