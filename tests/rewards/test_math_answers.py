"""When two mathematical answers are the same."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_factory import rollout_of

from tether.config.rewards import MathPart
from tether.rewards.math_answer import math_correct, normalise, same_answer, value_of
from tether.rewards.parts import rule_reward

RIGHT = [
    ("so \\boxed{42}", "42"),
    ("first \\boxed{1}, then \\boxed{42}", "42"),
    ("\\boxed{\\frac{1}{2}}", "0.5"),
    ("\\boxed{\\dfrac12}", "1/2"),
    ("\\boxed{\\tfrac{3}{4}}", "\\frac34"),
    ("-\\frac{1}{2}", "-0.5"),
    ("\\frac{-1}{2}", "-1/2"),
    ("\\boxed{1\\frac{1}{2}}", "1.5"),
    ("1 1/2", "3/2"),
    ("The answer is 1,234.", "1234"),
    ("\\boxed{10{,}000}", "10000"),
    ("x = 5", "5"),
    ("Hence x = -3.", "-3"),
    ("$x=\\frac{3}{4}$", "3/4"),
    ("The final answer is $\\frac{7}{3}$.", "7/3"),
    ("\\boxed{50\\%}", "50"),
    ("50%", "0.5"),
    ("about 25% of them", "25%"),
    ("0.25", "25%"),
    ("So the total is 42 dollars.", "42"),
    ("It costs $1,200.50 in total", "1200.5"),
    ("\\boxed{\\$5}", "5"),
    ("\\boxed{12\\text{ cm}^2}", "12"),
    ("12 square cm", "12"),
    ("\\boxed{90^\\circ}", "90"),
    ("\\boxed{(1, 2)}", "(1,2)"),
    ("(1/2, 3)", "(0.5, 3)"),
    ("\\left( 1, 2 \\right)", "(1,2)"),
    ("3 \\times 10^{4}", "30000"),
    ("\\boxed{\\sqrt{2}}", "\\sqrt{2}"),
    ("\\boxed{2 \\pi}", "2\\pi"),
    ("\\boxed{\\text{Yes}}", "yes"),
    ("(B)", "B"),
    ("**Answer:** 7", "7"),
    ("#### 18", "18"),
    ("0.33333333", "1/3"),
    ("Answer: 5 + 3 = 8", "8"),
    ("answer: 3/4 of a cup", "0.75"),
    ("thus 3 + 4 = 7", "7"),
    ("The answer is 7. I had 3 tries.", "7"),
    ("There were 3. Now there are 7.", "7"),
    ("2/4", "2/4"),  # as the reference itself has it
]

WRONG = [
    ("3", "4"),
    ("-5", "5"),
    ("", "4"),
    ("\\boxed{}", ""),
    ("\\boxed{3}, or 4", "4"),  # the box is the answer
    ("7 or 8", "7"),
    ("2+2", "4"),  # nothing is computed ...
    ("\\boxed{2+2}", "4"),
    ("14/2", "7"),  # ... not even a division: the question is not its own answer
    ("14/2", "2"),
    ("answer: 14/2", "2"),
    ("2/4", "0.5"),  # lowest terms only
    ("0 + 3", "3"),  # the last number of an expression is not its value
    ("3 - 7", "3"),
    ("4-2", "-2"),
    ("5x", "5"),
    ("x^2", "2"),
    ("2\\sqrt{3}", "3"),
    ("1/0", "0"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(2,1)"),
    ("1e999999999", "1"),
    ("9" * 500, "9"),
]


@pytest.mark.parametrize(("completion", "reference"), RIGHT)
def test_right(completion: str, reference: str):
    assert math_correct(completion, reference, 1e-6)


@pytest.mark.parametrize(("completion", "reference"), WRONG)
def test_wrong(completion: str, reference: str):
    assert not math_correct(completion, reference, 1e-6)


def test_tolerance():
    assert not math_correct("0.333", "1/3", 1e-6) and math_correct("0.333", "1/3", 1e-3)
    assert not math_correct("0.33333333", "1/3", 0.0)


def test_as_a_reward():
    reward = rule_reward(MathPart(kind="math"))
    scores = reward([rollout_of("\\boxed{7}", "7"), rollout_of("8", "7"), rollout_of("7", None)])
    assert [score.valid and score.value for score in scores] == [1.0, 0.0, False]


PIECES = st.sampled_from(
    [*"0123456789.,-+/%^_{}()[]=$ x\n", "\\frac", "\\boxed{", "\\text{", "\\times10^", "\\left(", "answer is ", "{,}"]
)
ODD_TEXT = st.text(alphabet=st.characters()) | st.lists(PIECES, max_size=40).map("".join)


@given(ODD_TEXT, ODD_TEXT)
def test_no_text_makes_it_raise(completion: str, reference: str):
    math_correct(completion, reference, 1e-6)


@given(ODD_TEXT)
def test_an_answer_is_the_same_as_itself(text: str):
    assert same_answer(text, text, 0.0) == bool(normalise(text))


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4))
def test_every_way_to_write_a_fraction_has_one_value(top: int, bottom: int):
    fraction = Fraction(top, bottom)
    if fraction.denominator == 1:
        assert value_of(normalise(str(fraction)))[0] == fraction
        return
    sign = "-" if fraction < 0 else ""
    positive = abs(fraction)
    whole, rest = divmod(positive.numerator, positive.denominator)
    ways = [
        f"{fraction.numerator}/{fraction.denominator}",
        f"{sign}\\frac{{{positive.numerator}}}{{{positive.denominator}}}",
        f"\\dfrac{{{fraction.numerator}}}{{{fraction.denominator}}}",
    ]
    if whole:
        ways.append(f"{sign}{whole}\\frac{{{rest}}}{{{positive.denominator}}}")
        ways.append(f"{sign}{whole} {rest}/{positive.denominator}")
    for way in ways:
        assert value_of(normalise(way)) == (fraction, False), way
        assert math_correct(f"\\boxed{{{way}}}", str(fraction), 0.0)


@pytest.mark.parametrize(
    "text", ["1,234" * 2000, "{" * 8000, "\\boxed{" * 2000, "a b" * 4000, "answer " * 3000, "1 " * 5000]
)
def test_long_text_is_read_quickly(text: str):
    """Some milliseconds; a pattern that goes back and forth would take minutes."""
    began = time.process_time()  # the processor's: other programs may be busy
    math_correct(text, "7", 1e-6)
    assert time.process_time() - began < 20
