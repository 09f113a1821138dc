"""Reinforcement learning from rollouts: one loop for every algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.algorithms.algorithm import Algorithm, Controllers, ExtraGradient, TokenObjective
from tether.data.order import DataOrder
from tether.data.rows import collate
from tether.learner.batching import evaluate_tokens
from tether.learner.learner import Learner
from tether.learner.ranks import Codec
from tether.models.roles import Roles
from tether.models.shared_backbone import SharedBackbone
from tether.protocols import RewardFn, RolloutEngine, Sampling
from tether.rewards.combine import failure_errors, part_metrics
from tether.rewards.function import score_rollouts
from tether.rollout.native import check_rollouts
from tether.seeds import derive_seed
from tether.train.timers import Timers
from tether.train.token_stats import TokenStats
from tether.types import Experience, Metrics, Prompt, Rollout, Score

Heartbeat = Callable[[str], None]
"""Told what comes next, such as `rollout, step 12`: whoever waits for progress hears of it."""


@dataclass(frozen=True)
class RLParts:
    """What a run is made of; none of it knows the others."""

    algorithm: Algorithm
    roles: Roles
    learner: Learner
    engine: RolloutEngine
    reward: RewardFn
    prompts: DataOrder[Prompt]
    sampling: Sampling
    prompts_per_step: int
    samples_per_prompt: int
    max_failure_rate: float
    max_skipped: int
    pad_id: int
    seed: int
    steps: int
    ptx: Callable[[int], ExtraGradient] | None = None  # for an iteration, what is mixed into each of its steps
    held_out: Sequence[Prompt] = ()
    evaluate_every: int = 0
    shared: SharedBackbone | None = None  # layers that remember what they were run on
    top_tokens_at: Callable[[int], int] = lambda step: 0  # noqa: ARG005 how many of a step's likeliest tokens are kept


@dataclass(frozen=True)
class StepResult:
    """One iteration: what it measured, what it learned from, and the KL controllers after it.

    Row b of the experience is `rollouts[b]`, which was scored `scores[b]`.
    """

    step: int
    metrics: dict[str, float]
    experience: Experience
    rollouts: list[Rollout]
    scores: list[Score]
    controllers: Controllers
    ratios: Tensor  # (B, T) new / old in the update's last pass over each token
    clipped: Tensor | None  # (B, T) bool
    reward_errors: tuple[str, ...] = ()  # what the reward said of answers that it could not score


def _nothing(_: str) -> None:
    """Nobody wants to know."""


def train_rl(
    parts: RLParts,
    *,
    start: int = 0,
    controllers: Controllers | None = None,
    stop: Callable[[], bool] = lambda: False,
    heartbeat: Heartbeat = _nothing,
) -> Iterator[StepResult]:
    """Sample, score, evaluate, give credit, update; again. Ends early, between two steps, once `stop()` is true.

    To go on where a run stood takes the number of steps it had taken and the controllers after them.
    """
    controllers = controllers or parts.algorithm.controllers
    for step in range(start, parts.steps):
        parts.learner.check_progress(parts.max_skipped)
        if stop():
            return
        parts.learner.set_progress((step + 0.5) / parts.steps)  # its middle: no step has rate 0
        if parts.shared is not None:
            parts.shared.forget()  # an iteration owes nothing to the ones before it, so that any may be the first
        before = evaluate_held_out(parts) if step == 0 and parts.evaluate_every else {}
        result = rl_step(parts, step, controllers, heartbeat)
        controllers = result.controllers
        after = evaluate_held_out(parts) if _evaluates(parts, step) else {}
        result.metrics.update({f"start/{name}": value for name, value in before.items()} | after)
        yield result
    parts.learner.check_progress(parts.max_skipped)


def _evaluates(parts: RLParts, step: int) -> bool:
    return bool(parts.evaluate_every) and ((step + 1) % parts.evaluate_every == 0 or step + 1 == parts.steps)


def evaluate_held_out(parts: RLParts) -> dict[str, float]:
    """Scores and lengths of answers to held-out prompts, always with the same random numbers.

    Scores that are missing or not finite are left out; where every one is, there is no mean.
    """
    if not parts.held_out:
        return {}
    rollouts = parts.engine.generate(
        parts.held_out, parts.sampling, samples_per_prompt=1, seed=derive_seed(parts.seed, "held-out")
    )
    check_rollouts(parts.engine, rollouts, parts.held_out, 1)
    scores = score(parts, rollouts)
    usable = [score.value for score in scores if score.usable]
    return {
        **({"held_out/score": sum(usable) / len(usable)} if usable else {}),
        "held_out/length": sum(rollout.response_length for rollout in rollouts) / len(rollouts),
        "held_out/ended": sum(rollout.finish == "stop" for rollout in rollouts) / len(rollouts),
    }


SCORES = Codec[list[Score]](
    lambda scores: ([[score.value, dict(score.parts), score.valid, score.error] for score in scores], {}),
    lambda value, _: [Score(*score) for score in value],
)


def score(parts: RLParts, rollouts: Sequence[Rollout]) -> list[Score]:
    """One score for each rollout. With several ranks the reward runs on rank 0 alone."""
    return parts.learner.ranks.first(
        lambda: score_rollouts(parts.reward, rollouts, max_failure_rate=parts.max_failure_rate), SCORES
    )


def rl_step(parts: RLParts, step: int, controllers: Controllers, heartbeat: Heartbeat = _nothing) -> StepResult:
    """One iteration."""
    algorithm, learner, phases = parts.algorithm, parts.learner, Timers(parts.learner.device)
    coefficients = controllers.coefficients()

    def begin(phase: str) -> None:
        heartbeat(f"{phase}, step {step}")
        phases.begin(phase)

    begin("rollout")
    parts.engine.policy_version = step
    prompts = parts.prompts.take(step * parts.prompts_per_step, parts.prompts_per_step)
    rollouts = parts.engine.generate(
        prompts,
        parts.sampling,
        samples_per_prompt=parts.samples_per_prompt,
        seed=derive_seed(parts.seed, "rollout", step),
    )
    check_rollouts(parts.engine, rollouts, prompts, parts.samples_per_prompt)
    phases.hold_beside(parts.engine.cache_bytes)
    parts.engine.release()
    begin("scores")
    scores = score(parts, rollouts)
    made = collate(
        rollouts,
        scores,
        pad_id=parts.pad_id,
        temperature=parts.sampling.temperature,
        need_groups=algorithm.needs_groups,
    )
    warming = algorithm.warmup_at(step) is not None
    with learner.training_only("critic") if warming else nullcontext():
        begin("evaluation")
        evaluated = evaluate_tokens(
            made.batch,
            parts.roles,
            minibatch_size=algorithm.minibatch_size,
            micro_batch_tokens=learner.micro_batch_tokens,
            device=learner.device,
            shrink_micro_batch=learner.shrink_micro_batch,
            top_tokens=parts.top_tokens_at(step),
            ranks=learner.ranks,
            elsewhere=learner.elsewhere,
        )
        begin("update")
        experience, sums = algorithm.advantages(evaluated, coefficients.reference)
        look = TokenStats(experience, learner.ranks)
        objective = algorithm.objective_at(step, coefficients)
        sums.merge(update(parts, step, look, objective))

    metrics = sums.values() | made.dropped | part_metrics(scores)
    metrics |= {"kl_coef": coefficients.reference} if algorithm.needs_reference else {}
    metrics |= {"penalty_coef": coefficients.old} if coefficients.old else {}
    counted = {"learned": made.batch.attention_mask, "sampled": made.batch.response_mask}
    metrics |= {f"tokens/{name}": float(mask.sum()) for name, mask in counted.items()}
    metrics |= phases.metrics()
    if warming:  # the policy has not moved, so there is nothing for a controller to answer
        metrics["critic_warmup"] = 1.0
    else:
        controllers = controllers.after(
            kl_reference=metrics.get("kl_ref_k3"), approx_kl=metrics.get("approx_kl_after"), samples=len(made.batch)
        )
    return StepResult(
        step,
        metrics,
        experience,
        made.rollouts,
        made.scores,
        controllers,
        look.ratios(),
        look.clipped(objective),
        tuple(failure_errors(scores)),
    )


def update(parts: RLParts, step: int, look: TokenStats, objective: TokenObjective) -> Metrics:
    """Learn from one iteration's experience, watched by `look`; nothing is mixed in while only the critic learns."""
    generator = torch.Generator().manual_seed(derive_seed(parts.seed, "minibatches", step))
    warming = parts.algorithm.warmup_at(step) is not None
    extra = parts.ptx(step) if parts.ptx is not None and not warming else None
    update_rule = parts.algorithm.update_at(step)
    return update_rule(parts.learner, look.experience, look.watching(objective), generator, extra)
