"""Update rules: how a batch of experience becomes optimiser steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.algorithms.algorithm import ExtraGradient, TokenObjective
from tether.learner.batching import minibatches
from tether.learner.learner import Learner
from tether.types import Experience, Metrics


@dataclass(frozen=True)
class MinibatchEpochs:
    """K epochs of minibatches (PPO paper, algorithm 1).

    Before each step the forward pass that makes its gradient also metrics KL(old || new), by the estimator k3 that is
    never negative. Above `max_kl` the step is not taken and the update ends. `measure_after` adds one pass without
    gradients at the end, for a controller that adapts to the KL the update arrived at.

    A batch with anything in it that is not finite is left out as a whole: one skipped step. A minibatch whose own pass
    is not finite is skipped, and what it measured is kept out of the means.
    """

    epochs: int
    minibatch_size: int
    max_kl: float | None = None
    measure_after: bool = False

    def __call__(
        self,
        learner: Learner,
        experience: Experience,
        objective: TokenObjective,
        generator: torch.Generator,
        extra: ExtraGradient | None = None,
    ) -> Metrics:
        """Take the steps; the first epoch in the batch's own order, the others shuffled."""
        refused = learner.skip_if_nonfinite(experience)
        if refused is not None:
            return refused
        metrics = Metrics()
        stopped = False
        steps = map(experience.select, self._steps(experience, generator))
        batch = next(steps, None)
        while batch is not None:
            seen = learner.backward(batch, objective)
            batch = next(steps, None)
            if batch is not None:
                learner.begin(batch)  # while the device is at work on the one before
            if learner.finite:
                if not metrics.weighted and "approx_kl" in seen.weighted:
                    metrics.add(
                        "first_approx_kl", seen.mean("approx_kl")
                    )  # of the very policy that sampled: 0, or a fault
                metrics.merge(seen)
                if self.max_kl is not None and "approx_kl" in seen.weighted and seen.mean("approx_kl") > self.max_kl:
                    learner.discard()
                    stopped = True
                    break
            if extra is not None:
                added = extra(learner)
                metrics.merge(added if learner.finite else Metrics())
            metrics.merge(learner.step())
        metrics.count("early_stop", float(stopped))
        if self.measure_after:
            metrics.add("approx_kl_after", *learner.measure(experience, objective).weighted["approx_kl"])
        return metrics

    def _steps(self, experience: Experience, generator: torch.Generator) -> Iterator[Tensor]:
        for epoch in range(self.epochs):
            yield from minibatches(experience, self.minibatch_size, None if epoch == 0 else generator)
