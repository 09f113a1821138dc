"""Learning-rate factors, by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.learner.learner import lr_factor


@pytest.mark.parametrize(
    ("schedule", "progress", "warmup", "factor"),
    [
        ("constant", 0.0, 0.0, 1.0),
        ("constant", 0.05, 0.2, 0.25),  # a quarter of the way up
        ("constant", 0.2, 0.2, 1.0),
        ("constant", 0.9, 0.2, 1.0),
        ("linear", 0.0, 0.0, 1.0),
        ("linear", 0.25, 0.0, 0.75),
        ("linear", 0.1, 0.2, 0.5),
        ("linear", 0.2, 0.2, 1.0),
        ("linear", 0.6, 0.2, 0.5),  # (0.6 - 0.2) / 0.8 is half way through what follows the warm-up
        ("linear", 1.0, 0.2, 0.0),
        ("cosine", 0.0, 0.0, 1.0),
        ("cosine", 1 / 3, 0.0, 0.75),  # (1 + cos 60 degrees) / 2
        ("cosine", 0.6, 0.2, 0.5),  # (1 + cos 90 degrees) / 2
        ("cosine", 0.4, 0.2, (1 + math.sqrt(0.5)) / 2),  # a quarter: 45 degrees
        ("cosine", 1.0, 0.2, 0.0),
        ("linear", 0.5, 1.0, 0.5),  # nothing but warm-up
        ("linear", 1.0, 1.0, 1.0),
        ("cosine", 1.0, 1.0, 1.0),
    ],
)
def test_golden(schedule, progress, warmup, factor):
    assert lr_factor(schedule, progress, warmup) == pytest.approx(factor, abs=1e-15)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.floats(0, 1), st.floats(0, 1))
def test_a_factor_is_between_0_and_1(schedule, progress, warmup):
    assert 0.0 <= lr_factor(schedule, progress, warmup) <= 1.0


@given(st.sampled_from(["constant", "linear", "cosine"]), st.floats(0, 0.9), st.lists(st.floats(0, 1), min_size=2))
def test_it_rises_through_the_warm_up_and_never_after(schedule, warmup, points):
    before = [lr_factor(schedule, p, warmup) for p in sorted(points) if p <= warmup]
    after = [lr_factor(schedule, p, warmup) for p in sorted(points) if p >= warmup]
    assert before == sorted(before)
    assert after == sorted(after, reverse=True)
