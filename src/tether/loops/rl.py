"""Reinforcement learning from rollouts: one loop for every algorithm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tether.algorithms.algorithm import Algorithm, Controllers, ExtraGradient
from tether.data.collate import collate
from tether.data.cursor import DataOrder
from tether.errors import Diverged
from tether.learner.evaluate import evaluate_tokens
from tether.learner.learner import Learner
from tether.models.roles import Roles
from tether.protocols import RewardFn, RolloutEngine, Sampling
from tether.rewards.combine import part_metrics
from tether.rewards.score import score_rollouts
from tether.seeds import derive_seed
from tether.types import Experience, Prompt, Rollout


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
    mix_in: Callable[[int], ExtraGradient] | None = None  # for an iteration, what is mixed into each of its steps
    held_out: Sequence[Prompt] = ()
    evaluate_every: int = 0


@dataclass(frozen=True)
class StepResult:
    """One iteration: what it measured, what it learned from, and one of its rollouts to look at."""

    step: int
    metrics: dict[str, float]
    experience: Experience
    sample: Rollout


def train_rl(parts: RLParts, *, stop: Callable[[], bool] = lambda: False) -> Iterator[StepResult]:
    """Sample, score, evaluate, give credit, update; again. Ends early, between two steps, once `stop()` is true."""
    controllers = parts.algorithm.controllers
    for step in range(parts.steps):
        if stop():
            return
        parts.learner.set_progress((step + 0.5) / parts.steps)  # its middle: no step has rate 0
        before = evaluate_held_out(parts) if step == 0 and parts.evaluate_every else {}
        result, controllers = rl_step(parts, step, controllers)
        after = evaluate_held_out(parts) if _evaluates(parts, step) else {}
        result.metrics.update({f"start/{name}": value for name, value in before.items()} | after)
        yield result
        if parts.learner.skipped_in_a_row >= parts.max_skipped:
            raise Diverged(
                f"{parts.learner.skipped_in_a_row} updates in a row had a loss or gradient that was not finite: lower "
                "optimizer.policy_rate or optimizer.critic_rate, or look at the rewards"
            )


def _evaluates(parts: RLParts, step: int) -> bool:
    return bool(parts.evaluate_every) and ((step + 1) % parts.evaluate_every == 0 or step + 1 == parts.steps)


def evaluate_held_out(parts: RLParts) -> dict[str, float]:
    """Scores and lengths of answers to held-out prompts, always with the same random numbers."""
    if not parts.held_out:
        return {}
    rollouts = parts.engine.generate(
        parts.held_out, parts.sampling, samples_per_prompt=1, seed=derive_seed(parts.seed, "held-out")
    )
    scores = score_rollouts(parts.reward, rollouts, max_failure_rate=parts.max_failure_rate)
    valid = [score.value for score in scores if score.valid]
    return {
        "held_out/score": sum(valid) / len(valid),
        "held_out/length": sum(rollout.response_length for rollout in rollouts) / len(rollouts),
        "held_out/ended": sum(rollout.finish == "stop" for rollout in rollouts) / len(rollouts),
    }


def rl_step(parts: RLParts, step: int, controllers: Controllers) -> tuple[StepResult, Controllers]:
    """One iteration, and the KL controllers after it."""
    algorithm, began = parts.algorithm, time.perf_counter()
    coefficients = controllers.coefficients()

    parts.engine.policy_version = step
    prompts = parts.prompts.take(step * parts.prompts_per_step, parts.prompts_per_step)
    rollouts = parts.engine.generate(
        prompts,
        parts.sampling,
        samples_per_prompt=parts.samples_per_prompt,
        seed=derive_seed(parts.seed, "rollout", step),
    )
    generated = time.perf_counter()
    scores = score_rollouts(parts.reward, rollouts, max_failure_rate=parts.max_failure_rate)
    batch, dropped = collate(
        rollouts,
        scores,
        pad_id=parts.pad_id,
        temperature=parts.sampling.temperature,
        need_groups=algorithm.needs_groups,
    )
    evaluated = evaluate_tokens(
        batch,
        parts.roles,
        minibatch_size=algorithm.minibatch_size,
        micro_tokens=parts.learner.settings.micro_tokens,
        device=parts.learner.device,
    )
    experience, measures = algorithm.credit(evaluated, coefficients.reference)
    generator = torch.Generator().manual_seed(derive_seed(parts.seed, "minibatches", step))
    objective = algorithm.objective_at(step, coefficients)
    extra = parts.mix_in(step) if parts.mix_in is not None else None
    measures.merge(algorithm.update(parts.learner, experience, objective, generator, extra))

    metrics = measures.values() | dropped | part_metrics(scores)
    metrics |= {"kl_coef": coefficients.reference} if algorithm.needs_reference else {}
    metrics |= {"penalty_coef": coefficients.old} if coefficients.old else {}
    metrics |= {"seconds/rollout": generated - began, "seconds/step": time.perf_counter() - began}
    controllers = controllers.after(
        kl_reference=metrics.get("kl_ref_k3"), kl_old=metrics.get("kl_old_after"), samples=len(batch)
    )
    return StepResult(step, metrics, experience, rollouts[0]), controllers
