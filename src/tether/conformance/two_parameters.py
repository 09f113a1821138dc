"""Whole updates of a policy with two parameters, through the same learner and update rules as a language model.

At feature x the policy picks 1 with probability sigmoid(theta_0 + theta_1 x), else 0.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tether.algorithms.algorithm import AdvantageSettings, Algorithm, MinibatchEpochs
from tether.algorithms.estimators import GAE
from tether.algorithms.objectives import Clip, PolicyObjective, Unclipped
from tether.algorithms.trpo import TrustRegion, TrustRegionStep, surrogate_at_old
from tether.config.methods import TRPOSettings
from tether.learner.learner import Learner, LearnerSettings
from tether.ops.trust_region import conjugate_gradient
from tether.types import EvaluatedBatch, Experience, Sequences, TokenOutputs, extend


@dataclass(frozen=True, kw_only=True)
class Featured(Experience):
    """Experience whose states are features; its tokens are the actions 0 and 1."""

    features: Tensor  # (B, T)


class TwoParameterPolicy(nn.Module):
    """log pi(1) = log sigmoid(z), log pi(0) = log sigmoid(-z), z = theta_0 + theta_1 x."""

    def __init__(self, theta: list[float], dtype: torch.dtype) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(theta, dtype=dtype))

    def both(self, features: Tensor) -> Tensor:
        """(..., 2) log-probabilities of 0 and of 1."""
        z = self.theta[0] + self.theta[1] * features
        return nn.functional.logsigmoid(torch.stack([-z, z], dim=-1))

    def forward(self, batch: Featured) -> TokenOutputs:
        """Log-probs and entropy (B, T), 0 off the mask, like every model's."""
        both = self.both(batch.features)
        taken = both.gather(-1, batch.tokens[..., None])[..., 0]
        entropy = -(both.exp() * both).sum(dim=-1)
        off = ~batch.response_mask
        return TokenOutputs(taken.masked_fill(off, 0.0), entropy.masked_fill(off, 0.0))

    def distributions(self, batch: Featured) -> Tensor:
        """(N, 2)."""
        return self.both(batch.features[batch.response_mask])

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Both parameters."""
        return {"policy": [self.theta]}


def _learner(policy: TwoParameterPolicy, rate: float, width: int) -> Learner:
    """A learner with plain gradient descent and micro-batches of two rows."""
    settings = LearnerSettings(rates={"policy": rate}, micro_batch_tokens=2 * width, max_grad_norm=None)
    return Learner(policy, settings, make_optimizer=lambda groups: torch.optim.SGD(groups))


def _batch(setup: dict[str, Any], dtype: torch.dtype) -> EvaluatedBatch:
    """The batch before advantages are computed; the caller fills in the old log-probs."""
    tokens, mask = torch.tensor(setup["actions"]), torch.tensor(setup["mask"])
    zeros, rows = torch.zeros(tokens.shape, dtype=dtype), len(tokens)
    return EvaluatedBatch(
        tokens=tokens,
        attention_mask=torch.ones_like(mask),
        response_mask=mask,
        behavior_logprobs=zeros,
        untruncated_logprobs=zeros,
        scores=torch.tensor(setup.get("scores", [0.0] * rows), dtype=dtype),
        group_ids=torch.arange(rows),
        truncated=torch.zeros(rows, dtype=torch.bool),
        old_logprobs=zeros,
        ref_logprobs=zeros,
        values=torch.tensor(setup["values"], dtype=dtype) if "values" in setup else None,
        final_values=None,
    )


def _logprobs(policy: TwoParameterPolicy, batch: Sequences, features: Tensor) -> Tensor:
    with torch.no_grad():
        taken = policy.both(features).gather(-1, batch.tokens[..., None])[..., 0]
        return taken.masked_fill(~batch.response_mask, 0.0)


def ppo_trace(setup: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A whole PPO update; see `Adapter.ppo_trace`."""
    features = torch.tensor(setup["features"], dtype=dtype)
    policy = TwoParameterPolicy(setup["theta"], dtype)
    reference = TwoParameterPolicy(setup["ref_theta"], dtype)
    batch = _batch(setup, dtype)
    batch = dataclasses.replace(
        batch,
        old_logprobs=_logprobs(policy, batch, features),
        ref_logprobs=_logprobs(reference, batch, features),
    )
    objective = PolicyObjective(
        surrogate=Clip(setup["clip_low"], setup["clip_high"]), entropy_coef=setup["entropy_coef"]
    )
    algorithm = Algorithm(
        name="trace",
        estimator=GAE(setup["gamma"], setup["lam"]),
        objective=lambda _: objective,
        update=MinibatchEpochs(1, len(batch)),
        minibatch_size=len(batch),
        advantage_settings=AdvantageSettings(kl_apply_to="reward", whiten_advantages=setup["whiten_advantages"]),
    )
    experience, _ = algorithm.advantages(batch, setup["kl_coef"])
    featured = extend(experience, Featured, features=features)
    learner = _learner(policy, setup["learning_rate"], features.shape[1])
    losses, thetas, clipped = [], [], []
    for rows in setup["minibatches"]:
        seen = learner.backward(featured.select(torch.tensor(rows)), objective)
        learner.step()
        losses.append(seen.mean("loss"))
        clipped.append(seen.mean("clip_fraction"))
        thetas.append(policy.theta.tolist())
    return {
        "old_logprobs": experience.old_logprobs,
        "rewards": experience.rewards,
        "advantages": experience.advantages,
        "losses": losses,
        "thetas": thetas,
        "clipped": clipped,
    }


