"""Golden cases for each rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_factory import rollout_of

from tether.config.rewards import EndedPart, ExactPart, JSONPart, LengthPart, MathPart, NumericPart, RegexPart
from tether.rewards.math_answer import extract
from tether.rewards.math_terms import last_number, number, numerals
from tether.rewards.parts import json_is_valid, rule_reward


def value(part, completion: str, answer: str | None = None, **about) -> float | str:
    """The score, or the reason why there is none."""
    [score] = rule_reward(part)([rollout_of(completion, answer, **about)])
    return score.value if score.valid else next(iter(score.parts))


@pytest.mark.parametrize(
    ("settings", "completion", "expected"),
    [
        ({"target": 3}, "a b c", 1.0),
        ({"target": 3, "falloff": 2}, "a b c d", 0.5),
        ({"target": 3, "falloff": 2}, "a b", 0.5),
        ({"target": 3, "falloff": 2}, "a", 0.0),
        ({"target": 3, "falloff": 2}, "", 0.0),
        ({"min": 2, "max": 4}, "a b", 1.0),
        ({"min": 2, "max": 4}, "a b c d", 1.0),
        ({"min": 2, "max": 4, "falloff": 4}, "a b c d e", 0.75),
        ({"min": 2, "falloff": 4}, "a", 0.75),
        ({"min": 2}, "a " * 100, 1.0),
        ({"max": 5, "unit": "characters", "falloff": 5}, "123456", 0.8),
        ({"max": 5, "unit": "characters"}, "", 1.0),
        ({"target": 0, "falloff": 1}, "", 1.0),
    ],
)
def test_length(settings: dict, completion: str, expected: float):
    assert value(LengthPart(kind="length", **settings), completion) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "completion", "expected"),
    [
        ({"pattern": "[0-9]+"}, "it is 42.", 1.0),
        ({"pattern": "[0-9]+"}, "it is many", 0.0),
        ({"pattern": "[0-9]+", "match": "full"}, " 42\n", 1.0),
        ({"pattern": "[0-9]+", "match": "full"}, "42.", 0.0),
        ({"pattern": "yes"}, "YES", 0.0),
        ({"pattern": "yes", "ignore_case": True}, "YES", 1.0),
    ],
)
def test_regex(settings: dict, completion: str, expected: float):
    assert value(RegexPart(kind="regex", **settings), completion) == expected


@pytest.mark.parametrize(
    ("settings", "completion", "expected"),
    [
        ({}, ' {"a": [1, 2.5, null]}\n', 1.0),
        ({}, "3", 1.0),
        ({}, "{'a': 1}", 0.0),
        ({}, '{"a": NaN}', 0.0),
        ({}, '{"a": 1} and more', 0.0),
        ({}, "", 0.0),
        ({}, "1" * 5000, 1.0),
        ({}, "[" * 100_000, 0.0),
        ({"keys": ("a", "b")}, '{"a": 1, "b": 2, "c": 3}', 1.0),
        ({"keys": ("a", "b")}, '{"a": 1}', 0.0),
        ({"keys": ("a",)}, '["a"]', 0.0),
        ({}, '```json\n{"a": 1}\n```', 0.0),
        ({"fenced": True}, 'Here:\n```json\n{"a": 1}\n```\nDone.', 1.0),
        ({"fenced": True}, '{"a": 1}', 1.0),
    ],
)
def test_json(settings: dict, completion: str, expected: float):
    assert value(JSONPart(kind="json", **settings), completion) == expected


@pytest.mark.parametrize(
    ("settings", "completion", "answer", "expected"),
    [
        ({}, "  Paris. ", "paris", 1.0),
        ({}, "“New   York”", "new york", 1.0),
        ({}, "It is Paris", "Paris", 0.0),
        ({"ignore_case": False}, "paris", "Paris", 0.0),
        ({"extract": "last_line"}, "Let me think.\nParis\n\n", "Paris", 1.0),
        ({"extract": "marker"}, "Hm. **Answer:** Paris.\nOr so.", "Paris", 1.0),
        ({"extract": "marker"}, "Paris", "Paris", 0.0),
        ({"extract": "marker"}, "x <answer> Paris </answer> y", "Paris", 1.0),
        ({}, "", "", 0.0),
        ({}, "Paris", None, "failed/no_answer"),
    ],
)
def test_exact(settings: dict, completion: str, answer: str | None, expected: float | str):
    assert value(ExactPart(kind="exact", **settings), completion, answer) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("3 + 4 = 7", "7", 1.0),
        ("3 + 4 = 7.", "7", 1.0),
        ("It is 7, not 8", "7", 0.0),
        ("= -4", "-4", 1.0),
        ("= −4", "-4", 1.0),
        ("8-4", "4", 1.0),
        ("about $1,234.50", "1234.5", 1.0),
        ("1e3", "1000", 1.0),
        ("one thousand", "1000", 0.0),
        ("0.3333333333", "0.33333333", 1.0),
        ("0.33", "0.3333", 0.0),
        ("1000000.5", "1000000", 0.0),
        ("1000002", "1000000", 0.0),
        ("9" * 200, "7", 0.0),
        ("1e999999999", "7", 0.0),
        ("7", "seven", "failed/answer_is_no_number"),
        ("7", None, "failed/no_answer"),
    ],
)
def test_numeric(completion: str, answer: str | None, expected: float | str):
    assert value(NumericPart(kind="numeric"), completion, answer) == expected


def test_a_wider_tolerance():
    assert value(NumericPart(kind="numeric", tolerance=0.01), "99.5", "100") == 1.0
    assert value(NumericPart(kind="numeric", tolerance=0.0), "0.30000000000000001", "0.3") == 0.0


def test_ended():
    assert [value(EndedPart(kind="ended"), "x", finish=finish) for finish in ("stop", "length", "error")] == [1, 0, 0]


@pytest.mark.parametrize(
    ("how", "completion", "reference", "expected"),
    [
        ("whole", " a b ", None, "a b"),
        ("last_line", "a\nb\n \n", None, "b"),
        ("marker", "The answer is 5\nthen", None, "5"),
        ("marker", "Answer:\n\n 5", None, "5"),
        ("marker", "#### 18", None, "18"),
        ("marker", "<answer>1</answer> <answer>2</answer>", None, "2"),
        ("marker", "<answer>1", None, None),
        ("last_number", "1 then -2.50!", None, "-2.50"),
        ("boxed", "\\boxed{1} \\boxed{\\frac{1}{2}}", None, "\\frac{1}{2}"),
        ("boxed", "\\boxed{1} \\boxed{2", None, "1"),
        ("auto", "It makes 3 + 4 = 7 in all.", "7", "7"),
        ("auto", "The answer is 7. I had 3 tries.", "7", "7"),
        ("auto", "The answer is seven.\nBye", "seven", "seven."),
        ("auto", "Hm\nParis", "Paris", "Paris"),
        ("auto", "", "7", None),
    ],
)
def test_extract(how, completion: str, reference: str | None, expected: str | None):
    assert extract(completion, how, reference) == expected


@given(st.text(alphabet=st.characters()) | st.text(alphabet="0123456789.,-+eE$% −<>/answer:\\boxed{}"))
def test_no_text_makes_the_readers_raise(text: str):
    for how in ("auto", "whole", "last_line", "marker", "last_number", "boxed"):
        for reference in (None, "1", "a"):
            extract(text, how, reference)
    last_number(text)
    number(text)
    json_is_valid(text, ["a"], fenced=True)


@given(st.decimals(-(10**9), 10**9, places=3))
def test_a_number_is_found_however_it_is_dressed(decimal):
    for written in (str(decimal), f"{decimal:,}", f"so it is {decimal:,}.", f"= {decimal}!"):
        assert last_number(written) == number(str(decimal)), written
    assert numerals(f"1 + 2 = {decimal}")[-1] == str(decimal)


@pytest.mark.parametrize("extract_by", ["auto", "last_number", "marker", "last_line", "whole"])
@pytest.mark.parametrize("answer", ["6,250", "$6,250", "6250", "$6250"])
def test_exact_reads_numbers_alike_on_both_sides(extract_by: str, answer: str):
    part = ExactPart(kind="exact", extract=extract_by)
    assert value(part, "6,250" if extract_by == "whole" else "The answer is $6,250.", answer) == float(
        extract_by != "last_line"
    )
    assert value(part, "answer: 6,251", answer) == 0.0


def test_exact_keeps_leading_zeros_apart():
    assert value(ExactPart(kind="exact"), "007", "7") == 0.0


@pytest.mark.parametrize("part", [MathPart(kind="math"), NumericPart(kind="numeric")])
@given(st.integers(-(10**40), 10**40), st.integers(1, 1000))
def test_whole_numbers_compare_exactly(part, number: int, off: int):
    assert value(part, str(number), str(number)) == 1.0
    assert value(part, str(number + off), str(number)) == 0.0
