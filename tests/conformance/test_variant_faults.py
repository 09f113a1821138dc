"""Each formula of the variants with a mistake that is easily made: the suite catches it in the family that names it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from conformance import oracle
from tether.conformance.adapter import Adapter
from tether.conformance.runner import run

METHODS = [name for name in vars(Adapter) if not name.startswith("_")]


def families_that_fail(method, faulty):
    methods = {name: getattr(oracle, name) for name in METHODS} | {method: faulty}
    report = run(lambda _: SimpleNamespace(**methods), dtypes=("float64",))
    assert not report.not_claimed
    return {failure.family for failure in report.failed}


def on_mask(function, *grids):
    """The function of each place; None wherever a grid has None."""
    return [
        [None if None in numbers else function(*numbers) for numbers in zip(*rows, strict=True)]
        for rows in zip(*grids, strict=True)
    ]


# -- n-step returns, lambdas -----------------------------------------------------------------------------------------
def one_step_too_many(rewards, values, mask, gamma, n, final_values):
    return oracle.n_step_returns(rewards, values, mask, gamma, n + 1, final_values)


def advantages_as_targets(rewards, values, mask, gamma, n, final_values):
    found = oracle.n_step_returns(rewards, values, mask, gamma, n, final_values)
    return found | {"returns": found["advantages"]}


def value_after_the_end_ignored(rewards, values, mask, gamma, n, final_values):
    return oracle.n_step_returns(rewards, values, mask, gamma, n, None)


def lambdas_swapped(rewards, values, mask, gamma, lam, critic_lam, final_values):
    return oracle.decoupled_gae(rewards, values, mask, gamma, critic_lam, lam, final_values)


def targets_of_the_policy_s_lambda(rewards, values, mask, gamma, lam, critic_lam, final_values):
    return oracle.decoupled_gae(rewards, values, mask, gamma, lam, lam, final_values)


def length_of_the_padded_row(rewards, values, mask, gamma, alpha, critic_lam, final_values):
    width = len(mask[0])
    lam = max(0.0, 1.0 - 1.0 / (alpha * width))
    found = oracle.decoupled_gae(rewards, values, mask, gamma, lam, critic_lam, final_values)
    return {"lambdas": [lam] * len(mask), **found}


def lambda_below_zero(rewards, values, mask, gamma, alpha, critic_lam, final_values):
    found = oracle.length_adaptive_gae(rewards, values, mask, gamma, alpha, critic_lam, final_values)
    return found | {"lambdas": [1.0 - 1.0 / (alpha * sum(row)) for row in mask]}


# -- baselines -------------------------------------------------------------------------------------------------------
def mean_over_tokens(rewards, mask, gamma, weighting):
    weights = oracle.reinforce_weights(rewards, None, mask, gamma, 1.0, weighting)["weights"]
    flat = [weight for row in weights for weight in row if weight is not None]
    baseline = math.fsum(flat) / len(flat)
    return {"baseline": baseline, "weights": on_mask(lambda w: w - baseline, weights)}


def rows_without_tokens_counted(rewards, mask, gamma, weighting):
    found = oracle.batch_mean_weights(rewards, mask, gamma, weighting)
    baseline = found["baseline"] * sum(any(row) for row in mask) / len(mask)
    return {"baseline": baseline, "weights": on_mask(lambda w: w + found["baseline"] - baseline, found["weights"])}


def average_that_starts_at_zero(decay, means):
    baselines = [0.0]
    for mean in means:
        baselines.append(decay * baselines[-1] + (1 - decay) * mean)
    return {"baselines": baselines}


def average_that_sees_the_step_itself(decay, means):
    found = oracle.moving_average(decay, means)["baselines"]
    return {"baselines": [*found[1:], found[-1]]}


# -- ratios ----------------------------------------------------------------------------------------------------------
def product_without_the_length(logprobs, old_logprobs, advantages, mask, clip_low, clip_high):
    """The ratio of the whole answer as it is, not to the power 1 / length."""
    scaled = [[x * sum(row) for x in xs] for xs, row in zip(logprobs, mask, strict=True)]
    old = [[x * sum(row) for x in xs] for xs, row in zip(old_logprobs, mask, strict=True)]
    return oracle.gspo_loss(scaled, old, advantages, mask, clip_low, clip_high)


def arithmetic_mean_of_ratios(logprobs, old_logprobs, advantages, mask, clip_low, clip_high):
    found = oracle.gspo_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    ratios = []
    for new, old, row in zip(logprobs, old_logprobs, mask, strict=True):
        each = [math.exp(min(n - o, 20.0)) for n, o, sampled in zip(new, old, row, strict=True) if sampled]
        ratios.append(math.fsum(each) / len(each))
    return found | {"ratios": ratios}


def mean_over_padding(logprobs, old_logprobs, advantages, mask, clip_low, clip_high):
    everywhere = [[True] * len(row) for row in mask]
    return oracle.gspo_loss(logprobs, old_logprobs, advantages, everywhere, clip_low, clip_high)


def gradient_of_the_answer_on_each_token(logprobs, old_logprobs, advantages, mask, clip_low, clip_high):
    found = oracle.gspo_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    grad = [[None if g is None else g * sum(row) for g in gs] for gs, row in zip(found["grad"], mask, strict=True)]
    return found | {"grad": grad}


def gradient_through_the_weight(logprobs, old_logprobs, advantages, mask, clip_low, clip_high):
    """No stop-gradient: d(w A log pi) has a second term wherever w is not at a bound."""
    found = oracle.cispo_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    grad = [list(row) for row in found["grad"]]
    for b, row in enumerate(mask):
        for t, sampled in enumerate(row):
            ratio = math.exp(min(logprobs[b][t] - old_logprobs[b][t], 20.0)) if sampled else 0.0
            if sampled and 1 - clip_low < ratio < 1 + clip_high:
                grad[b][t] -= ratio * advantages[b][t] * logprobs[b][t]
    return found | {"grad": grad}


def clip_that_removes_tokens(logprobs, old_logprobs, advantages, mask, clip_low, clip_high):
    found = oracle.cispo_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    ppo = oracle.clip_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, None)
    return found | {"grad": on_mask(lambda g, p: 0.0 if p == 0.0 else g, found["grad"], ppo["grad"])}


def weight_without_an_upper_bound(logprobs, old_logprobs, advantages, mask, clip_low, clip_high):
    return oracle.cispo_loss(logprobs, old_logprobs, advantages, mask, clip_low, 1e12)


# -- groups ----------------------------------------------------------------------------------------------------------
def divided_by_the_deviation(logprobs, old_logprobs, mask, scores, group_ids, clip_low, clip_high, fixed_length):
    advantages = oracle.group_advantages(scores, group_ids, True, True, 1e-4)["advantages"]
    scaled = [m + a for m, a in zip(means(scores, group_ids), advantages, strict=True)]
    return oracle.dr_grpo(logprobs, old_logprobs, mask, scaled, group_ids, clip_low, clip_high, fixed_length)


def means(scores, group_ids):
    groups = {g: [s for s, h in zip(scores, group_ids, strict=True) if h == g] for g in group_ids}
    return [math.fsum(groups[g]) / len(groups[g]) for g in group_ids]


def divided_by_the_longest_answer(logprobs, old_logprobs, mask, scores, group_ids, clip_low, clip_high, fixed_length):
    longest = max(sum(row) for row in mask)
    return oracle.dr_grpo(logprobs, old_logprobs, mask, scores, group_ids, clip_low, clip_high, longest)


def penalty_at_once(lengths, max_length, buffer):
    return {"penalties": [-1.0 if length > max_length - buffer else 0.0 for length in lengths]}


def penalty_without_an_end(lengths, max_length, buffer):
    return {"penalties": [min(0.0, (max_length - buffer - length) / buffer) for length in lengths]}


def penalty_after_the_group(
    logprobs, old_logprobs, mask, scores, group_ids, clip_low, clip_high, epsilon, max_length, buffer, penalty
):
    """The penalty is left out of the scores that the group compares."""
    limits = (epsilon, max_length, buffer, 0.0)
    return oracle.dapo(logprobs, old_logprobs, mask, scores, group_ids, clip_low, clip_high, *limits)


def upper_clip_as_the_lower(
    logprobs, old_logprobs, mask, scores, group_ids, clip_low, clip_high, epsilon, max_length, buffer, penalty
):
    limits = (epsilon, max_length, buffer, penalty)
    return oracle.dapo(logprobs, old_logprobs, mask, scores, group_ids, clip_low, clip_low, *limits)


def mean_over_answers(
    logprobs, old_logprobs, mask, scores, group_ids, clip_low, clip_high, epsilon, max_length, buffer, penalty
):
    limits = (epsilon, max_length, buffer, penalty)
    found = oracle.dapo(logprobs, old_logprobs, mask, scores, group_ids, clip_low, clip_high, *limits)
    spread = on_mask(lambda a, m: a, [[a] * len(row) for a, row in zip(found["advantages"], mask, strict=True)], mask)
    losses = oracle.clip_loss(logprobs, old_logprobs, spread, mask, clip_low, clip_high, None)["loss"]
    filled = [[0.0 if x is None else x for x in row] for row in losses]
    return found | oracle.aggregate(filled, mask, "sequence", None)


def only_solved_groups_give_way(groups, rounds):
    marked = [[*group, -1.0] if len(set(group)) == 1 and group[0] <= 0 else group for group in groups]
    return oracle.dynamic_sampling(marked, rounds)


def any_candidate_taken(groups, rounds):
    told = [[[0.0, 1.0] for _ in candidates] for candidates in rounds]
    return oracle.dynamic_sampling(groups, told)


def flat_groups_dropped(groups, rounds):
    found = oracle.dynamic_sampling(groups, rounds)
    held = [groups[candidate] if number == 0 else [0.0, 1.0] for number, candidate in found["chosen"]]
    return found | {"chosen": [c for c, group in zip(found["chosen"], held, strict=True) if len(set(group)) > 1]}


FAULTS = [
    ("n_step_returns", "n_step_returns", (one_step_too_many, advantages_as_targets, value_after_the_end_ignored)),
    ("decoupled_gae", "decoupled_gae", (lambdas_swapped, targets_of_the_policy_s_lambda)),
    ("length_adaptive_gae", "length_adaptive_gae", (length_of_the_padded_row, lambda_below_zero)),
    ("batch_mean_weights", "batch_mean", (mean_over_tokens, rows_without_tokens_counted)),
    ("moving_average", "moving_average", (average_that_starts_at_zero, average_that_sees_the_step_itself)),
    ("gspo_loss", "gspo", (product_without_the_length, arithmetic_mean_of_ratios, mean_over_padding)),
    ("gspo_loss", "gspo", (gradient_of_the_answer_on_each_token,)),
    ("cispo_loss", "cispo", (gradient_through_the_weight, clip_that_removes_tokens, weight_without_an_upper_bound)),
    ("dr_grpo", "dr_grpo", (divided_by_the_deviation, divided_by_the_longest_answer)),
    ("overlong_penalty", "overlong", (penalty_at_once, penalty_without_an_end)),
    ("dapo", "dapo", (penalty_after_the_group, upper_clip_as_the_lower, mean_over_answers)),
    ("dynamic_sampling", "dynamic_sampling", (only_solved_groups_give_way, any_candidate_taken, flat_groups_dropped)),
]
CASES = [pytest.param(method, family, fault, id=fault.__name__) for method, family, all_ in FAULTS for fault in all_]


@pytest.mark.parametrize(("method", "family", "fault"), CASES)
def test_a_planted_fault_is_caught_by_the_family_that_names_it(method, family, fault):
    assert families_that_fail(method, fault) == {family}
