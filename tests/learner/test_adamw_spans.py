"""The optimizer's step and masters of a part of a weight are those of the whole weight, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tether.learner import adamw
from tether.learner.adamw import drawn_master


@pytest.mark.parametrize("bucket", [7, 2**20])
def test_masters_of_a_part_are_those_of_the_whole(monkeypatch, bucket):
    monkeypatch.setattr(adamw, "BUCKET", bucket)
    weight = torch.randn(41, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = drawn_master(weight, 3)
    for first, last in ((0, 16), (16, 41), (5, 29)):
        assert torch.equal(drawn_master(weight[first:last], 3, (first, 41)), whole[first:last])
    assert not torch.equal(whole, weight.float())


def stepped(numbers: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    parameter = nn.Parameter(numbers.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1, fused=True)
    for factor in (1.0, 0.7, -0.3):
        parameter.grad = gradient * factor
        optimizer.step()
    return parameter.detach()


def test_whole_lines_of_numbers_step_as_in_the_whole_weight():
    """What `distributed/shares.py` relies on: only what does not fill a vector depends on where it stands."""
    draws = torch.Generator().manual_seed(0)
    numbers, gradient = torch.randn(1003, generator=draws), torch.randn(1003, generator=draws)
    whole = stepped(numbers, gradient)
    for first, last in ((0, 16), (16, 320), (992, 1003), (480, 1003)):
        assert torch.equal(stepped(numbers[first:last], gradient[first:last]), whole[first:last])
