"""Intervals: against published and closed-form numbers, and by how often they really hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tether.evaluation.metrics import bootstrap_mean, jackknife, paired_difference, wilson

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)


def test_wilson_against_newcombe_1998():
    # Newcombe (1998), table I, method 3: 81/263, 15/148, 0/20, 1/29.
    for successes, trials, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        found = wilson(successes, trials)
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


@given(st.integers(1, 500), st.floats(0, 1), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_wilson_is_an_interval_of_a_proportion(trials: int, share: float, level: float):
    successes = round(2 * share * trials) / 2  # halves, for ties
    found = wilson(successes, trials, level=level)
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0 and found.high > found.low
    mirrored = wilson(trials - successes, trials, level=level)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - found.high, 1 - found.low))
    assert wilson(successes, trials, level=0.999).low <= found.low


@pytest.mark.parametrize(("successes", "trials", "level"), [(1, 0, 0.95), (3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0)])
def test_what_is_no_proportion_is_refused(successes: int, trials: int, level: float):
    with pytest.raises(ValueError):
        wilson(successes, trials, level=level)


@given(NUMBERS, st.integers(0, 2**40))
def test_the_bootstrap_repeats_itself_and_stays_within_the_values(values: list[float], seed: int):
    found = bootstrap_mean(values, seed=seed, resamples=50)
    assert found == bootstrap_mean(values, seed=seed, resamples=50)
    slack = 1e-9 * max(map(abs, values))
    assert min(values) - slack <= found.low <= found.high <= max(values) + slack
    assert found.value == pytest.approx(sum(values) / len(values), abs=1e-6) and found.count == len(values)


def test_intervals_hold_about_as_often_as_they_say():
    generator = torch.Generator().manual_seed(0)
    held = {"wilson": 0, "bootstrap": 0}
    for trial in range(400):
        coins = torch.rand(60, generator=generator) < 0.3
        found = wilson(int(coins.sum()), 60)
        held["wilson"] += found.low <= 0.3 <= found.high
        normal = torch.randn(60, generator=generator) + 2.0
        mean = bootstrap_mean(normal.tolist(), seed=trial, resamples=400)
        held["bootstrap"] += mean.low <= 2.0 <= mean.high
    assert 0.92 <= held["wilson"] / 400 <= 0.99
    assert 0.90 <= held["bootstrap"] / 400 <= 0.98


def test_a_bootstrap_is_as_wide_as_the_standard_error_says():
    values = torch.randn(500, generator=torch.Generator().manual_seed(1)).tolist()
    found = bootstrap_mean(values, seed=0)
    error = float(torch.tensor(values).std()) / math.sqrt(500)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.08)


def test_pairs_cancel_what_they_share():
    hard = torch.randn(100, generator=torch.Generator().manual_seed(2)).tolist()
    better = [value + 0.1 for value in hard]
    found = paired_difference(better, hard, seed=0)
    assert found.low == pytest.approx(0.1) and found.high == pytest.approx(0.1)
    apart = bootstrap_mean(better, seed=0)
    assert apart.high - apart.low > 0.3  # alone, the difference would be lost in the spread of the prompts
    with pytest.raises(ValueError, match="paired"):
        paired_difference([1.0], [], seed=0)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20))
def test_the_jackknife_of_a_mean_is_its_standard_error(values: list[float]):
    count, total = len(values), sum(values)
    found = jackknife(total / count, [(total - value) / (count - 1) for value in values])
    error = float(torch.tensor(values, dtype=torch.float64).std()) / math.sqrt(count)
    assert found.high - found.value == pytest.approx(1.959964 * error, rel=1e-6, abs=1e-6)
    assert found.value - found.low == pytest.approx(1.959964 * error, rel=1e-6, abs=1e-6)


def test_a_jackknife_of_little():
    assert jackknife(0.5, [0.5]).low == 0.5
    bounded = jackknife(0.9, [0.5, 1.0], bounds=(0.0, 1.0))
    assert bounded.high == 1.0 and bounded.low >= 0.0


def test_no_values_have_no_mean():
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap_mean([], seed=0)