def trpo_step(setup: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A whole TRPO step; see `Adapter.trpo_step`."""
    features = torch.tensor(setup["features"], dtype=dtype)
    advantages = torch.tensor(setup["advantages"], dtype=dtype)
    policy = TwoParameterPolicy(setup["theta"], dtype)
    batch = _batch(setup, dtype)
    batch = dataclasses.replace(batch, old_logprobs=_logprobs(policy, batch, features))
    experience = extend(
        batch, Featured, rewards=torch.zeros_like(advantages), advantages=advantages, returns=None, features=features
    )
    names = ("max_kl", "damping", "cg_iterations", "backtrack", "max_backtracks")
    step = TrustRegionStep(TRPOSettings(**{name: setup[name] for name in names}))
    learner = _learner(policy, 0.0, features.shape[1])
    learner.backward(experience, PolicyObjective(surrogate=Unclipped()))
    gradient = -learner.flat_gradient("policy")
    learner.discard()
    region = TrustRegion(learner, experience)
    direction = conjugate_gradient(
        lambda vector: region.curvature(vector, damping=setup["damping"]),
        gradient,
        iterations=setup["cg_iterations"],
    )
    search = step.move(learner, experience, gradient)
    assert search is not None, "all numbers of this case are finite"
    return {
        "gradient": gradient,
        "direction": direction,
        "theta": policy.theta.tolist(),
        "kl": search.kl,
        "surrogate_before": surrogate_at_old(experience),
        "surrogate_after": search.surrogate,
        "accepted": search.accepted,
        "fraction": search.fraction,
    }


class _Recorded(nn.Module):
    """A policy that returns recorded log-probs; its parameter has no effect."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, batch: Experience) -> TokenOutputs:
        """The recorded log-probs, with a gradient path of slope zero."""
        return TokenOutputs(batch.behavior_logprobs + 0.0 * self.nothing, torch.zeros_like(batch.old_logprobs))

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """The parameter without effect."""
        return {"policy": [self.nothing]}


class _Watched(Learner):
    """A learner that records the KL of each minibatch and the steps taken."""

    def __init__(self, model: Any, settings: LearnerSettings) -> None:
        super().__init__(model, settings, make_optimizer=lambda groups: torch.optim.SGD(groups))
        self.kls: list[float] = []

    def backward(self, batch: Sequences, objective: Any) -> Any:
        seen = super().backward(batch, objective)
        self.kls.append(seen.mean("approx_kl"))
        return seen


def early_stop(minibatches: list[dict[str, Any]], limit: float, dtype: torch.dtype) -> dict[str, Any]:
    """The real update rule over recorded minibatches; see `Adapter.early_stop`."""
    height = max(len(part["mask"]) for part in minibatches)
    width = max(len(row) for part in minibatches for row in part["mask"])
    columns = {name: [] for name in ("logprobs", "old_logprobs", "mask")}
    for part in minibatches:  # each minibatch becomes `height` rows of one batch; rows added as padding are masked
        for name, rows in columns.items():
            block = torch.zeros(height, width, dtype=torch.bool if name == "mask" else dtype)
            for index, row in enumerate(part[name]):
                block[index, : len(row)] = torch.tensor(row, dtype=block.dtype)
            rows.append(block)
    new, old, mask = (torch.cat(columns[name]) for name in ("logprobs", "old_logprobs", "mask"))
    setup = {"actions": torch.zeros_like(mask, dtype=torch.long).tolist(), "mask": mask.tolist()}
    off = ~mask
    batch = dataclasses.replace(
        _batch(setup, dtype), behavior_logprobs=new.masked_fill(off, 0.0), old_logprobs=old.masked_fill(off, 0.0)
    )
    zeros = torch.zeros_like(old)
    experience = extend(batch, Experience, rewards=zeros, advantages=zeros, returns=None)
    learner = _Watched(_Recorded(dtype), LearnerSettings(rates={"policy": 0.0}, micro_batch_tokens=2 * width))
    update = MinibatchEpochs(1, height, max_kl=limit)
    metrics = update(learner, experience, PolicyObjective(surrogate=Unclipped()), torch.Generator())
    return {
        "steps": int(metrics.counts.get("steps", 0)),
        "stopped": bool(metrics.counts["early_stop"]),
        "kl": learner.kls,
    }
