"""Training on an environment: sample, evaluate, estimate advantages, update; and the state of it all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from tether.algorithms.algorithm import Algorithm
from tether.algorithms.select import BUILDERS
from tether.config.control_recipe import ControlRecipe
from tether.config.kl_settings import KLSettings
from tether.config.sections import RewardSettings
from tether.control.environments import Environments, Trajectories
from tether.control.experience import Stretches, by_step, by_stretch, with_advantages
from tether.control.networks import ControlModel, NumpyPolicy
from tether.learner.batching import evaluate_tokens
from tether.learner.learner import Learner
from tether.protocols import StepOutcome
from tether.seeds import derive_seed
from tether.store.checkpoints import Checkpoint
from tether.train.build import learner_settings
from tether.train.rl import Timers
from tether.train.training import Heartbeat, Stop, capture, restore
from tether.types import Metrics

ENVIRONMENTS = "environments"  # of a checkpoint's tensors and values


def control_algorithm(recipe: ControlRecipe) -> Algorithm:
    """The recipe's algorithm: the one of the language models, without a reference and without scores of whole answers.

    Stretches that end with the rollout are always bootstrapped, so the setting is applied where episodes end.
    """
    settings: Any = getattr(recipe, recipe.algorithm).model_copy(update={"bootstrap_truncated": True})
    return BUILDERS[recipe.algorithm](settings, KLSettings(apply_to="none"), RewardSettings())


class ControlTraining:
    """A `tether.train.training.Training` on an environment."""

    notices: tuple[str, ...] = ()

    def __init__(self, recipe: ControlRecipe, notify: Callable[[str], None] = lambda text: None) -> None:  # noqa: ARG005
        settings: Any = getattr(recipe, recipe.algorithm)
        self.recipe, self.total = recipe, recipe.iterations
        self.environments = Environments(
            recipe.environment,
            seed=recipe.run.seed,
            gamma=settings.gamma,
            bootstrap=settings.bootstrap_truncated,
            notify=notify,
        )
        self.algorithm = control_algorithm(recipe)
        self.controllers = self.algorithm.controllers
        spaces = self.environments.reader, self.environments.writer
        self.model = ControlModel(spaces[0].size, spaces[1].size, recipe.network, continuous=spaces[1].continuous)
        self.policy = NumpyPolicy(self.model)
        self.learner = Learner(self.model, learner_settings(recipe.optimizer, recipe.run.seed))

    def as_saved(self) -> AbstractContextManager[None]:
        """The model is saved unchanged."""
        return nullcontext()

    def finish(self) -> dict[str, Any]:
        """Close the environments."""
        recent = self.environments.recent
        self.environments.close()
        return {"score_100": float(np.mean(recent)), "episodes": len(recent)} if recent else {}

    # -- steps --------------------------------------------------------------------------------------------------------

    def steps(self, start: int, stop: Stop, heartbeat: Heartbeat) -> Iterator[StepOutcome]:
        """One iteration a step."""
        if start == 0:
            self.environments.begin()
        for step in range(start, self.total):
            self.learner.check_progress(self.recipe.run.max_skipped)
            if stop():
                return
            self.learner.set_progress((step + 0.5) / self.total)  # its middle: no step has rate 0
            yield StepOutcome(step, self.iteration(step, heartbeat))
        self.learner.check_progress(self.recipe.run.max_skipped)

    def iteration(self, step: int, heartbeat: Heartbeat = lambda phase: None) -> dict[str, float]:  # noqa: ARG005
        """Sample, learn, and return the metrics."""
        phases = Timers(self.learner.device)

        def begin(phase: str) -> None:
            heartbeat(f"{phase}, step {step}")
            phases.begin(phase)

        begin("rollout")
        rollout = self.environments.rollout(self.policy, self.random(step, "actions"), self.recipe.rollout.steps)
        begin("update")
        sums = self.learn(step, rollout)
        metrics = sums.values() | self.scores(step, rollout)
        penalty = self.controllers.coefficients().old
        metrics |= {"penalty_coef": penalty} if penalty else {}
        self.controllers = self.controllers.after(
            kl_reference=None, approx_kl=metrics.get("approx_kl_after"), samples=len(rollout.ends)
        )
        metrics |= phases.metrics()
        metrics["steps_per_second"] = self.recipe.steps_per_iteration / metrics["seconds/step"]
        return metrics

    def random(self, step: int, stream: str) -> np.random.Generator:
        """The generator of one stream in one iteration."""
        return np.random.default_rng(derive_seed(self.recipe.run.seed, stream, step))

    def learn(self, step: int, rollout: Trajectories) -> Metrics:
        """Evaluate, estimate advantages, update."""
        algorithm, learner = self.algorithm, self.learner
        order = torch.from_numpy(self.random(step, "order").permutation(self.recipe.steps_per_iteration))
        stretches = Stretches.of(rollout)
        evaluated = evaluate_tokens(
            by_step(rollout, self.policy, order),
            self.model,
            minibatch_size=algorithm.minibatch_size,
            micro_batch_tokens=learner.micro_batch_tokens,
            device=learner.device,
        )
        with torch.no_grad():
            final_values = self.model.values(stretches.final_observations)
        rows = by_stretch(evaluated, order, stretches, final_values)
        rewards = stretches.lay_out(torch.from_numpy(rollout.rewards.reshape(-1)))
        found, sums = algorithm.estimate(rows, rewards, Metrics())
        experience = with_advantages(evaluated, order, found)
        generator = torch.Generator().manual_seed(derive_seed(self.recipe.run.seed, "minibatches", step))
        objective = algorithm.objective_at(step, self.controllers.coefficients())
        sums.merge(algorithm.update_at(step)(learner, experience, objective, generator))
        return sums

    def scores(self, step: int, rollout: Trajectories) -> dict[str, float]:
        """Total rewards and lengths of the episodes that ended, as the environment gave them."""
        metrics = {
            "episodes": float(len(rollout.scores)),
            "environment_steps": float((step + 1) * self.recipe.steps_per_iteration),
        }
        if rollout.scores:
            metrics |= {
                "score": float(np.mean(rollout.scores)),
                "score_std": float(np.std(rollout.scores)),
                "score_100": float(np.mean(self.environments.recent)),
                "episode_length": float(np.mean(rollout.lengths)),
            }
        return metrics

    # -- state --------------------------------------------------------------------------------------------------------

    def capture(self, step: int, values: dict[str, Any]) -> Checkpoint:
        """Learner, controllers, random generators and environments."""
        checkpoint = capture(step, self.learner, values, controllers=(self.algorithm.controllers, self.controllers))
        tensors, numbers = self.environments.state()
        return dataclasses.replace(
            checkpoint,
            tensors={**checkpoint.tensors, ENVIRONMENTS: tensors},
            values={**checkpoint.values, ENVIRONMENTS: numbers},
        )

    def restore(self, checkpoint: Checkpoint) -> Sequence[str]:
        """Restore them."""
        restored = restore(checkpoint, self.learner, fresh=self.algorithm.controllers)
        assert restored is not None
        self.controllers = restored
        self.environments.restore(checkpoint.tensors[ENVIRONMENTS], checkpoint.values[ENVIRONMENTS])
        return ()
