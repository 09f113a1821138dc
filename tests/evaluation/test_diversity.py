"""Distinct n-grams and repetition, by hand and by property."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.evaluation.metrics import distinct_n, distinct_without_each, repetition_rate

TEXTS = st.lists(st.lists(st.sampled_from("abc"), max_size=6).map(" ".join), min_size=1, max_size=6)


def test_distinct_by_hand():
    assert distinct_n(["a b a", "a c"], 1) == pytest.approx(3 / 5)  # a b c, of five words
    assert distinct_n(["a b a", "a b"], 2) == pytest.approx(2 / 3)  # ab ba ab; pairs never cross texts
    assert math.isnan(distinct_n(["", "a"], 2))


def test_a_policy_that_says_one_thing_has_low_distinct():
    assert distinct_n(["great question"] * 50, 1) == 2 / 100


def test_repetition_by_hand():
    assert repetition_rate("a b c d e") == 0.0
    assert repetition_rate("a b a b a b a b") == pytest.approx(1 - 2 / 5)  # abab baba abab baba abab
    assert repetition_rate("no no no", n=1) == pytest.approx(2 / 3)
    assert repetition_rate("too short") == 0.0


@given(TEXTS, st.integers(1, 3))
def test_bounds_and_order(texts: list[str], n: int):
    value = distinct_n(texts, n)
    assert math.isnan(value) or 0.0 < value <= 1.0
    assert math.isnan(value) or value == distinct_n(texts[::-1], n)
    assert all(0.0 <= repetition_rate(text, n) < 1.0 for text in texts)


@given(st.lists(TEXTS, min_size=1, max_size=5), st.integers(1, 2))
def test_without_each_group(groups: list[list[str]], n: int):
    for place, value in enumerate(distinct_without_each(groups, n)):
        rest = [text for group in groups[:place] + groups[place + 1 :] for text in group]
        assert value == pytest.approx(distinct_n(rest, n), nan_ok=True)
