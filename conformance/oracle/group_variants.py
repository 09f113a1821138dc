"""Losses of groups of answers: one ratio for an answer (GSPO), a clipped weight (CISPO), Dr. GRPO and DAPO.

Also DAPO's penalty on long answers, and the groups that take the place of those without spread.
"""

import math
from typing import Any

from conformance.oracle.advantages import group_advantages
from conformance.oracle.grids import Grid, Mask, PartialGrid, Row, sampled_columns, true_places, undefined_like
from conformance.oracle.objectives import clip_token
from conformance.oracle.probabilities import LARGEST_EXPONENT


def gspo_loss(
    logprobs: Grid, old_logprobs: Grid, advantages: Row, mask: Mask, clip_low: float, clip_high: float
) -> dict[str, Any]:
    """With m the mean log-ratio of a row's l tokens and s = exp(m): L = -min(s A, clip(s) A); dL/dnew_t = dL/dm / l."""
    ratios: Row = []
    losses: Row = []
    grad: PartialGrid = undefined_like(mask)
    removed = 0
    for b, mask_row in enumerate(mask):
        columns = sampled_columns(mask_row)
        m = math.fsum(logprobs[b][t] - old_logprobs[b][t] for t in columns) / len(columns)
        answer = clip_token(m, 0.0, advantages[b], clip_low, clip_high, None)
        ratios.append(math.exp(min(m, LARGEST_EXPONENT)))
        losses.append(answer.loss)
        removed += 1 if answer.removed else 0
        for t in columns:
            grad[b][t] = answer.grad / len(columns)
    return {"ratios": ratios, "loss": losses, "grad": grad, "clipped": removed / len(mask)}


def cispo_loss(
    logprobs: Grid, old_logprobs: Grid, advantages: Grid, mask: Mask, clip_low: float, clip_high: float
) -> dict[str, Any]:
    """L = -w A log pi with the constant w = clip(r, 1 - clip_low, 1 + clip_high); dL/dnew = -w A."""
    loss, grad = undefined_like(mask), undefined_like(mask)
    places, changed = true_places(mask), 0
    for b, t in places:
        ratio = math.exp(min(logprobs[b][t] - old_logprobs[b][t], LARGEST_EXPONENT))
        weight = min(max(ratio, 1 - clip_low), 1 + clip_high)
        changed += 1 if weight != ratio else 0
        loss[b][t] = -weight * advantages[b][t] * logprobs[b][t]
        grad[b][t] = -weight * advantages[b][t]
    return {"loss": loss, "grad": grad, "clipped": changed / len(places)}


def _clipped_over(
    size: float, logprobs: Grid, old_logprobs: Grid, mask: Mask, advantages: Row, clip_low: float, clip_high: float
) -> dict[str, Any]:
    """The sum of the clipped losses of all sampled tokens / size, and its gradient."""
    losses: Row = []
    grad = undefined_like(mask)
    for b, t in true_places(mask):
        token = clip_token(logprobs[b][t], old_logprobs[b][t], advantages[b], clip_low, clip_high, None)
        losses.append(token.loss)
        grad[b][t] = token.grad / size
    return {"advantages": advantages, "loss": math.fsum(losses) / size, "grad": grad}


def dr_grpo(
    logprobs: Grid,
    old_logprobs: Grid,
    mask: Mask,
    scores: Row,
    group_ids: list[int],
    clip_low: float,
    clip_high: float,
    fixed_length: int,
) -> dict[str, Any]:
    """A = s - mean of the group; L = sum over tokens / (rows * fixed_length)."""
    advantages = group_advantages(scores, group_ids, False, False, 0.0)["advantages"]
    size = len(mask) * fixed_length
    return _clipped_over(size, logprobs, old_logprobs, mask, advantages, clip_low, clip_high)


def overlong_penalty(lengths: list[int], max_length: int, buffer: int) -> dict[str, Row]:
    """0 up to max_length - buffer, then falling in a straight line to -1 at max_length, and -1 beyond."""
    penalties: Row = []
    for length in lengths:
        start = max_length - buffer
        if length <= start:
            penalties.append(0.0)
        elif length <= max_length:
            penalties.append((start - length) / buffer)
        else:
            penalties.append(-1.0)
    return {"penalties": penalties}


def dapo(
    logprobs: Grid,
    old_logprobs: Grid,
    mask: Mask,
    scores: Row,
    group_ids: list[int],
    clip_low: float,
    clip_high: float,
    epsilon: float,
    max_length: int,
    buffer: int,
    penalty: float,
) -> dict[str, Any]:
    """Score + penalty * overlong; A = (s - mean) / (sample std + epsilon); L = sum over tokens / number of tokens."""
    lengths = [len(sampled_columns(row)) for row in mask]
    overlong = overlong_penalty(lengths, max_length, buffer)["penalties"]
    shaped = [score + penalty * o for score, o in zip(scores, overlong, strict=True)]
    advantages = group_advantages(shaped, group_ids, True, True, epsilon)["advantages"]
    size = len(true_places(mask))
    return _clipped_over(size, logprobs, old_logprobs, mask, advantages, clip_low, clip_high)


def dynamic_sampling(groups: Grid, rounds: list[Grid]) -> dict[str, Any]:
    """Round by round, the places whose scores are all equal take the next candidates whose scores are not."""
    holders = [[0, place] for place in range(len(groups))]
    held = [list(group) for group in groups]
    missing: list[int] = []
    for number, candidates in enumerate(rounds, start=1):
        flat = [place for place, group in enumerate(held) if len(set(group)) == 1]
        missing.append(len(flat))
        for candidate, group in enumerate(candidates):
            if flat and len(set(group)) > 1:
                place = flat.pop(0)
                holders[place], held[place] = [number, candidate], group
    missing.append(sum(1 for group in held if len(set(group)) == 1))
    return {"chosen": holders, "missing": missing}
