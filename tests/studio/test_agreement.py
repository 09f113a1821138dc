"""Agreement between raters, against numbers worked out elsewhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.studio.label_items import Vote, agreement, krippendorff_alpha

# K. Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011), section C: four observers, twelve units.
PRINTED = ("123321412...", "1233224125.3", ".3332342251.", "12332441251.")


def units(rows) -> dict:
    """What the raters, one a row, said of the units, one a column; a dot is nothing."""
    return {
        unit: {rater: row[unit] for rater, row in enumerate(rows) if row[unit] != "."} for unit in range(len(rows[0]))
    }


def test_the_example_of_the_book():
    # Its coincidences: 40 values, 7 + 10 + 8 + 4 + 3 of them matched; 9, 13, 10, 5 and 3 of each value.
    # alpha = (39 * 32 - (9*8 + 13*12 + 10*9 + 5*4 + 3*2)) / (40 * 39 - (9*8 + 13*12 + 10*9 + 5*4 + 3*2)), printed 0.743
    assert krippendorff_alpha(units(PRINTED)) == pytest.approx(904 / 1216)


def test_two_raters_by_hand():
    # aa aa ab bb: n = 8, a 5 times, b 3; observed 2 unlike of 8 ordered pairs; expected 2*5*3 / (8*7) = 30/56.
    two = units(("aaab", "aabb"))
    assert krippendorff_alpha(two) == pytest.approx(1 - (2 / 8) / (30 / 56))


def test_agreement_that_cannot_be_by_chance_is_one_and_none_is_undefined():
    assert krippendorff_alpha(units(("aaa", "aaa"))) == 1.0 and krippendorff_alpha(units(("a.", ".b"))) is None
    assert krippendorff_alpha({}) is None


@given(st.lists(st.tuples(st.sampled_from("ab."), st.sampled_from("ab."), st.sampled_from("ab.")), max_size=12))
def test_alpha_is_at_most_one_and_does_not_depend_on_who_is_who(rows):
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    found = krippendorff_alpha(units(columns)) if rows else None
    assert found is None or found <= 1.0
    if rows:
        assert found == pytest.approx(krippendorff_alpha(units(columns[::-1])))


def vote(item, rater, choice, order=(0, 1), repeat_of=None, kind="pair") -> Vote:
    return Vote(item, repeat_of, rater, kind, order, choice)


def test_the_shown_order_is_undone_before_votes_are_compared():
    told = agreement([vote(1, 1, "left"), vote(1, 2, "right", order=(1, 0)), vote(2, 1, "right"), vote(2, 2, "right")])
    assert told["alpha"] == 1.0 and told["pairs"] == 2
    told = agreement([vote(1, 1, "left"), vote(1, 2, "left", order=(1, 0)), vote(2, 1, "skip"), vote(2, 2, "right")])
    assert told["alpha"] < 0.01 and told["pairs"] == 1, "a skip says nothing"


def test_hidden_repeats_measure_consistency_and_not_agreement():
    first = [vote(1, 7, "left"), vote(2, 7, "tie")]
    again = [vote(3, 7, "right", order=(1, 0), repeat_of=1), vote(4, 7, "left", repeat_of=2)]
    told = agreement(first + again)
    assert told["consistency"] == 0.5 and told["repeats"] == 2 and told["alpha"] is None
    assert told["raters"] == [{"id": 7, "votes": 4, "consistency": 0.5, "repeats": 2}]


def test_rankings_agree_pair_by_pair():
    same = [vote(1, 1, [0, 1, 2], (0, 1, 2), kind="ranking"), vote(1, 2, [2, 1, 0], (2, 1, 0), kind="ranking")]
    assert agreement(same)["alpha"] == 1.0 and agreement(same)["pairs"] == 3
    swapped = [vote(1, 1, [0, 1, 2], (0, 1, 2), kind="ranking"), vote(1, 2, [1, 0, 2], (0, 1, 2), kind="ranking")]
    assert agreement(swapped)["alpha"] == pytest.approx(1 - (2 / 6) / (18 / 30)), "0 0 1 and 1 0 1 of three pairs"
