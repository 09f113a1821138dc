"""From evaluated tokens to advantages: what the whole of `Algorithm.advantages` gives, worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.algorithms.algorithm import AdvantageSettings, Algorithm, MinibatchEpochs
from tether.algorithms.estimators import GAE, GroupRelative, LeaveOneOut
from tether.algorithms.objectives import Clip, PolicyObjective, Reinforce, Unclipped
from tether.errors import ConfigError
from tether.ops.losses import Aggregation
from tether.types import EvaluatedBatch

MASK = torch.tensor([[False, True, True, False], [False, True, True, True]])


MONTE_CARLO = GAE(1.0, 1.0)


def algorithm(estimator=MONTE_CARLO, **rules) -> Algorithm:
    return Algorithm(
        name="test",
        estimator=estimator,
        objective=lambda _: PolicyObjective(surrogate=Reinforce()),
        update=MinibatchEpochs(1, 2),
        minibatch_size=2,
        advantage_settings=AdvantageSettings(**rules),
    )


def evaluated(**columns) -> EvaluatedBatch:
    zeros = torch.zeros(2, 4)
    given = {
        "tokens": zeros.long(),
        "attention_mask": torch.ones(2, 4, dtype=torch.bool),
        "response_mask": MASK,
        "behavior_logprobs": zeros,
        "untruncated_logprobs": zeros,
        "scores": torch.tensor([3.0, -5.0]),
        "group_ids": torch.tensor([0, 0]),
        "truncated": torch.tensor([False, True]),
        "old_logprobs": torch.tensor([[9.0, -1.0, -2.0, 9.0], [9.0, -1.0, -1.0, -1.0]]),
        "ref_logprobs": torch.tensor([[9.0, -1.5, -1.0, 9.0], [9.0, -1.0, -1.0, -3.0]]),
        "values": torch.tensor([[7.0, 0.5, 0.25, 7.0], [7.0, 1.0, 1.0, 1.0]]),
        "final_values": torch.tensor([100.0, 4.0]),
    }
    return EvaluatedBatch(**(given | columns))


def test_score_on_the_last_sampled_token_and_kl_on_each():
    # Row 0: KL k1 = -1 + 1.5 = 0.5, then -2 + 1 = -1; paid -0.1 KL each, and 3 on token 2. Row 1: KL 0, 0, 2.
    experience, metrics = algorithm().advantages(evaluated(), 0.1)
    expected = torch.tensor([[0.0, -0.05, 3.1, 0.0], [0.0, 0.0, 0.0, -5.2]])
    torch.testing.assert_close(experience.rewards, expected)
    assert metrics.mean("kl_ref_k1") == pytest.approx((0.5 - 1.0 + 2.0) / 2)
    # lambda 1: advantage = reward to go - value.
    torch.testing.assert_close(
        experience.advantages, torch.tensor([[0.0, 3.05 - 0.5, 3.1 - 0.25, 0.0], [0.0, -6.2, -6.2, -6.2]])
    )


def test_only_an_answer_that_never_ended_gets_the_penalty_and_the_clip_does_not_soften_it():
    rules = {"kl_apply_to": "none", "missing_eos_penalty": -10.0, "score_clip": 2.0}
    experience, metrics = algorithm(**rules).advantages(evaluated(ref_logprobs=None), 0.0)
    assert experience.rewards[0, 2] == 2.0
    assert experience.rewards[1, 3] == -10.0
    assert metrics.mean("score") == -1.0  # as the reward gave it
    assert metrics.mean("score_used") == -4.0


def test_only_a_cut_off_answer_is_bootstrapped():
    rules = {"kl_apply_to": "none", "bootstrap_truncated": True}
    experience, _ = algorithm(**rules).advantages(evaluated(ref_logprobs=None), 0.0)
    assert experience.returns[0, 2] == 3.0
    assert experience.returns[1, 3] == -5.0 + 4.0


@pytest.mark.parametrize(("estimator", "expected"), [(LeaveOneOut(), 8.0), (GroupRelative(False, 1e-4), 4.0)])
def test_groups_compare_whole_sequences(estimator, expected):
    experience, _ = algorithm(estimator, kl_apply_to="none").advantages(evaluated(ref_logprobs=None, values=None), 0.0)
    assert experience.advantages[0, 1:3].tolist() == [expected, expected]
    assert experience.advantages[1, 1:].tolist() == [-expected] * 3
    assert experience.advantages[0, 3] == 0


def test_constant_returns_leave_explained_variance_unsaid():
    constant = evaluated(ref_logprobs=None, scores=torch.ones(2), truncated=torch.zeros(2, dtype=torch.bool))
    assert "explained_variance" not in algorithm(kl_apply_to="none").advantages(constant, 0.0)[1].weighted


def test_truncated_sampling_is_told():
    cut = dataclasses.replace(evaluated(), behavior_logprobs=torch.full((2, 4), 0.25))
    assert algorithm().advantages(cut, 0.0)[1].mean("truncation_gap") == pytest.approx(0.25)


def apart(*gaps: float) -> EvaluatedBatch:
    """Sampler's log-probs below the trainer's by these, on row 0's two tokens; on row 1 they agree."""
    old = torch.tensor([[9.0, -1.0, -2.0, 9.0], [9.0, -1.0, -1.0, -1.0]])
    behavior = old - torch.tensor([[5.0, *gaps, 5.0], [5.0, 0.0, 0.0, 0.0]])
    return evaluated(old_logprobs=old, behavior_logprobs=behavior, untruncated_logprobs=behavior)


