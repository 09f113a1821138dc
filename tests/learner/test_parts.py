"""Parts that are made beforehand are those that would have been made when asked for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tether.learner.batching import BatchPart, Parts
from tether.types import Sequences

LENGTHS = [3, 9, 5, 12, 7, 4]


def batch() -> Sequences:
    mask = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
    return Sequences(tokens=torch.arange(72).view(6, 12), attention_mask=mask, response_mask=mask)


def seen(parts: list[BatchPart]) -> list[tuple[list[int], list[list[int]], int]]:
    return [(part.rows.tolist(), part.micro.tokens.tolist(), part.first) for part in parts]


@pytest.mark.parametrize("budget", [1, 12, 24, 1000])
def test_a_batch_that_was_begun_comes_in_the_same_parts(budget: int):
    ours, asked = batch(), Parts(torch.device("cpu"))
    plain = seen(list(asked.of(ours, budget)))
    asked.begin(ours, budget)
    assert seen(list(asked.of(ours, budget))) == plain
    assert seen(list(asked.of(ours, budget))) == plain  # and again, when nothing was begun


def test_what_was_begun_is_cut_anew_where_the_parts_must_be_smaller_now():
    ours, asked = batch(), Parts(torch.device("cpu"))
    asked.begin(ours, 1000)
    assert seen(list(asked.of(ours, 24))) == seen(list(Parts(asked.device).of(ours, 24)))


def test_another_batch_that_comes_between_leaves_what_was_begun_alone():
    ours, other, asked = batch(), batch(), Parts(torch.device("cpu"))
    other = dataclasses.replace(other, tokens=other.tokens + 100)
    asked.begin(ours, 24)
    assert seen(list(asked.of(other, 24))) == seen(list(Parts(asked.device).of(other, 24)))
    assert seen(list(asked.of(ours, 24))) == seen(list(Parts(asked.device).of(ours, 24)))
