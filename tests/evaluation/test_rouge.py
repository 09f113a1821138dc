"""ROUGE by hand, and its properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.evaluation.metrics import longest_common, ngrams, rouge, rouge_n, words

WORDS = st.lists(st.sampled_from("abcd"), max_size=12)


def test_words_are_runs_of_letters_and_digits_in_lower_case():
    assert words("The CAT's 2nd naïve_hat, ёж!") == ["the", "cat", "s", "2nd", "naïve", "hat", "ёж"]
    assert words(" ... ") == []


def test_worked_by_hand():
    # candidate: the cat sat on the mat (6 words, 5 pairs); reference: the cat is on the mat (6 words, 5 pairs).
    # Shared words: the, cat, on, the, mat = 5. Shared pairs: the-cat, on-the, the-mat = 3. In order: 5.
    scores = rouge("The cat sat on the mat.", "the cat is on the mat")
    assert scores == pytest.approx((10 / 12, 6 / 10, 10 / 12))


def test_precision_and_recall_both_count():
    # candidate: a a a b (4 words), reference: a b c (3 words). Shared: a, b = 2, so P = 2/4, R = 2/3, F1 = 4/7.
    # Pairs: aa aa ab against ab bc: 1 shared, F1 = 2/5. Longest in order: a b = 2.
    assert rouge("a a a b", "a b c") == pytest.approx((4 / 7, 2 / 5, 4 / 7))


def test_order_matters_to_rouge_l_alone():
    # police kill the gunman / gunman kill the police (Lin 2004): all words are shared, "kill the" is in order,
    # preceded or followed by neither: the longest is 2 ("kill the") of 4.
    scores = rouge("gunman kill the police", "police kill the gunman")
    assert scores.rouge1 == 1.0 and scores.rougeL == pytest.approx(2 * 2 / 8) and scores.rouge2 == pytest.approx(1 / 3)


def test_nothing_is_shared_with_no_words():
    assert rouge("", "a b") == rouge("a b", "") == rouge("", "") == (0.0, 0.0, 0.0)
    assert rouge("a", "a") == (1.0, 0.0, 1.0)  # one word has no pairs


@given(WORDS, WORDS)
def test_bounds_and_symmetry(a: list[str], b: list[str]):
    scores = rouge(" ".join(a), " ".join(b))
    assert all(0.0 <= score <= 1.0 for score in scores)
    assert scores == rouge(" ".join(b), " ".join(a))
    assert scores.rougeL <= scores.rouge1  # words in order are words
    if len(a) > 1:
        assert rouge(" ".join(a), " ".join(a)) == (1.0, 1.0, 1.0)


@given(WORDS, WORDS)
def test_the_bit_vectors_agree_with_the_table(a: list[str], b: list[str]):
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for row, one in enumerate(a):
        for column, other in enumerate(b):
            best = max(table[row][column + 1], table[row + 1][column])
            table[row + 1][column + 1] = table[row][column] + 1 if one == other else best
    assert longest_common(a, b) == table[-1][-1]


@given(WORDS, st.integers(1, 5))
def test_ngrams(tokens: list[str], n: int):
    assert ngrams(tokens, n) == [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    assert rouge_n(tokens, tokens, n) == (1.0 if len(tokens) >= n else 0.0)
