"""Conjugate gradient and a whole TRPO step of the two-parameter policy, with the Fisher matrix worked out by hand."""

import math
from typing import Any

from conformance.oracle import two_parameter_policy as policy
from conformance.oracle.grids import Grid, Row, true_places
from conformance.oracle.masks import mean

# A squared residual this small beside the right-hand side's is rounding: another round would divide 0 by 0.
SOLVED = 1e-30


def dot(left: Row, right: Row) -> float:
    """sum_i l_i r_i."""
    return math.fsum(a * b for a, b in zip(left, right, strict=True))


def times(matrix: Grid, vector: Row) -> Row:
    """The matrix-vector product."""
    return [dot(row, vector) for row in matrix]


def conjugate_gradient(matrix: Grid, vector: Row, iterations: int) -> dict[str, Row]:
    """From x = 0, r = p = b:  a = r.r / p.Ap;  x += a p;  r' = r - a Ap;  p = r' + (r'.r' / r.r) p."""
    solution = [0.0] * len(vector)
    residual = list(vector)
    direction = list(vector)
    squared = dot(residual, residual)
    enough = SOLVED * squared
    for _ in range(iterations):
        if squared <= enough:
            break
        image = times(matrix, direction)
        step = squared / dot(direction, image)
        solution = [x + step * d for x, d in zip(solution, direction, strict=True)]
        residual = [r - step * a for r, a in zip(residual, image, strict=True)]
        next_squared = dot(residual, residual)
        direction = [r + next_squared / squared * d for r, d in zip(residual, direction, strict=True)]
        squared = next_squared
    return {"solution": solution}


def surrogate(old_theta: Row, new_theta: Row, setup: dict[str, Any]) -> float:
    """L = mean over True of exp(log pi_new - log pi_old) A."""
    terms: Row = []
    for b, t in true_places(setup["mask"]):
        x, action = setup["features"][b][t], setup["actions"][b][t]
        ratio = math.exp(policy.logprob(new_theta, x, action) - policy.logprob(old_theta, x, action))
        terms.append(ratio * setup["advantages"][b][t])
    return mean(terms)


def mean_kl(old_theta: Row, new_theta: Row, setup: dict[str, Any]) -> float:
    """KL = mean over True of the exact KL(old || new)."""
    features = [setup["features"][b][t] for b, t in true_places(setup["mask"])]
    return mean([policy.kl_divergence(old_theta, new_theta, x) for x in features])


def surrogate_gradient(theta: Row, setup: dict[str, Any]) -> Row:
    """g = mean over True of A (a - p) (1, x): the ratio is 1 at the old theta."""
    rows: Grid = []
    for b, t in true_places(setup["mask"]):
        x, action = setup["features"][b][t], setup["actions"][b][t]
        slope = setup["advantages"][b][t] * policy.logprob_slope(theta, x, action)
        rows.append([slope, slope * x])
    return [mean([row[i] for row in rows]) for i in (0, 1)]


def fisher_matrix(theta: Row, setup: dict[str, Any], damping: float) -> Grid:
    """F = mean over True of p (1 - p) (1, x) (1, x)^T, plus damping on the diagonal."""
    features = [setup["features"][b][t] for b, t in true_places(setup["mask"])]
    weights = [policy.fisher(theta, x) for x in features]
    f00 = mean(weights)
    f01 = mean([w * x for w, x in zip(weights, features, strict=True)])
    f11 = mean([w * x * x for w, x in zip(weights, features, strict=True)])
    return [[f00 + damping, f01], [f01, f11 + damping]]


def trpo_step(setup: dict[str, Any]) -> dict[str, Any]:
    """s solves (F + damping I) s = g; the full step is s sqrt(2 max_kl / s^T (F + damping I) s), then backtrack."""
    theta = setup["theta"]
    gradient = surrogate_gradient(theta, setup)
    damped = fisher_matrix(theta, setup, setup["damping"])
    direction = conjugate_gradient(damped, gradient, setup["cg_iterations"])["solution"]
    curvature = dot(direction, times(damped, direction))
    before = surrogate(theta, theta, setup)
    result = {"gradient": gradient, "direction": direction, "surrogate_before": before}
    scale = math.sqrt(2 * setup["max_kl"] / curvature) if curvature > 0 else 0.0
    for attempt in range(setup["max_backtracks"] + 1):
        fraction = setup["backtrack"] ** attempt
        candidate = [theta[i] + fraction * scale * direction[i] for i in (0, 1)]
        after, kl = surrogate(theta, candidate, setup), mean_kl(theta, candidate, setup)
        if after > before and kl <= setup["max_kl"]:
            taken = {"theta": candidate, "kl": kl, "surrogate_after": after, "accepted": True, "fraction": fraction}
            return {**result, **taken}
    refused = {"theta": list(theta), "kl": 0.0, "surrogate_after": before, "accepted": False, "fraction": 0.0}
    return {**result, **refused}
