"""Returns and advantages. Time runs over a row's sampled tokens: step k is its k-th sampled token.

V_k is the value before the k-th sampled token, whatever stands between it and the one before; past the last one it
is the row's final value (0 where the answer ended).
"""

import math

from conformance.oracle.grids import Grid, Mask, PartialGrid, Row, sampled_columns, spread
from conformance.oracle.masks import mean, variance


def _steps(x: Grid, mask: Mask, b: int) -> Row:
    return [x[b][t] for t in sampled_columns(mask[b])]


def _row_to_go(rewards: Row, gamma: float) -> Row:
    """G_k = sum_{j >= k} gamma^(j-k) r_j, each written out in full."""
    return [math.fsum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def total_return(rewards: Grid, mask: Mask, gamma: float) -> dict[str, PartialGrid]:
    """G = sum_k gamma^k r_k of the whole row, on every sampled token of it."""
    returns: PartialGrid = []
    for b, mask_row in enumerate(mask):
        to_go = _row_to_go(_steps(rewards, mask, b), gamma)
        returns.append(spread(to_go[:1] * len(to_go), sampled_columns(mask_row), len(mask_row)))
    return {"returns": returns}


def reward_to_go(rewards: Grid, mask: Mask, gamma: float) -> dict[str, PartialGrid]:
    """G_t = r_t + gamma * G_(t+1)."""
    returns: PartialGrid = []
    for b, mask_row in enumerate(mask):
        to_go = _row_to_go(_steps(rewards, mask, b), gamma)
        returns.append(spread(to_go, sampled_columns(mask_row), len(mask_row)))
    return {"returns": returns}


def _row_n_step(rewards: Row, values: Row, final: float, gamma: float, n: int) -> Row:
    """A_k = sum_{j<m} gamma^j r_(k+j) + gamma^m V_(k+m) - V_k, with m = min(n, steps that remain)."""
    length = len(rewards)
    closed = [*values, final]
    advantages: Row = []
    for k in range(length):
        m = min(n, length - k)
        collected = [gamma**j * rewards[k + j] for j in range(m)]
        advantages.append(math.fsum([*collected, gamma**m * closed[k + m], -closed[k]]))
    return advantages


def n_step(
    rewards: Grid, values: Grid, mask: Mask, gamma: float, n: int, final_values: Row | None
) -> dict[str, PartialGrid]:
    """The n-step advantage on every sampled token."""
    advantages: PartialGrid = []
    for b, mask_row in enumerate(mask):
        final = 0.0 if final_values is None else final_values[b]
        row = _row_n_step(_steps(rewards, mask, b), _steps(values, mask, b), final, gamma, n)
        advantages.append(spread(row, sampled_columns(mask_row), len(mask_row)))
    return {"advantages": advantages}


def td_residuals(
    rewards: Grid, values: Grid, mask: Mask, gamma: float, final_values: Row | None
) -> dict[str, PartialGrid]:
    """delta_t = r_t + gamma * V_(t+1) - V_t: the one-step advantage."""
    return {"residuals": n_step(rewards, values, mask, gamma, 1, final_values)["advantages"]}


def gae(
    rewards: Grid, values: Grid, mask: Mask, gamma: float, lam: float, final_values: Row | None
) -> dict[str, PartialGrid]:
    """A_k = sum_{j >= k} (gamma * lam)^(j-k) delta_j: the sum itself, not the recursion; returns = A + V."""
    advantages: PartialGrid = []
    returns: PartialGrid = []
    for b, mask_row in enumerate(mask):
        final = 0.0 if final_values is None else final_values[b]
        row_values = _steps(values, mask, b)
        deltas = _row_n_step(_steps(rewards, mask, b), row_values, final, gamma, 1)
        row = _row_to_go(deltas, gamma * lam)
        columns = sampled_columns(mask_row)
        advantages.append(spread(row, columns, len(mask_row)))
        returns.append(spread([a + v for a, v in zip(row, row_values, strict=True)], columns, len(mask_row)))
    return {"advantages": advantages, "returns": returns}


def reinforce_weights(
    rewards: Grid, values: Grid | None, mask: Mask, gamma: float, lam: float, weighting: str
) -> dict[str, PartialGrid]:
    """The weight Psi_t on grad log pi(a_t): total return, reward to go, reward to go - V_t, or GAE."""
    if weighting == "total":
        return {"weights": total_return(rewards, mask, gamma)["returns"]}
    if weighting == "to_go":
        return {"weights": reward_to_go(rewards, mask, gamma)["returns"]}
    if values is None:
        raise ValueError(f"weighting {weighting!r} needs values")
    if weighting == "baselined":
        to_go = reward_to_go(rewards, mask, gamma)["returns"]
        return {
            "weights": [
                [None if g is None else g - v for g, v in zip(row, row_values, strict=True)]
                for row, row_values in zip(to_go, values, strict=True)
            ]
        }
    if weighting == "advantage":
        return {"weights": gae(rewards, values, mask, gamma, lam, None)["advantages"]}
    raise ValueError(f"weighting must be total, to_go, baselined or advantage, not {weighting!r}")


def group_advantages(
    scores: Row, group_ids: list[int], scale_by_std: bool, unbiased: bool, epsilon: float
) -> dict[str, Row]:
    """A_i = s_i - mean(group), divided by (std(group) + epsilon) if asked."""
    advantages: Row = []
    for score, group in zip(scores, group_ids, strict=True):
        members = [s for s, g in zip(scores, group_ids, strict=True) if g == group]
        advantage = score - mean(members)
        if scale_by_std:
            advantage /= math.sqrt(variance(members, unbiased)) + epsilon
        advantages.append(advantage)
    return {"advantages": advantages}


def leave_one_out(scores: Row, group_ids: list[int]) -> dict[str, Row]:
    """A_i = s_i - mean of the other scores of its group."""
    advantages: Row = []
    for i, score in enumerate(scores):
        others = [s for j, s in enumerate(scores) if j != i and group_ids[j] == group_ids[i]]
        advantages.append(score - mean(others))
    return {"advantages": advantages}
