"""Baselines without a critic, targets with a lambda of their own, and n-step returns."""

import math
from typing import Any

from conformance.oracle.advantages import gae, n_step, reinforce_weights
from conformance.oracle.grids import Grid, Mask, PartialGrid, Row, sampled_columns
from conformance.oracle.masks import mean


def _plus_values(advantages: PartialGrid, values: Grid) -> PartialGrid:
    """A + V on sampled tokens."""
    return [
        [None if a is None else a + v for a, v in zip(row, row_values, strict=True)]
        for row, row_values in zip(advantages, values, strict=True)
    ]


def n_step_returns(
    rewards: Grid, values: Grid, mask: Mask, gamma: float, n: int, final_values: Row | None
) -> dict[str, PartialGrid]:
    """The n-step advantage, and the n-step return A + V."""
    advantages = n_step(rewards, values, mask, gamma, n, final_values)["advantages"]
    return {"advantages": advantages, "returns": _plus_values(advantages, values)}


def decoupled_gae(
    rewards: Grid, values: Grid, mask: Mask, gamma: float, lam: float, critic_lam: float, final_values: Row | None
) -> dict[str, PartialGrid]:
    """The advantages of one lambda, the returns of the other."""
    return {
        "advantages": gae(rewards, values, mask, gamma, lam, final_values)["advantages"],
        "returns": gae(rewards, values, mask, gamma, critic_lam, final_values)["returns"],
    }


def length_adaptive_gae(
    rewards: Grid, values: Grid, mask: Mask, gamma: float, alpha: float, critic_lam: float, final_values: Row | None
) -> dict[str, Any]:
    """Row by row: lambda = 1 - 1 / (alpha l) for l sampled tokens, no lower than 0."""
    lambdas = [max(0.0, 1.0 - 1.0 / (alpha * len(sampled_columns(row)))) for row in mask]
    advantages: PartialGrid = []
    for b, lam in enumerate(lambdas):
        final = None if final_values is None else [final_values[b]]
        advantages += gae([rewards[b]], [values[b]], [mask[b]], gamma, lam, final)["advantages"]
    returns = gae(rewards, values, mask, gamma, critic_lam, final_values)["returns"]
    return {"lambdas": lambdas, "advantages": advantages, "returns": returns}


def batch_mean_weights(rewards: Grid, mask: Mask, gamma: float, weighting: str) -> dict[str, Any]:
    """The weight minus the mean over answers of the whole answer's discounted return."""
    answers = [[rewards[b][t] for t in sampled_columns(row)] for b, row in enumerate(mask)]
    returns = [math.fsum(gamma**k * r for k, r in enumerate(answer)) for answer in answers if answer]
    baseline = mean(returns)
    weights = reinforce_weights(rewards, None, mask, gamma, 1.0, weighting)["weights"]
    return {
        "baseline": baseline,
        "weights": [[None if weight is None else weight - baseline for weight in row] for row in weights],
    }


def moving_average(decay: float, means: Row) -> dict[str, Row]:
    """b_k = sum_{j<k} decay^(k-1-j) x_j / sum_{j<k} decay^(k-1-j), each written out in full; b_1 = 0."""
    baselines = [0.0]
    for k in range(1, len(means) + 1):
        powers = [decay ** (k - 1 - j) for j in range(k)]
        total = math.fsum(power * x for power, x in zip(powers, means[:k], strict=True))
        baselines.append(total / math.fsum(powers))
    return {"baselines": baselines}
