"""The estimators and ratios beside PPO's: identities that tie each to a formula that is tested elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masked_grids import close, few, garbage, masks, numbers, on_row, seeds, spoil
from torch import Tensor

from tether.ops.advantages import (
    MovingAverage,
    decoupled_gae,
    gae,
    group_advantages,
    has_spread,
    length_adaptive_lambda,
    less_baseline,
    mean_return,
    n_step,
    overlong_penalty,
    refilled,
    reward_to_go,
    td_residuals,
    total_return,
)
from tether.ops.losses import Aggregation, cispo_loss, clip_loss, gspo_loss, reinforce_loss, sequence_log_ratio

rates = st.sampled_from([0.0, 0.3, 0.9, 1.0])
clips = st.sampled_from([0.05, 0.2, 0.28])


def drawn(seed: int, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three grids of numbers of the mask's shape."""
    return tuple(numbers(seed + place, *mask.shape) for place in range(3))  # type: ignore[return-value]


# -- returns and lambdas ---------------------------------------------------------------------------------------------
@few
@given(masks(), seeds, rates)
def test_one_step_is_the_residual_and_many_steps_are_monte_carlo(mask, seed, gamma):
    rewards, values, _ = drawn(seed, mask)
    final = numbers(seed + 9, len(mask))
    close(
        n_step(rewards, values, mask, gamma=gamma, n=1, final_values=final),
        td_residuals(rewards, values, mask, gamma=gamma, final_values=final),
    )
    to_go = reward_to_go(rewards, mask, gamma=gamma)
    close(n_step(rewards, values, mask, gamma=gamma, n=10**6), (to_go - values).masked_fill(~mask, 0.0), 1e-10)


@few
@given(masks(), seeds, rates, rates)
def test_equal_lambdas_are_today_s_gae_to_the_bit(mask, seed, gamma, lam):
    rewards, values, _ = drawn(seed, mask)
    final = numbers(seed + 9, len(mask))
    known = {"gamma": gamma, "final_values": final}
    decoupled = decoupled_gae(rewards, values, mask, lam=lam, critic_lam=lam, **known)
    for one, other in zip(decoupled, gae(rewards, values, mask, lam=lam, **known), strict=True):
        assert torch.equal(one, other)


@few
@given(masks(), seeds, rates, rates)
def test_the_critic_s_lambda_leaves_the_advantages_alone(mask, seed, lam, critic_lam):
    rewards, values, _ = drawn(seed, mask)
    advantages, returns = decoupled_gae(rewards, values, mask, gamma=0.9, lam=lam, critic_lam=critic_lam)
    assert torch.equal(advantages, gae(rewards, values, mask, gamma=0.9, lam=lam)[0])
    assert torch.equal(returns, gae(rewards, values, mask, gamma=0.9, lam=critic_lam)[1])
    close(
        decoupled_gae(rewards, values, mask, gamma=0.9, lam=lam, critic_lam=1.0)[1],
        reward_to_go(rewards, mask, gamma=0.9),
        1e-10,
    )


@few
@given(masks(), seeds, st.sampled_from([0.05, 0.5, 2.0]))
def test_a_lambda_by_length_is_each_row_s_own_gae(mask, seed, alpha):
    rewards, values, _ = drawn(seed, mask)
    lambdas = length_adaptive_lambda(mask, alpha=alpha, dtype=torch.float64)
    together, _ = gae(rewards, values, mask, gamma=0.9, lam=lambdas)
    for row in range(len(mask)):
        length = int(mask[row].sum())
        assert float(lambdas[row]) == pytest.approx(max(0.0, 1 - 1 / (alpha * length)))
        one = slice(row, row + 1)
        alone, _ = gae(rewards[one], values[one], mask[one], gamma=0.9, lam=float(lambdas[row]))
        close(together[one], alone)


# -- baselines -------------------------------------------------------------------------------------------------------
@few
@given(masks(), seeds, rates, garbage)
def test_the_mean_return_is_of_whole_answers(mask, seed, gamma, bad):
    rewards = drawn(seed, mask)[0]
    totals = [on_row(total_return(rewards, mask, gamma=gamma), mask, row)[0] for row in range(len(mask))]
    for weights in (total_return(rewards, mask, gamma=gamma), reward_to_go(rewards, mask, gamma=gamma)):
        assert float(mean_return(spoil(weights, mask, bad), mask)) == pytest.approx(sum(totals) / len(totals), abs=1e-9)


@few
@given(masks(), seeds)
def test_a_batch_baseline_makes_the_mean_return_zero(mask, seed):
    weights = total_return(drawn(seed, mask)[0], mask, gamma=1.0)
    left = less_baseline(weights, mask, mean_return(weights, mask))
    assert float(mean_return(left, mask)) == pytest.approx(0.0, abs=1e-9)
    assert not bool(left[~mask].any())


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.floats(0, 0.99))
def test_a_moving_average_lies_between_the_numbers_it_has_seen(seen, decay):
    average = MovingAverage(decay)
    assert average.value == 0.0
    for number in seen:
        average = average.after(number)
    assert min(seen) - 1e-9 <= average.value <= max(seen) + 1e-9
    assert MovingAverage(0.0).after(3.0).after(seen[-1]).value == pytest.approx(seen[-1])


# -- ratios ----------------------------------------------------------------------------------------------------------
def gradient(loss_of, logprobs: Tensor) -> Tensor:
    new = logprobs.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss_of(new).sum(), new)
    return found


