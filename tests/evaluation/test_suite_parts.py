"""The parts of the suite: each checker and each number against examples worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tether.config.suite_names import checked_suite, split_suite
from tether.errors import ConfigError, DataError
from tether.evaluation.metrics import bootstrap, bootstrap_mean, paired_difference
from tether.evaluation.suite import arithmetic, instructions, open_answers
from tether.evaluation.suite.capability_suite import METRICS, PARTS, SuiteResult, compare_suites, run_suite
from tether.evaluation.suite.held_out_text import passages, score_texts
from tether.evaluation.suite.suite_model import SuiteModel
from tether.models.load import load_causal_lm
from tether.protocols import Sampling
from tether.types import Prompt


@pytest.fixture(scope="module")
def model() -> SuiteModel:
    return SuiteModel.of_loaded(load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0))


# -- instructions -------------------------------------------------------------------------------------------------

CHECKED = [
    (lambda text: instructions.at_most_words(3, text), ["Paris", "It is Paris."], ["", "...", "It is in Paris."]),
    (lambda text: instructions.at_least_words(3, text), ["one two three", "a-b c d"], ["one two", "well-known word"]),
    (lambda text: instructions.has_word("snow", text), ["Snow fell.", "(snow)"], ["snowy hills", "no s now"]),
    (instructions.is_upper, ["HELLO, 3 TIMES!", "É"], ["HELLo", "", "123"]),
    (instructions.is_lower, ["hello, 3 times!"], ["hellO", "", "123"]),
    (lambda text: instructions.has_bullets(2, text), ["- a\n- b", "Here:\n* a\n  • b"], ["- a", "a - b"]),
    (lambda text: instructions.has_numbered(2, text), ["1. a\n2. b", "1) a\n2) b\n"], ["1. a", "1. 1. 2. 3."]),
    (
        lambda text: instructions.is_json_with(("a", "b"), text),
        ['{"a": 1, "b": [2]}', '```json\n{"b": 1, "a": 2}\n```', ' {"a": null, "b": ""}\n'],
        ['{"a": 1}', '{"a": 1, "b": 2, "c": 3}', '[1, 2]', 'Here: {"a": 1, "b": 2}', "{'a': 1, 'b': 2}", "[" * 100_000],
    ),
    (lambda text: instructions.ends_with("The end.", text), ["So it was. The end.\n"], ["The end", "The end. Bye"]),
    (lambda text: instructions.starts_with("Yes", text), ["  Yes, it is.", "Yes"], ["yes", "Oh Yes"]),
    (instructions.is_quoted, ['"A rose."', "“Good night”\n"], ['A "rose"', '""', '"', '"A rose']),
    (lambda text: instructions.sentence_count(2, text), ["One. Two!", "Is it? Yes."], ["One.", "One. Two", "...", ""]),
]  # fmt: skip


@pytest.mark.parametrize(("check", "followed", "not_followed"), CHECKED)
def test_a_checker_accepts_and_rejects(check, followed, not_followed):
    assert [text for text in followed if not check(text)] == []
    assert [text for text in not_followed if check(text)] == []


def test_every_kind_of_instruction_has_four_and_they_take_turns():
    kinds = [each.kind for each in instructions.INSTRUCTIONS]
    assert len(kinds) == 48 and len(set(kinds)) == 12 and len(set(kinds[:12])) == 12
    assert all(kinds.count(kind) == 4 for kind in kinds)
    assert len({each.words for each in instructions.INSTRUCTIONS}) == 48
    assert not any(each.check("") for each in instructions.INSTRUCTIONS)


# -- arithmetic ---------------------------------------------------------------------------------------------------


def test_problems_follow_from_the_seed_and_differ():
    first = arithmetic.problems(64, 3)
    assert first == arithmetic.problems(64, 3) != arithmetic.problems(64, 4)
    assert first[:10] == arithmetic.problems(10, 3)
    assert len(set(first)) == 64 and not set(first) & set(arithmetic.EXAMPLES)
    assert [each.operator for each in first[:4]] == ["+", "-", "*", "+"]
    assert all(0 <= each.result <= 144 for each in first)
    assert [arithmetic.Problem(7, operator, 5).result for operator in "+-*"] == [12, 2, 35]


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("12", 12),
        ("7 + 5 = 12", 12),
        ("\n7 + 5 = 12\n13", 12),
        ("It is 12, not 13", 12),
        ("7 - 12 = -5", -5),
        ("twelve", None),
        ("", None),
        ("7 + 5 =", None),
    ],
)
def test_the_number_that_an_answer_gives(answer, number):
    assert arithmetic.given_number(answer) == number
    assert arithmetic.is_right(arithmetic.Problem(7, "+", 5), answer) == (number == 12)


# -- open answers -------------------------------------------------------------------------------------------------


def test_repetition_and_sameness():
    texts = ["a b c d e", "a b c d x", "q r s t u"]
    assert open_answers.sameness(texts) == [0.5, 0.5, 0.0]  # each has two 4-grams; a b c d is in two answers
    assert open_answers.sameness(["go go go go go", "other words are here"]) == [0.0, 0.0]
    assert open_answers.sameness(["short", "short"]) == [0.0, 0.0]
    assert open_answers.repetition(["la la la la la la", "one two three four five"]) == [pytest.approx(2 / 3), 0.0]


# -- held-out text ------------------------------------------------------------------------------------------------


def test_the_passages_are_many_short_and_mixed():
    found = passages()
    kinds = [each.kind for each in found]
    assert (kinds.count("prose"), kinds.count("dialogue"), kinds.count("code")) == (40, 12, 12)
    assert set(kinds[:8]) == {"prose", "dialogue", "code"}
    assert all(100 < len(each.text) < 400 for each in found) and len({each.text for each in found}) == 64


def test_bits_per_byte_are_those_of_the_models_own_pass(model):
    text = "A ferry, at six."
    ids = [*model.opening, *model.tokenizer.encode(text, add_special_tokens=False)]
    with torch.no_grad():
        table = model.actor.policy(torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
    nats = -sum(float(table[place - 1, ids[place]]) for place in range(1, len(ids)))
    [score] = score_texts(model, [text])
    assert score.nats == pytest.approx(nats, rel=1e-5)
    assert (score.tokens, score.bytes) == (len(ids) - 1, 16)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / 16, rel=1e-5)


def test_a_text_beyond_the_context_is_cut_into_windows(model):
    window = model.context_length - 1
    text = "ab" * model.context_length
    whole, first, second, third = score_texts(
        model, [text, text[:window], text[window : 2 * window], text[2 * window :]]
    )
    assert whole.tokens == len(text)
    assert whole.nats == pytest.approx(first.nats + second.nats + third.nats, rel=1e-6)


# -- the suite ----------------------------------------------------------------------------------------------------


def test_a_measurement_repeats_itself_and_survives_json(model):
    first = run_suite(model, tuple(PARTS), items=4)
    assert first == run_suite(model, tuple(PARTS), items=4)
    assert set(first.columns) == set(METRICS) and all(len(column) == 4 for column in first.columns.values())
    assert SuiteResult.from_json(first.as_json()) == first
    assert first.estimates["perplexity"].value == pytest.approx(math.exp(sum(first.columns["perplexity"]) / 4))


def result(**columns: list[float]) -> SuiteResult:
    return SuiteResult(("made",), None, 0, {name: tuple(column) for name, column in columns.items()})


def test_differences_are_paired_and_adjusted_for_the_number_of_metrics():
    base = [1.0, 5.0, 3.0, 8.0, 2.0, 9.0, 4.0, 7.0]
    off = [0.3, 0.1, 0.2, 0.4, 0.3, 0.1, 0.2, 0.4]
    moved = [value + each for value, each in zip(base, off, strict=True)]
    alone = compare_suites(result(bits_per_byte=moved), result(bits_per_byte=base))["bits_per_byte"]
    assert alone.difference.value == pytest.approx(0.25)
    assert 0.1 <= alone.difference.low < 0.25 < alone.difference.high <= 0.4  # the passages' own spread cancels
    more = {"repetition": base, "sameness": base, "arithmetic": [0.0, 1.0] * 4}
    among = compare_suites(result(bits_per_byte=moved, **more), result(bits_per_byte=base, **more))["bits_per_byte"]
    assert among.difference == alone.difference
    assert among.adjusted[0] < alone.adjusted[0] and among.adjusted[1] > alone.adjusted[1]


def test_perplexities_are_compared_as_perplexities():
    change = compare_suites(result(perplexity=[2.0, 3.0]), result(perplexity=[1.0, 3.0]))["perplexity"]
    assert change.difference.value == pytest.approx(math.exp(2.5) - math.exp(2.0))


def test_other_items_cannot_be_compared():
    with pytest.raises(DataError, match="same parts, items and seed"):
        compare_suites(result(repetition=[0.1]), SuiteResult(("made",), None, 1, {"repetition": (0.1,)}))


def test_a_context_without_room_is_one_sentence(model):
    long = Prompt.from_text("long", "x" * model.context_length)
    with pytest.raises(ConfigError, match="leaves no room for an answer"):
        model.answers([long], Sampling(4), 0, "arithmetic")


def test_the_bootstrap_of_a_statistic_agrees_with_that_of_a_mean():
    values, others = [1.0, 4.0, 2.0, 8.0, 5.0], [0.5, 4.5, 1.0, 6.0, 5.0]
    assert bootstrap([values], lambda x: x[0].mean(dim=-1), seed=3) == bootstrap_mean(values, seed=3)
    paired = bootstrap([values, others], lambda x: x[0].mean(dim=-1) - x[1].mean(dim=-1), seed=3)
    expected = paired_difference(values, others, seed=3)
    assert (paired.value, paired.low, paired.high) == pytest.approx((expected.value, expected.low, expected.high))


# -- names --------------------------------------------------------------------------------------------------------


def test_names():
    assert split_suite("all") == ("perplexity", "arithmetic", "instructions", "repetition")
    assert split_suite("perplexity, lm-eval:hellaswag,arc_easy") == (
        "perplexity",
        "lm-eval:hellaswag",
        "lm-eval:arc_easy",
    )
    assert split_suite("lm-eval:a,lm-eval:b") == ("lm-eval:a", "lm-eval:b")
    assert checked_suite(["repetition", "all", "repetition"])[0] == "repetition"
    for wrong in ("perplx", "lm-eval:", "ALL"):
        with pytest.raises(ValueError, match="is no part of the suite"):
            split_suite(wrong)
