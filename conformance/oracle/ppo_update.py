"""A whole PPO update of the two-parameter policy, gradient and all, with no automatic differentiation."""

import math
from typing import Any, NamedTuple

from conformance.oracle import two_parameter_policy as policy
from conformance.oracle.advantages import gae
from conformance.oracle.grids import Grid, Row, true_places, undefined_like
from conformance.oracle.masks import whiten
from conformance.oracle.objectives import clip_token
from conformance.oracle.rewards import token_rewards


class MinibatchResult(NamedTuple):
    """One minibatch at one theta."""

    loss: float
    gradient: Row
    clipped: float


def _logprobs(theta: Row, setup: dict[str, Any]) -> Grid:
    """log pi of the action taken, on sampled tokens; undefined elsewhere."""
    logprobs = undefined_like(setup["mask"])
    for b, t in true_places(setup["mask"]):
        logprobs[b][t] = policy.logprob(theta, setup["features"][b][t], setup["actions"][b][t])
    return logprobs


def minibatch_result(
    theta: Row, setup: dict[str, Any], rows: list[int], old_logprobs: Grid, advantages: Grid
) -> MinibatchResult:
    """L = mean over True of (clip loss - entropy_coef H).

    dL/dtheta = mean of (dloss/dlog pi * (a - p) - entropy_coef * dH/dz) * (1, x), by the chain rule through z.
    """
    losses: Row = []
    slopes: list[tuple[float, float]] = []
    removed = 0
    places = [(b, t) for b in rows for t, is_sampled in enumerate(setup["mask"][b]) if is_sampled]
    for b, t in places:
        x, action = setup["features"][b][t], setup["actions"][b][t]
        token = clip_token(
            policy.logprob(theta, x, action),
            old_logprobs[b][t],
            advantages[b][t],
            setup["clip_low"],
            setup["clip_high"],
            None,
        )
        losses.append(token.loss - setup["entropy_coef"] * policy.entropy(theta, x))
        by_logit = token.grad * policy.logprob_slope(theta, x, action)
        by_logit -= setup["entropy_coef"] * policy.entropy_slope(theta, x)
        slopes.append((by_logit, by_logit * x))
        removed += 1 if token.removed else 0
    count = len(places)
    gradient = [math.fsum(slope[i] for slope in slopes) / count for i in (0, 1)]
    return MinibatchResult(math.fsum(losses) / count, gradient, removed / count)


def advantages(setup: dict[str, Any]) -> dict[str, Any]:
    """What is fixed before the first step: old log-probs, rewards, advantages."""
    mask = setup["mask"]
    old_logprobs = _logprobs(setup["theta"], setup)
    ref_logprobs = _logprobs(setup["ref_theta"], setup)
    kl = undefined_like(mask)
    for b, t in true_places(mask):
        kl[b][t] = old_logprobs[b][t] - ref_logprobs[b][t]
    rewards = token_rewards(setup["scores"], kl, mask, setup["kl_coef"])["rewards"]
    advantages: Any = gae(rewards, setup["values"], mask, setup["gamma"], setup["lam"], None)["advantages"]
    if setup["whiten_advantages"]:
        advantages = whiten(advantages, mask, shift_mean=True, unbiased=False, epsilon=1e-8)["whitened"]
    defined_rewards = undefined_like(mask)
    for b, t in true_places(mask):
        defined_rewards[b][t] = rewards[b][t]
    return {"old_logprobs": old_logprobs, "rewards": defined_rewards, "advantages": advantages}


def ppo_trace(setup: dict[str, Any]) -> dict[str, Any]:
    """For each minibatch in turn: measure the loss at theta, then theta <- theta - learning_rate * gradient."""
    experience = advantages(setup)
    theta = list(setup["theta"])
    losses: Row = []
    thetas: Grid = []
    clipped: Row = []
    for rows in setup["minibatches"]:
        result = minibatch_result(theta, setup, rows, experience["old_logprobs"], experience["advantages"])
        theta = [theta[i] - setup["learning_rate"] * result.gradient[i] for i in (0, 1)]
        losses.append(result.loss)
        thetas.append(theta)
        clipped.append(result.clipped)
    return {**experience, "losses": losses, "thetas": thetas, "clipped": clipped}