@few
@given(masks(), seeds, clips)
def test_cispo_on_policy_is_the_policy_gradient_to_the_bit(mask, seed, clip):
    logprobs, _, advantages = drawn(seed, mask)
    clipped = {"clip_low": clip, "clip_high": clip}
    assert torch.equal(cispo_loss(logprobs, logprobs, advantages, **clipped), reinforce_loss(logprobs, advantages))
    found = gradient(lambda new: cispo_loss(new, logprobs, advantages, **clipped), logprobs)
    assert torch.equal(found, -advantages)


@few
@given(masks(), seeds, clips)
def test_cispo_keeps_the_gradient_of_every_token(mask, seed, clip):
    logprobs, old, advantages = drawn(seed, mask)
    found = gradient(lambda new: cispo_loss(new, old, advantages, clip_low=clip, clip_high=clip), logprobs)
    weight = -found / advantages
    assert bool((weight >= 1 - clip - 1e-12).all()) and bool((weight <= 1 + clip + 1e-12).all())


@few
@given(st.integers(1, 6), seeds, clips)
def test_gspo_of_answers_of_one_token_is_ppo_to_the_bit(rows, seed, clip):
    mask = torch.zeros(rows, 3, dtype=torch.bool)
    mask[torch.arange(rows), torch.arange(rows) % 3] = True
    logprobs, old, advantages = drawn(seed, mask)
    clipped = {"clip_low": clip, "clip_high": clip}
    gspo = gspo_loss(logprobs, old, advantages, mask, **clipped)
    assert torch.equal(gspo[mask], clip_loss(logprobs, old, advantages, **clipped)[mask])


@few
@given(masks(), seeds, garbage)
def test_the_ratio_of_an_answer_is_the_geometric_mean_of_its_tokens(mask, seed, bad):
    logprobs, old, _ = drawn(seed, mask)
    found = sequence_log_ratio(spoil(logprobs, mask, bad), old, mask)
    for row in range(len(mask)):
        ratios = (logprobs - old)[row][mask[row]].exp()
        assert float(found[row, 0].exp()) == pytest.approx(float(ratios.log().mean().exp()))
        assert len(set(found[row].tolist())) == 1


@few
@given(masks(), seeds, clips)
def test_the_tokens_of_an_answer_share_gspo_s_gradient(mask, seed, clip):
    logprobs, old, drawn_advantages = drawn(seed, mask)
    advantages = drawn_advantages[:, :1].expand_as(logprobs)
    aggregation = Aggregation("sequence")

    def loss(new: Tensor) -> Tensor:
        return aggregation.total(gspo_loss(new, old, advantages, mask, clip_low=clip, clip_high=clip), mask)

    found = gradient(loss, logprobs)
    assert not bool(found[~mask].any())
    for row in range(len(mask)):
        assert max(on_row(found, mask, row)) - min(on_row(found, mask, row)) < 1e-12


# -- groups ----------------------------------------------------------------------------------------------------------
@few
@given(masks(max_rows=4), seeds, clips, st.integers(1, 9))
def test_dr_grpo_is_grpo_with_a_deviation_of_one_and_a_fixed_length(mask, seed, clip, length):
    """A group whose deviation is 1 has the same advantages either way; the size is rows times the length."""
    logprobs, old, _ = drawn(seed, mask)
    scores = numbers(seed + 5, len(mask) + 1)
    scores = (scores - scores.mean()) / scores.std()
    ids = torch.zeros(len(scores), dtype=torch.long)
    centered = group_advantages(scores, ids, scale_by_std=False)
    close(group_advantages(scores, ids, scale_by_std=True, epsilon=0.0), centered, 1e-9)
    advantages = centered[: len(mask), None].expand_as(logprobs)
    losses = clip_loss(logprobs, old, advantages, clip_low=clip, clip_high=clip)
    fixed, token = Aggregation("fixed", length), Aggregation("token")
    assert float(fixed.total(losses, mask)) == float(token.total(losses, mask))
    assert fixed.size(mask) == len(mask) * length


@given(st.integers(1, 100), st.data())
def test_the_penalty_falls_with_the_length_and_stays_between_minus_one_and_zero(limit, data):
    buffer = data.draw(st.integers(1, limit))
    found = overlong_penalty(torch.arange(limit + 20), max_length=limit, buffer=buffer)
    assert bool((found[1:] <= found[:-1]).all())
    assert float(found[limit - buffer]) == 0.0 and bool((found[limit:] == -1.0).all())


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=5))
def test_a_group_has_spread_where_two_scores_differ(groups):
    scores = torch.tensor([float(score) for group in groups for score in group])
    ids = torch.tensor([place for place, group in enumerate(groups) for _ in group])
    expected = [len(set(group)) > 1 for group in groups for _ in group]
    assert has_spread(scores, ids).tolist() == expected


@given(st.lists(st.booleans()), st.lists(st.booleans()))
def test_each_candidate_with_spread_takes_one_place_at_most(places, candidates):
    taken = refilled(places, candidates)
    used = [candidate for candidate in taken if candidate is not None]
    assert len(taken) == len(places) and used == sorted(set(used)) and all(candidates[each] for each in used)
    assert all(candidate is None for spread, candidate in zip(places, taken, strict=True) if spread)
    assert len(used) == min(places.count(False), candidates.count(True))