def test_the_gap_between_sampler_and_trainer_and_the_kl_it_implies_are_told():
    metrics = algorithm().advantages(apart(math.log(2.0), -math.log(4.0)), 0.0)[1]
    assert metrics.mean("logprob_diff") == pytest.approx((math.log(2.0) + math.log(4.0)) / 5)
    assert metrics.mean("logprob_diff_max") == pytest.approx(math.log(4.0))
    # k3 of KL(sampler || trainer): r - 1 - log r with r = trainer / sampler = 2 and 1/4.
    expected = (2.0 - 1.0 - math.log(2.0)) + (0.25 - 1.0 + math.log(4.0))
    assert metrics.mean("sampler_kl") == pytest.approx(expected / 5)


def test_the_importance_weight_is_old_over_behavior_up_to_the_cap():
    plain, _ = algorithm().advantages(apart(math.log(8.0), -math.log(4.0)), 0.0)
    weighed, metrics = algorithm(importance_sampling_cap=2.0).advantages(apart(math.log(8.0), -math.log(4.0)), 0.0)
    weights = torch.tensor([[1.0, 2.0, 0.25, 1.0], [1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(weighed.advantages, plain.advantages * weights)
    assert torch.equal(weighed.returns, plain.returns)  # the critic learns what it learned before
    assert metrics.mean("importance/mean") == pytest.approx((2.0 + 0.25 + 3.0) / 5)
    assert metrics.mean("importance/truncated") == pytest.approx(1 / 5)


def test_where_the_sampler_agrees_the_importance_weight_changes_no_bit():
    plain, _ = algorithm(whiten_advantages=True).advantages(apart(0.0, 0.0), 0.1)
    weighed, metrics = algorithm(whiten_advantages=True, importance_sampling_cap=1.0).advantages(apart(0.0, 0.0), 0.1)
    assert torch.equal(weighed.advantages, plain.advantages)
    assert metrics.mean("importance/mean") == 1.0
    assert metrics.mean("importance/truncated") == 0.0


@pytest.mark.parametrize(
    "surrogate", [Reinforce(), Unclipped(), Clip(0.2, 0.3), Clip(0.2, 0.2, dual=1.5)], ids=lambda kind: repr(kind)
)
@settings(deadline=None)
@given(st.integers(0, 2**31))
def test_to_weigh_the_advantage_is_to_weigh_the_policy_loss(surrogate, seed):
    generator = torch.Generator().manual_seed(seed)
    new, behavior = (torch.randn(2, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    batch = evaluated(behavior_logprobs=behavior, untruncated_logprobs=behavior)
    plain, _ = algorithm().advantages(batch, 0.1)
    weighed, _ = algorithm(importance_sampling_cap=3.0).advantages(batch, 0.1)
    weights = (batch.old_logprobs.double() - behavior).exp().clamp(max=3.0)
    expected = surrogate(new, plain) * weights
    torch.testing.assert_close(surrogate(new, weighed)[MASK], expected[MASK])


def test_parts_of_an_objective_are_checked_when_it_is_made():
    with pytest.raises(ConfigError, match="Aggregation over 'seq': use token, sequence or fixed"):
        Aggregation("seq", 16)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="needs its length"):
        Aggregation("fixed")
    with pytest.raises(ConfigError, match=r"surrogate is the class Clip: pass an object of it, Clip\(\.\.\.\)"):
        PolicyObjective(Clip)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"surrogate function needs .* measure"):
        PolicyObjective(lambda logprobs, batch: logprobs)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="aggregation is 'token'"):
        PolicyObjective(Clip(0.2, 0.2), "token")  # pyright: ignore[reportArgumentType]


def test_an_objective_in_place_of_its_function_is_refused():
    wrong = dataclasses.replace(algorithm(), objective=PolicyObjective(Clip(0.2, 0.2)))  # pyright: ignore
    with pytest.raises(ConfigError, match="objective is a PolicyObjective: pass a function that returns it"):
        wrong.check()
