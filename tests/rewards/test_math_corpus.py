"""Over two thousand pairs, marked by the built-in checker and by math-verify; every disagreement is listed."""

import json
import re
from pathlib import Path
from random import Random

import pytest
from math_corpus import Pair, pairs
from rollout_factory import rollout_of

from tether.config.rewards import MathVerifyPart
from tether.rewards.math_answer import math_correct
from tether.rewards.parts import build_reward

KEPT = [Pair(**row) for row in json.loads((Path(__file__).parent / "math_verify_disagreements.json").read_text())]

# Why math-verify and the label differ; `python benchmarks/math_answers.py --write` keeps the list up to date.
REASONS = {
    "it rounds to six digits behind the point": lambda pair: not pair.right and "0.00000" in pair.reference,
    "it computes what was asked": lambda pair: pair.completion in ("2+2", "14/2", "\\sqrt{16}", "2/4", "2^{10}"),
    "it passes over units that differ": lambda pair: not pair.right and _unit(pair.completion) != _unit(pair.reference),
    "it reads these units as letters": lambda pair: (
        pair.right and re.search(r"dollars|\bL\b|square|km/h|apples|°", pair.completion + pair.reference) is not None
    ),
    "it knows LaTeX and not these signs": lambda pair: (
        pair.right and re.search("[√∞*]", pair.completion + pair.reference)
    ),
    "it reads a mixed number as a product": lambda pair: pair.completion == "2 1/2",
}


def _unit(text: str) -> str:
    return "".join(re.findall(r"[A-Za-z]+", text.replace("\\text", "").replace("\\boxed", "")))


def test_the_corpus_is_large_and_balanced():
    made = pairs()
    assert len(made) > 2_000 and len({pair[1:] for pair in made}) > 2_000
    assert 0.4 < sum(pair.right for pair in made) / len(made) < 0.6


def test_the_built_in_checker_agrees_with_every_label():
    wrong = [pair for pair in pairs() if math_correct(pair.completion, pair.reference, 1e-8) != pair.right]
    assert not wrong


@pytest.mark.parametrize("pair", KEPT, ids=lambda pair: f"{pair.completion} for {pair.reference}")
def test_every_disagreement_of_math_verify_has_a_reason(pair: Pair):
    assert pair in pairs()
    assert any(holds(pair) for holds in REASONS.values())


def test_every_reason_is_needed():
    for reason, holds in REASONS.items():
        assert any(holds(pair) for pair in KEPT), reason


def test_math_verify_says_what_the_list_says():
    pytest.importorskip("math_verify")
    from tether.rewards.math_verified import math_verified

    agreeing = [pair for pair in pairs() if pair not in KEPT]
    for pair in [*Random(1).sample(agreeing, 60), *Random(2).sample(KEPT, 15)]:
        assert math_verified(pair.completion, pair.reference) == (pair.right != (pair in KEPT)), pair


@pytest.mark.parametrize("text", ["__import__('os').getcwd()", "().__class__", "9**9**9 - 9**9**9"])
def test_nothing_is_evaluated_as_python(text: str, monkeypatch):
    sympy_parser = pytest.importorskip("sympy.parsing.sympy_parser")
    math_verify_parser = pytest.importorskip("math_verify.parser")
    from tether.rewards.math_verified import as_latex, math_verified

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a text was evaluated")

    monkeypatch.setattr(sympy_parser, "eval_expr", refuse)
    monkeypatch.setattr(math_verify_parser, "parse_expr", refuse)
    assert as_latex(text).startswith("$")
    math_verified(text.replace("9**9**9", "9"), "7")


def test_as_a_part_of_a_reward():
    pytest.importorskip("math_verify")
    part = MathVerifyPart(kind="math_verify", timeout_seconds=60, workers=1)
    reward = build_reward((part,), own=None, policy=None, seed=0)
    scores = reward([rollout_of("\\boxed{x(x+1)}", "x^2+x"), rollout_of("8", "7"), rollout_of("7", None)])
    assert [score.valid and score.value for score in scores] == [1.0, 0.0, False]


def test_an_answer_that_takes_sympy_too_long_is_not_scored():
    pytest.importorskip("math_verify")
    part = MathVerifyPart(kind="math_verify", timeout_seconds=3, workers=1)
    reward = build_reward((part,), own=None, policy=None, seed=0)
    [endless, next_one] = reward([rollout_of("\\boxed{9^{9^{9^{9^{9}}}}}", "7"), rollout_of("\\boxed{7}", "7")])
    assert not endless.valid and any("timeout" in name or "worker" in name for name in endless.parts)
    assert next_one.valid and next_one.value == 1.0
