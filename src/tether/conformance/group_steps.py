"""The suite's cases about groups of answers, run by what a GRPO recipe builds: from scores to the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tether.algorithms.algorithm import Coefficients
from tether.algorithms.objectives import CISPO, GSPO, PolicyObjective
from tether.algorithms.select import build_algorithm
from tether.config.recipes import GRPORecipe
from tether.conformance.adapter import Grid, Mask, Row
from tether.ops.advantages import has_spread, refilled
from tether.ops.losses import Aggregation, sequence_log_ratio
from tether.types import EvaluatedBatch, Experience, Metrics, TokenOutputs


def evaluated(old: Tensor, mask: Tensor, scores: Tensor, group_ids: list[int]) -> EvaluatedBatch:
    """A batch of scored answers without a reference and without a critic."""
    return EvaluatedBatch(
        tokens=mask.long(),
        attention_mask=torch.ones_like(mask),
        response_mask=mask,
        behavior_logprobs=old,
        untruncated_logprobs=old,
        scores=scores,
        group_ids=torch.tensor(group_ids),
        truncated=torch.zeros(len(mask), dtype=torch.bool),
        old_logprobs=old,
        ref_logprobs=None,
        values=None,
        final_values=None,
    )


def grpo_step(
    dtype: torch.dtype,
    settings: dict[str, Any],
    logprobs: Grid,
    old_logprobs: Grid,
    mask: Mask,
    scores: Row,
    group_ids: list[int],
) -> dict[str, Any]:
    """Advantages, loss and gradient of the algorithm that a recipe with these settings builds."""
    recipe = GRPORecipe.model_validate({**settings, "kl": {"apply_to": "none"}})
    algorithm, sampled = build_algorithm(recipe), torch.tensor(mask)
    new = torch.tensor(logprobs, dtype=dtype, requires_grad=True)
    old, given = torch.tensor(old_logprobs, dtype=dtype), torch.tensor(scores, dtype=dtype)
    experience, _ = algorithm.advantages(evaluated(old, sampled, given, group_ids), 0.0)
    objective = algorithm.objective(Coefficients(0.0, 0.0))
    loss = objective(TokenOutputs(new, torch.zeros_like(new)), experience).total / objective.size(experience)
    (gradient,) = torch.autograd.grad(loss, new)
    first = sampled.int().argmax(dim=1, keepdim=True)
    return {
        "advantages": experience.advantages.gather(1, first)[:, 0],
        "loss": loss.detach(),
        "grad": gradient,
    }


def gspo_loss(
    dtype: torch.dtype,
    logprobs: Grid,
    old_logprobs: Grid,
    advantages: Row,
    mask: Mask,
    clip_low: float,
    clip_high: float,
) -> dict[str, Any]:
    """The surrogate on every token of an answer, averaged over its tokens as the recipe demands."""
    sampled, new = torch.tensor(mask), torch.tensor(logprobs, dtype=dtype, requires_grad=True)
    expanded = torch.tensor(advantages, dtype=dtype)[:, None].expand(new.shape)
    batch, surrogate = (
        _experience(torch.tensor(old_logprobs, dtype=dtype), sampled, expanded),
        GSPO(clip_low, clip_high),
    )
    objective = PolicyObjective(surrogate, Aggregation("sequence"))
    (gradient,) = torch.autograd.grad(objective(TokenOutputs(new, torch.zeros_like(new)), batch).total, new)
    losses = surrogate(new.detach(), batch)
    lengths = sampled.sum(dim=1)
    removed = surrogate.cases(new.detach(), batch).clipped & sampled
    ratios = sequence_log_ratio(new.detach(), batch.old_logprobs, sampled)[:, 0].clamp(max=20.0).exp()
    return {
        "ratios": ratios,
        "loss": losses.masked_fill(~sampled, 0.0).sum(dim=1) / lengths,
        "grad": gradient,
        "clipped": removed.any(dim=1).to(dtype).mean(),
    }


def cispo_loss(
    dtype: torch.dtype,
    logprobs: Grid,
    old_logprobs: Grid,
    advantages: Grid,
    mask: Mask,
    clip_low: float,
    clip_high: float,
) -> dict[str, Any]:
    """The surrogate, its gradient, and the fraction of tokens that it reports."""
    new, metrics = torch.tensor(logprobs, dtype=dtype, requires_grad=True), Metrics()
    given = torch.tensor(advantages, dtype=dtype)
    batch = _experience(torch.tensor(old_logprobs, dtype=dtype), torch.tensor(mask), given)
    surrogate = CISPO(clip_low, clip_high)
    losses = surrogate(new, batch)
    (gradient,) = torch.autograd.grad(losses.sum(), new)
    surrogate.measure(new.detach(), batch, metrics)
    return {"loss": losses.detach(), "grad": gradient, "clipped": metrics.mean("weight_clip_fraction")}


def _experience(old: Tensor, mask: Tensor, advantages: Tensor) -> Experience:
    batch = evaluated(old, mask, old.new_zeros(len(old)), [0] * len(old))
    return Experience(**vars(batch), rewards=torch.zeros_like(old), advantages=advantages, returns=None)


def dynamic_sampling(groups: list[Row], rounds: list[list[Row]]) -> dict[str, Any]:
    """Which candidate of which round holds each place."""
    chosen = [[0, place] for place in range(len(groups))]
    spread = _spread(groups)
    missing = [spread.count(False)]
    for number, candidates in enumerate(rounds, start=1):
        for place, candidate in enumerate(refilled(spread, _spread(candidates))):
            if candidate is not None:
                chosen[place], spread[place] = [number, candidate], True
        missing.append(spread.count(False))
    return {"chosen": chosen, "missing": missing}


def _spread(groups: list[Row]) -> list[bool]:
    scores = torch.tensor([score for group in groups for score in group])
    ids = torch.tensor([place for place, group in enumerate(groups) for _ in group])
    found = has_spread(scores, ids)
    return [bool(found[ids == place][0]) for place in range(len(groups))]
