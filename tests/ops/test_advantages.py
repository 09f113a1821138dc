"""Returns and advantages against hand-worked numbers, a slow oracle, and the identities between them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masked_grids import close, few, garbage, lay_out, masks, numbers, on_row, seeds, spoil
from torch import Tensor

from tether.ops.advantages import gae, n_step, reward_to_go, td_residuals, total_return

rates = st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0])
ALL = torch.ones(1, 3, dtype=torch.bool)


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def n_step_by_definition(
    rewards: list[float], values: list[float], start: int, n: int, gamma: float, final: float
) -> float:
    """sum_{k<n} gamma^k r + gamma^n V - V from one list of sampled tokens; past the end, V is `final`."""
    steps = min(n, len(rewards) - start)
    ahead = values[start + steps] if start + steps < len(values) else final
    return sum(gamma**k * rewards[start + k] for k in range(steps)) + gamma**steps * ahead - values[start]


def gae_by_definition(rewards: list[float], values: list[float], gamma: float, lam: float, final: float) -> list[float]:
    """A_t = sum_l (gamma lam)^l delta_(t+l), as a double sum and not by the recursion."""
    ahead = [*values[1:], final]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, ahead, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


# Numbers worked out by hand.


def test_gae_golden():
    # d2 = 1 + 0.9*0 - 0.7 = 0.3;  d1 = 0 + 0.9*0.7 - 0.6 = 0.03;  d0 = 0 + 0.9*0.6 - 0.5 = 0.04;  gamma lam = 0.72
    # A2 = 0.3;  A1 = 0.03 + 0.72*0.3 = 0.246;  A0 = 0.04 + 0.72*0.246 = 0.21712;  returns = A + V
    advantages, returns = gae(row(0, 0, 1), row(0.5, 0.6, 0.7), ALL, gamma=0.9, lam=0.8)
    close(advantages, [[0.21712, 0.246, 0.3]])
    close(returns, [[0.71712, 0.846, 1.0]])


def test_gae_golden_with_a_bootstrap():
    # d2 = 1 + 0.9*2 - 0.7 = 2.1;  A1 = 0.03 + 0.72*2.1 = 1.542;  A0 = 0.04 + 0.72*1.542 = 1.15024
    found, _ = gae(row(0, 0, 1), row(0.5, 0.6, 0.7), ALL, gamma=0.9, lam=0.8, final_values=row(2.0)[0])
    close(found, [[1.15024, 1.542, 2.1]])


def test_returns_golden():
    # G2 = 3;  G1 = 2 + 0.5*3 = 3.5;  G0 = 1 + 0.5*3.5 = 2.75 = 1 + 0.5*2 + 0.25*3, the total
    close(reward_to_go(row(1, 2, 3), ALL, gamma=0.5), [[2.75, 3.5, 3.0]])
    close(total_return(row(1, 2, 3), ALL, gamma=0.5), [[2.75, 2.75, 2.75]])


def test_n_step_golden():
    # n = 2, gamma = 0.5, V_end = 8:  A0 = 1 + 0.5*2 + 0.25*30 - 10 = -0.5
    # A1 = 2 + 0.5*3 + 0.25*8 - 20 = -14.5 (two steps remain);  A2 = 3 + 0.5*8 - 30 = -23 (one step remains)
    args = (row(1, 2, 3), row(10, 20, 30), ALL)
    close(n_step(*args, gamma=0.5, n=2, final_values=row(8.0)[0]), [[-0.5, -14.5, -23.0]])
    close(n_step(*args, gamma=0.5, n=2), [[-0.5, -16.5, -27.0]])  # and with V_end = 0


def test_td_residuals_golden():
    # d0 = 1 + 0.5*20 - 10 = 1;  d1 = 2 + 0.5*30 - 20 = -3;  d2 = 3 - 30 = -27
    close(td_residuals(row(1, 2, 3), row(10, 20, 30), ALL, gamma=0.5), [[1.0, -3.0, -27.0]])


# Against the definitions, on any mask, with anything off it.


@few
@given(masks(), seeds, garbage, rates, rates, st.booleans(), st.integers(1, 10))
def test_all_follow_their_definitions(mask, seed, bad, gamma, lam, bootstrap, n):
    rewards, values = numbers(seed, *mask.shape), numbers(seed + 1, *mask.shape)
    final = numbers(seed + 2, len(mask)) if bootstrap else None
    wanted: dict[str, list[list[float]]] = {"gae": [], "n_step": [], "to_go": [], "total": []}
    for index in range(len(mask)):
        r, v = on_row(rewards, mask, index), on_row(values, mask, index)
        end, steps = 0.0 if final is None else float(final[index]), range(len(r))
        wanted["gae"].append(gae_by_definition(r, v, gamma, lam, end))
        wanted["n_step"].append([n_step_by_definition(r, v, t, n, gamma, end) for t in steps])
        wanted["to_go"].append([sum(gamma ** (k - t) * r[k] for k in range(t, len(r))) for t in steps])
        wanted["total"].append([sum(gamma**k * r[k] for k in steps)] * len(r))
    rewards, spoilt_values = spoil(rewards, mask, bad), spoil(values, mask, bad)
    advantages, returns = gae(rewards, spoilt_values, mask, gamma=gamma, lam=lam, final_values=final)
    close(advantages, lay_out(wanted["gae"], mask))
    close(returns, (lay_out(wanted["gae"], mask) + values).masked_fill(~mask, 0.0))
    close(n_step(rewards, spoilt_values, mask, gamma=gamma, n=n, final_values=final), lay_out(wanted["n_step"], mask))
    close(reward_to_go(rewards, mask, gamma=gamma), lay_out(wanted["to_go"], mask))
    close(total_return(rewards, mask, gamma=gamma), lay_out(wanted["total"], mask))


# Identities.


@few
@given(masks(), seeds, rates, st.booleans())
def test_the_ends_of_lambda_and_of_n(mask, seed, gamma, bootstrap):
    rewards, values = numbers(seed, *mask.shape), numbers(seed + 1, *mask.shape)
    final = numbers(seed + 2, len(mask)) if bootstrap else torch.zeros(len(mask), dtype=torch.float64)
    inputs = (rewards, values, mask)
    residuals = td_residuals(*inputs, gamma=gamma, final_values=final)
    remaining = torch.tensor([[int(m[t:].sum()) for t in range(mask.shape[1])] for m in mask]).double()
    to_go = reward_to_go(rewards, mask, gamma=gamma) + gamma**remaining * final[:, None]
    monte_carlo = (to_go - values).masked_fill(~mask, 0.0)

    close(gae(*inputs, gamma=gamma, lam=0.0, final_values=final)[0], residuals)
    close(n_step(*inputs, gamma=gamma, n=1, final_values=final), residuals)
    close(gae(*inputs, gamma=gamma, lam=1.0, final_values=final)[0], monte_carlo)
    for n in (mask.shape[1], mask.shape[1] + 3):
        close(n_step(*inputs, gamma=gamma, n=n, final_values=final), monte_carlo)


@few
@given(masks(), seeds, rates, st.sampled_from([0.0, 0.5, 0.95]), st.booleans())
def test_gae_is_the_exponentially_weighted_sum_of_n_steps(mask, seed, gamma, lam, bootstrap):
    # (1 - lam) sum_{n<N} lam^(n-1) A^(n) + lam^(N-1) A^(N), N at least the length: A^(n) is the same from there on.
    inputs = (numbers(seed, *mask.shape), numbers(seed + 1, *mask.shape), mask)
    final = numbers(seed + 2, len(mask)) if bootstrap else None
    width = mask.shape[1]
    several = [n_step(*inputs, gamma=gamma, n=n, final_values=final) for n in range(1, width + 1)]
    weights = [(1 - lam) * lam ** (n - 1) for n in range(1, width)] + [lam ** (width - 1)]
    mixture = sum(weight * a for weight, a in zip(weights, several, strict=True))
    assert isinstance(mixture, Tensor)
    close(gae(*inputs, gamma=gamma, lam=lam, final_values=final)[0], mixture)


@few
@given(masks(), seeds, rates, rates)
def test_a_perfect_critic_leaves_no_advantage(mask, seed, gamma, lam):
    rewards = numbers(seed, *mask.shape)
    advantages, returns = gae(rewards, reward_to_go(rewards, mask, gamma=gamma), mask, gamma=gamma, lam=lam)
    close(advantages, torch.zeros_like(advantages))
    close(returns, reward_to_go(rewards, mask, gamma=gamma))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_type_of_number_is_kept(dtype: torch.dtype):
    rewards, values = row(0, 0, 1).to(dtype), row(0.5, 0.6, 0.7).to(dtype)
    results = [*gae(rewards, values, ALL, gamma=0.9, lam=0.8), n_step(rewards, values, ALL, gamma=0.9, n=2)]
    results += [reward_to_go(rewards, ALL, gamma=0.9), total_return(rewards, ALL, gamma=0.9)]
    assert {result.dtype for result in results} == {dtype}


# Teeth: the well-known wrong formulas give other numbers.


def test_trap_9_reward_minus_value_is_not_an_advantage():
    # gamma = lam = 1, V = 0.5 everywhere, 1 at the end: each token's reward to go is 1, so each A is 0.5.
    rewards, values = row(0, 0, 1), row(0.5, 0.5, 0.5)
    close(gae(rewards, values, ALL, gamma=1.0, lam=1.0)[0], [[0.5, 0.5, 0.5]])
    close(rewards - values, [[-0.5, -0.5, 0.5]])  # the naive one punishes every token but the last


def test_trap_15_credit_carries_across_tokens_that_were_not_sampled():
    # Sampled, tool, sampled; gamma = 1, lam = 0.5.  d_last = 1 - 0.8 = 0.2;  d_first = 0.8 - 0.5 = 0.3
    # A_first = 0.3 + 0.5*0.2 = 0.4, whatever stands on the tool's token.
    mask = torch.tensor([[True, False, True]])
    rewards, values = row(0, 0, 1), row(0.5, 0.9, 0.8)
    close(gae(rewards, values, mask, gamma=1.0, lam=0.5)[0], [[0.4, 0.0, 0.2]])
    # Naive: the tool's token as a step of its own with its value zeroed. A_tool = 0.8 + 0.5*0.2 = 0.9;
    # A_first = (0 - 0.5) + 0.5*0.9 = -0.05: the sign flips.
    naive, _ = gae(rewards, values * mask, ALL, gamma=1.0, lam=0.5)
    close(naive, [[-0.05, 0.9, 0.2]])
    close(n_step(rewards, values, mask, gamma=1.0, n=1), [[0.3, 0.0, 0.2]])


def test_trap_1_the_episode_ends_on_the_last_real_token():
    # One answer of two tokens, then padding on which the critic still says 5. gamma = lam = 1:
    # A1 = 1 - 0.6 = 0.4, A0 = 1 - 0.5 = 0.5. Bootstrapping from the padding gives A1 = 1 + 5 - 0.6 = 5.4.
    mask = torch.tensor([[True, True, False]])
    rewards, values = row(0, 1, 0), row(0.5, 0.6, 5.0)
    close(gae(rewards, values, mask, gamma=1.0, lam=1.0)[0], [[0.5, 0.4, 0.0]])
    close(td_residuals(rewards, values, mask, gamma=1.0), [[0.1, 0.4, 0.0]])
    close(td_residuals(rewards, values, ALL, gamma=1.0)[:, 1], [5.4])
