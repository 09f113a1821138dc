"""Per-token losses, to be minimised, with the gradient by the new log-probability (or value) worked out by hand."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from conformance.oracle.grids import Grid, Mask, true_places, undefined_like
from conformance.oracle.probabilities import LARGEST_EXPONENT, estimate_kl


def _per_token(token: Callable[..., tuple[float, float]], *grids: Grid) -> dict[str, Grid]:
    """Apply `token(numbers of one place) -> (loss, gradient)` to every place."""
    loss: Grid = []
    grad: Grid = []
    for rows in zip(*grids, strict=True):
        results = [token(*numbers) for numbers in zip(*rows, strict=True)]
        loss.append([token_loss for token_loss, _ in results])
        grad.append([token_grad for _, token_grad in results])
    return {"loss": loss, "grad": grad}


def reinforce_loss(logprobs: Grid, advantages: Grid) -> dict[str, Grid]:
    """L = -A log pi; dL/dlog pi = -A."""
    return _per_token(lambda new, advantage: (-advantage * new, -advantage), logprobs, advantages)


def ratio_and_slope(new: float, old: float) -> tuple[float, float]:
    """r = exp(min(new - old, 20)), and dr/dnew: r itself, or 0 where the bound makes it a constant."""
    ratio = math.exp(min(new - old, LARGEST_EXPONENT))
    return ratio, ratio if new - old <= LARGEST_EXPONENT else 0.0


def unclipped_loss(logprobs: Grid, old_logprobs: Grid, advantages: Grid) -> dict[str, Grid]:
    """L = -r A; dL/dnew = -dr/dnew A, which is -r A too, unless r is at its bound."""

    def token(new: float, old: float, advantage: float) -> tuple[float, float]:
        ratio, slope = ratio_and_slope(new, old)
        return -ratio * advantage, -slope * advantage

    return _per_token(token, logprobs, old_logprobs, advantages)


class ClippedToken(NamedTuple):
    """What the clip did to one token."""

    loss: float
    grad: float
    removed: bool  # whether the clip, or the dual clip, took the gradient away
    side: str | None  # "positive_high" and so on, where A != 0 and r lies strictly outside the range


def clip_token(
    new: float, old: float, advantage: float, clip_low: float, clip_high: float, dual_clip: float | None
) -> ClippedToken:
    """L = -min(r A, clip(r) A), and for A < 0 with a dual clip c: L = -max(min(...), c A).

    The clipped branch is a constant, so the gradient is 0 wherever it is the one chosen:
    A > 0 and r > 1 + clip_high; A < 0 and r < 1 - clip_low; A < 0 and r > c. Everywhere else it is -dr/dnew A.
    """
    ratio, slope = ratio_and_slope(new, old)
    if advantage == 0.0:
        return ClippedToken(0.0, 0.0, False, None)
    lower, upper = 1 - clip_low, 1 + clip_high
    clipped_ratio = min(max(ratio, lower), upper)
    objective = min(ratio * advantage, clipped_ratio * advantage)
    removed = (advantage > 0 and ratio > upper) or (advantage < 0 and ratio < lower)
    if dual_clip is not None and advantage < 0 and dual_clip * advantage > objective:
        objective, removed = dual_clip * advantage, True
    side = None
    if ratio > upper:
        side = "positive_high" if advantage > 0 else "negative_high"
    elif ratio < lower:
        side = "positive_low" if advantage > 0 else "negative_low"
    return ClippedToken(-objective, 0.0 if removed else -slope * advantage, removed, side)


def clip_loss(
    logprobs: Grid,
    old_logprobs: Grid,
    advantages: Grid,
    mask: Mask,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> dict[str, Any]:
    """The clip loss and its gradient on sampled tokens, and five fractions of the sampled tokens."""
    places = true_places(mask)
    loss, grad = undefined_like(mask), undefined_like(mask)
    counts = {"positive_high": 0, "positive_low": 0, "negative_high": 0, "negative_low": 0}
    removed = 0
    for b, t in places:
        token = clip_token(logprobs[b][t], old_logprobs[b][t], advantages[b][t], clip_low, clip_high, dual_clip)
        loss[b][t], grad[b][t] = token.loss, token.grad
        removed += 1 if token.removed else 0
        if token.side is not None:
            counts[token.side] += 1
    fractions = {side: count / len(places) for side, count in counts.items()}
    return {"loss": loss, "grad": grad, **fractions, "clipped": removed / len(places)}


def kl_penalty_loss(
    logprobs: Grid, old_logprobs: Grid, advantages: Grid, beta: float, estimator: str
) -> dict[str, Grid]:
    """L = -r A + beta k(d) with d = old - new; since dd/dnew = -1, dL/dnew = -dr/dnew A - beta k'(d).

    k1' = 1; k2' = d; k3' = 1 - exp(-d), or 0 where d is below -20.
    """

    def token(new: float, old: float, advantage: float) -> tuple[float, float]:
        d = old - new
        bounded = -d > LARGEST_EXPONENT
        kl_slope = {"k1": 1.0, "k2": d, "k3": 0.0 if bounded else -math.expm1(-d)}[estimator]
        ratio, slope = ratio_and_slope(new, old)
        return -ratio * advantage + beta * estimate_kl(old, new, estimator), -slope * advantage - beta * kl_slope

    return _per_token(token, logprobs, old_logprobs, advantages)


def value_loss(values: Grid, old_values: Grid, returns: Grid, clip: float | None) -> dict[str, Grid]:
    """L = (v - R)^2 / 2; with a clip, the larger of that and the same at v' = old + clamp(v - old, -clip, clip).

    dL/dv = v - R where the plain branch is the larger, 0 where the clamped branch is strictly larger: it can only be
    so where the clamp binds, and there v' does not depend on v.
    """

    def token(value: float, old: float, target: float) -> tuple[float, float]:
        plain = (value - target) ** 2 / 2
        if clip is None:
            return plain, value - target
        held = old + min(max(value - old, -clip), clip)
        clamped = (held - target) ** 2 / 2
        return (clamped, 0.0) if abs(value - old) > clip and clamped > plain else (plain, value - target)

    return _per_token(token, values, old_values, returns)
