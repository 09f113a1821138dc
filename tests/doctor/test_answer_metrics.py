"""Metrics of one step's answers, worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import answered

from tether.doctor.answer_metrics import flat_groups, measured, repetition, step_measures, top_answer_share, top_share
from tether.doctor.findings import Curve


def test_an_answer_that_loops_repeats_all_but_its_first_gram():
    assert repetition([5] * 10) == pytest.approx(6 / 7)  # seven 4-grams, all the same
    assert repetition(list(range(10))) == 0.0
    assert repetition([1, 2, 1, 2, 1, 2]) == pytest.approx(1 / 3)  # 1212 2121 1212
    assert repetition([1, 2]) == 0.0


def test_the_top_answer_is_counted_over_prompts_not_over_samples():
    assert top_answer_share(["a", "a", "b", "c"], ["Yes", "yes ", "yes", "no"]) == pytest.approx(2 / 3)
    assert np.isnan(top_answer_share(["a", "a"], ["x", "x"]))


def test_the_top_share_is_that_of_a_twentieth_of_the_answers():
    assert top_share([10.0] + [1.0] * 10) == pytest.approx(0.5)  # one of eleven
    assert top_share([3.0, 3.0] + [1.0] * 38) == pytest.approx(6 / 44)  # two of forty
    assert np.isnan(top_share([0.0, 0.0]))


def test_groups_are_flat_where_no_sample_stands_out():
    assert flat_groups([0, 0, 1, 1, 2], np.array([1.0, 1.0, 0.0, 1.0, 5.0])) == 0.5  # a group of one is none


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=60))
def test_a_share_is_between_an_equal_one_and_all(mass: list[float]):
    share = top_share(mass)
    assert np.isnan(share) or max(1, round(0.05 * len(mass))) / len(mass) - 1e-9 <= share <= 1.0 + 1e-9


@given(st.lists(st.integers(0, 3), max_size=40))
def test_repetition_is_a_part(tokens: list[int]):
    assert 0.0 <= repetition(tokens) < 1.0


def test_the_measures_of_a_step():
    rollouts = [
        answered([row] * 20, row=row, prompt=f"p{row % 8}", text="same", score=float(row), advantage=[1.0] * 20)
        for row in range(16)
    ]
    seen = step_measures(rollouts)
    assert seen["prompts/distinct"] == 8
    assert seen["prompts/asked"] == 16
    assert seen["answers/top_share"] == 1.0
    assert seen["answers/repetition"] == pytest.approx(16 / 17)
    assert seen["advantage_top_share"] == pytest.approx(1 / 16)
    assert "length_score_correlation" not in seen  # all of one length
    assert step_measures([]) == {}


def test_length_and_score_are_correlated_over_the_answers():
    rollouts = [answered([1] * (4 + row), row=row, score=2.0 * row) for row in range(16)]
    assert step_measures(rollouts)["length_score_correlation"] == pytest.approx(1.0)


def test_what_was_recorded_wins_over_what_the_kept_rollouts_say():
    assert measured({"prompts/distinct": 48.0}, [answered([1])])["prompts/distinct"] == 48.0


def test_a_curve_knows_its_ends_and_its_noise():
    line = Curve("x", np.arange(20), np.linspace(0.0, 1.9, 20))
    assert line.start == pytest.approx(0.15)  # 0, 0.1, 0.2, 0.3
    assert line.end == pytest.approx(1.75)
    assert line.noise() == pytest.approx(0.0, abs=1e-12)
    assert line.rose()
    zigzag = Curve("x", np.arange(20), np.tile([1.0, -1.0], 10))
    assert zigzag.noise() == pytest.approx((16 / 6) ** 0.5)  # second differences are +-4
    assert not zigzag.rose()
