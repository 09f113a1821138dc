"""Clipping by a number that is known: against torch's own, and against what is left alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tether.learner.gradients import clip
from tether.learner.norms import read_norms, total_norm


@given(limit=st.floats(0.01, 100.0), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_it_clips_as_torch_does(limit: float, scale: float, seed: int):
    draws = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(size, generator=draws, dtype=torch.float64) * scale for size in (3, 7, 1)]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_(parameters, limit)
    size = read_norms({"all": total_norm(gradients, "cpu")})["all"]
    clip(gradients, size, limit)
    assert size == pytest.approx(float(norm), rel=1e-12)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=0.0)


def test_by_hand_three_and_four_become_three_fifths_and_four_fifths():
    gradients = [torch.tensor([3.0]), torch.tensor([4.0])]
    clip(gradients, 5.0, 1.0)
    torch.testing.assert_close(torch.cat(gradients), torch.tensor([0.6, 0.8]))


def test_what_is_short_enough_keeps_its_bits_in_any_type():
    gradients = [torch.randn(50).bfloat16(), torch.randn(50)]
    before = [gradient.clone() for gradient in gradients]
    clip(gradients, float(total_norm(gradients, "cpu")), 1e4)
    assert all(torch.equal(gradient, kept) for gradient, kept in zip(gradients, before, strict=True))
    clip(gradients, float(total_norm(gradients, "cpu")), 0.5)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32]
    assert float(total_norm(gradients, "cpu")) == pytest.approx(0.5, rel=1e-2)
