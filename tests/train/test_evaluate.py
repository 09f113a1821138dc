"""Evaluating models: known answers give known numbers, and a model against itself is a tie at a distance of 0."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch

from tether.errors import ConfigError, DataError
from tether.evaluation.evaluate import compare, differences, evaluate_model, evaluate_rollouts, reference_text, with_kl
from tether.evaluation.judges import ScoreJudge, Verdict
from tether.hub.tiny_model import tiny_tokenizer
from tether.models.load import load_causal_lm
from tether.models.shared_backbone import common_depth
from tether.ops.kl import exact_kl
from tether.protocols import Sampling
from tether.rewards.scoring import failed
from tether.rewards.tasks import MatchCase
from tether.rollout.scripted import ScriptedEngine
from tether.types import Prompt, Score

SAMPLING = Sampling(max_new_tokens=8)
PROMPTS = [Prompt.from_text(f"p{n}", f"question {n}", answer="the cat sat") for n in range(4)]


def by_length(rollouts):
    return [Score(float(len(rollout.completion)), {"half": len(rollout.completion) / 2}) for rollout in rollouts]


def evaluation(answers, *, samples: int = 1, reward=by_length, prompts=PROMPTS, seed: int = 0):
    """Of a scripted model; `answers` is a list for the prompts in turn."""
    script = {prompt.id: [answers[place]] for place, prompt in enumerate(prompts)}
    engine = ScriptedEngine(tiny_tokenizer(), script)
    rollouts = engine.generate(prompts, Sampling(64), samples_per_prompt=samples, seed=0)
    return evaluate_rollouts(rollouts, sampling=SAMPLING, rewards={"score": reward}, seed=seed)


@pytest.fixture(scope="module")
def models():
    return [load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=seed) for seed in (0, 1)]


def test_known_answers_give_known_numbers():
    found = evaluation(["the cat sat", "a dog", "the cat", ""])
    values = {key: estimate.value for key, estimate in found.metrics.items()}
    assert values["score"] == (11 + 5 + 7 + 0) / 4 and values["score/half"] == values["score"] / 2
    assert values["rouge1"] == pytest.approx((1 + 0 + 4 / 5 + 0) / 4)
    assert values["rouge2"] == pytest.approx((1 + 0 + 2 / 3 + 0) / 4)
    assert values["ended"] == 1.0 and values["length"] == (12 + 6 + 8 + 1) / 4
    assert values["distinct_1"] == pytest.approx(5 / 7)
    assert all(found.metrics[key].low <= values[key] <= found.metrics[key].high for key in values)
    assert found.metrics["ended"].method == "wilson" and found.metrics["ended"].low < 1.0
    assert found.metrics["score"].method == "bootstrap"
    assert found.columns["score"] == (11.0, 5.0, 7.0, 0.0)


def test_what_cannot_be_scored_is_left_out_and_counted():
    def fussy(rollouts):
        return [failed("empty") if not rollout.completion else Score(1.0) for rollout in rollouts]

    found = evaluation(["a", "b", "", "c"], reward=fussy)
    assert found.metrics["score"].value == 1.0 and found.metrics["score"].count == 3
    assert found.unscored == {"score": 1} and math.isnan(found.columns["score"][2])


def test_samples_of_one_prompt_are_one_thing():
    once, thrice = evaluation(["a", "bb", "ccc", "dddd"]), evaluation(["a", "bb", "ccc", "dddd"], samples=3)
    assert once.metrics["score"] == thrice.metrics["score"]  # copies of an answer do not make it surer
    assert len(thrice.rollouts) == 12 and thrice.metrics["score"].count == 4


def test_references_come_from_the_record():
    prompt = Prompt.from_text("p", "q", answer="4")
    assert reference_text(prompt) == "4"
    assert reference_text(dataclasses.replace(prompt, meta={"completion": "c"})) == "c"
    assert reference_text(dataclasses.replace(prompt, meta={"reference": "r", "completion": "c"})) == "r"
    assert reference_text(Prompt.from_text("p", "q")) is None
    assert "rouge1" not in evaluation(["a"], prompts=[Prompt.from_text("p", "q")]).metrics


# -- two models


def test_win_rates_by_a_score():
    first, second = evaluation(["aaa", "a", "aa", "a"]), evaluation(["a", "aaa", "aa", ""])
    win = compare(first, second, ScoreJudge(by_length))
    assert (win.wins, win.losses, win.ties, win.unjudged, win.order_disagreement) == (2, 1, 1, 0, 0)
    assert win.rate.value == 2.5 / 4 and win.rate.low < win.rate.value < win.rate.high
    mirrored = compare(second, first, ScoreJudge(by_length))
    assert mirrored.rate.value == pytest.approx(1 - win.rate.value)
    assert compare(first, second, ScoreJudge(by_length, margin=1.0)).ties == 2


def test_differences_are_paired():
    found = differences(evaluation(["aaa", "aa", "a", "aaaa"]), evaluation(["aa", "a", "", "aaa"]))
    assert (found["score"].value, found["score"].low, found["score"].high) == (1.0, 1.0, 1.0)
    assert "distinct_1" not in found


def test_a_judge_that_fails_too_often_ends_the_comparison():
    first = evaluation(["a", "b", "c", "d"])

    def silent(pairs):
        return [Verdict(None, reason="timeout"), *[Verdict("first") for _ in pairs[1:]]]

    with pytest.raises(DataError, match=r"no verdict on 1 of 4 pairs \(timeout\)"):
        compare(first, first, silent)
    win = compare(first, first, silent, max_failure_rate=0.5)
    assert (win.unjudged, win.wins, win.rate.count, win.rate.value) == (1, 3, 3, 1.0)
    with pytest.raises(DataError, match="one for each"):
        compare(first, first, lambda pairs: [])
    with pytest.raises(DataError, match="no verdict on 4 of 4"):
        compare(first, first, lambda pairs: [Verdict(None, reason="x")] * 4, max_failure_rate=1.0)


def test_only_the_same_prompts_can_be_compared():
    with pytest.raises(DataError, match="same prompts"):
        compare(evaluation(["a"] * 4), evaluation(["a"] * 3, prompts=PROMPTS[:3]), ScoreJudge(by_length))


# -- real models


def test_an_evaluation_repeats_itself_and_a_model_ties_with_itself(models):
    task = MatchCase()
    given = {"sampling": SAMPLING, "rewards": {"score": task.reward()}, "samples_per_prompt": 2, "seed": 3}
    first, second = (evaluate_model(models[0], task.held_out(), **given) for _ in range(2))
    assert first.metrics == second.metrics
    assert [one.completion for one in first.rollouts] == [other.completion for other in second.rollouts]
    win = compare(first, second, ScoreJudge(task.reward()))
    assert win.ties == len(first.rollouts) and win.rate.value == 0.5
    with_itself = with_kl(first, models[0], models[0])
    assert with_itself.metrics["kl_k1"].value == 0.0 and with_itself.metrics["kl_k3"].high == 0.0
    other = evaluate_model(models[0], task.held_out(), **(given | {"seed": 4}))
    assert [one.completion for one in first.rollouts] != [one.completion for one in other.rollouts]


def test_the_kl_is_that_of_the_distributions(models):
    """One token an answer, many samples: both estimates approach the exact KL of the two next-token distributions."""
    prompt = Prompt.from_text("p", "hello")
    sampled = evaluate_model(
        models[0], [prompt], sampling=Sampling(1, 0.7), samples_per_prompt=4000, seed=0, max_num_seqs=4000
    )
    found = with_kl(sampled, models[0], models[1])
    ids = torch.tensor([tiny_tokenizer().encode("hello")])
    with torch.no_grad():
        ours, theirs = (torch.log_softmax(model.model(ids).logits[0, -1] / 0.7, dim=-1) for model in models)
    exact = float(exact_kl(ours, theirs))
    assert exact > 0.005
    assert found.metrics["kl_k1"].value == pytest.approx(exact, rel=0.25)
    assert found.metrics["kl_k3"].value == pytest.approx(exact, rel=0.1)


def test_the_kl_needs_samples_and_one_vocabulary(models):
    greedy = evaluate_model(models[0], PROMPTS[:1], sampling=Sampling(2, 0.0))
    with pytest.raises(ConfigError, match="temperature above 0"):
        with_kl(greedy, *models)
    sampled = evaluate_model(models[0], PROMPTS[:1], sampling=Sampling(2))
    other = copy.deepcopy(models[1].tokenizer)
    other.add_tokens(["<another>"])
    with pytest.raises(ConfigError, match="vocabulary"):
        with_kl(sampled, models[0], dataclasses.replace(models[1], tokenizer=other))


def test_layers_that_two_models_share_are_run_once_and_the_kl_is_the_same(models, monkeypatch):
    """A model whose last layer alone was trained, against its start; and against a start that shares nothing."""
    start, trained = models[0], dataclasses.replace(models[0], model=copy.deepcopy(models[0].model))
    with torch.no_grad():
        for parameter in trained.model.model.layers[-1].parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    sampled = evaluate_model(trained, PROMPTS, sampling=Sampling(6), samples_per_prompt=2)
    depth = len(start.model.model.layers) - 1
    assert common_depth(trained.model.model, start.model.model) == depth
    assert common_depth(models[0].model.model, models[1].model.model) == 0
    together = with_kl(sampled, trained, start).columns["kl_k3"]
    monkeypatch.setattr("tether.models.shared_backbone.common_depth", lambda *_: 0)
    assert together == pytest.approx(with_kl(sampled, trained, start).columns["kl_k3"], rel=1e-3)
    assert min(together) > 0.0


def test_micro_batches_change_no_kl(models):
    sampled = evaluate_model(models[0], PROMPTS, sampling=Sampling(6), samples_per_prompt=2)
    whole, small = (with_kl(sampled, *models, micro_batch_tokens=size).metrics["kl_k3"].value for size in (8192, 20))
    assert whole == pytest.approx(small, rel=1e-3) and whole > 0.0
