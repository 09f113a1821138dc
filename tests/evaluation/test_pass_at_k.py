"""pass@k against numbers worked by hand and against counting every draw."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from tether import cli
from tether.evaluation.evaluate import differences, evaluate_rollouts
from tether.evaluation.pass_at_k import pass_at_k, passes
from tether.hub.tiny_model import tiny_tokenizer
from tether.protocols import Sampling
from tether.rollout.scripted import ScriptedEngine
from tether.types import Prompt, Score


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (10, 3, 4, 5 / 6),  # 1 - C(7,4)/C(10,4) = 1 - 35/210
        (16, 1, 8, 0.5),  # 1 - C(15,8)/C(16,8) = 1 - 6435/12870
        (16, 0, 8, 0.0),
        (16, 9, 8, 1.0),  # only 7 wrong answers: 8 drawn hold a right one
        (3, 3, 1, 1.0),
    ],
)
def test_worked_numbers(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("n", [1, 4, 7])
def test_it_is_the_fraction_of_draws_with_a_right_answer(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_impossible_numbers_are_refused(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def test_answers_without_a_score_do_not_count():
    assert passes([1.0, math.nan, 0.0, 0.0], 2) == pytest.approx(2 / 3)  # 1 - C(2,2)/C(3,2)
    assert math.isnan(passes([1.0, math.nan], 2))
    assert passes([0.99, 1.0], 1) == 0.5


ANSWERS = {"a": "xyyy", "b": "yyyy"}


def evaluation(answers: dict[str, str]):
    """Two prompts with four answers each; an x is right."""
    prompts = [Prompt.from_text(name, name) for name in answers]
    engine = ScriptedEngine(tiny_tokenizer(), lambda prompt, sample: answers[prompt.id][sample])
    rollouts = engine.generate(prompts, Sampling(4), samples_per_prompt=4, seed=0)

    def right(rollouts):
        return [Score(float(rollout.completion.startswith("x"))) for rollout in rollouts]

    return evaluate_rollouts(rollouts, sampling=Sampling(4), rewards={"score": right}, pass_at=(1, 2))


def test_an_evaluation_has_a_mean_over_prompts_and_paired_differences():
    one, other = evaluation(ANSWERS), evaluation({"a": "yyyy", "b": "yyyy"})
    assert one.columns["pass@1"] == (0.25, 0.0) and one.columns["pass@2"] == (0.5, 0.0)
    assert one.metrics["pass@1"].value == 0.125 and one.metrics["pass@2"].value == 0.25
    assert one.metrics["pass@2"].count == 2
    assert differences(one, other)["pass@2"].value == 0.25


def test_the_command_reports_it(capsys):
    words = ["tiny-bytes", "--task", "match-case", "-n", "4", "--pass-at", "1,4", "--max-new-tokens", "4", "--json"]
    assert cli.main(["eval", *words]) == 0
    metrics = json.loads(capsys.readouterr().out)["models"][0]["metrics"]
    assert {"pass@1", "pass@4"} <= set(metrics)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--task", "match-case", "--pass-at", "8"], "--samples is 1: raise it"),
        (["--task", "match-case", "-n", "4", "--pass-at", "2", "--temperature", "0"], "--temperature above 0"),
        (["--task", "match-case", "--pass-at", "0"], "whole number of at least 1"),
        (["--task", "match-case", "--pass-at", "1,"], "whole number of at least 1"),
        (["--prompts", "nothing.jsonl", "-n", "4", "--pass-at", "2"], "nothing.jsonl"),
    ],
)
def test_wrong_uses_are_one_sentence(capsys, words, said):
    assert cli.main(["eval", "tiny-bytes", *words]) != 0
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
