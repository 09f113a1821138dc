"""The two kinds of training, from rollouts and from records, behind one face: take steps, be captured, finish."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from transformers import PreTrainedModel

from tether.config.recipes import Recipe, RLRecipe
from tether.learner.learner import Learner
from tether.models.backbones import backbone_notices
from tether.models.heads import ScalarModel
from tether.models.load import LoadedModel
from tether.models.roles import ActorCritic
from tether.protocols import StepOutcome
from tether.store.checkpoints import Checkpoint
from tether.train.build import build_rl, build_supervised
from tether.train.inputs import Inputs
from tether.train.objects import Objects
from tether.train.rl import train_rl
from tether.train.run_state import capture, restore
from tether.train.supervised import train_supervised

Stop = Callable[[], bool]
Heartbeat = Callable[[str], None]


class Training(Protocol):
    """What a run needs of the training that it runs."""

    @property
    def learner(self) -> Learner:
        """Who takes the steps."""
        ...

    @property
    def model(self) -> PreTrainedModel | ScalarModel:
        """What is saved at the end."""
        ...

    @property
    def notices(self) -> tuple[str, ...]:
        """What the person should know before it starts."""
        ...

    @property
    def total(self) -> int:
        """How many steps there are in all."""
        ...

    def as_saved(self) -> AbstractContextManager[None]:
        """Around saving the model before the last step: what is done to it at the end, for as long as that takes."""
        ...

    def steps(self, start: int, stop: Stop, heartbeat: Heartbeat) -> Iterator[StepOutcome]:
        """Take the steps from `start` on, until the last or until `stop()`."""
        ...

    def capture(self, step: int, values: dict[str, Any]) -> Checkpoint:
        """Itself after `step` steps."""
        ...

    def restore(self, checkpoint: Checkpoint) -> None:
        """Become what was captured."""
        ...

    def finish(self) -> dict[str, Any]:
        """What is done after the last step, and its report."""
        ...


class FromRollouts:
    """Reinforcement learning."""

    def __init__(
        self, recipe: RLRecipe, policy: LoadedModel, inputs: Inputs | None = None, objects: Objects | None = None
    ) -> None:
        self.parts = build_rl(recipe, policy, inputs, objects)
        self.learner, self.total = self.parts.learner, self.parts.steps
        self.model = self.parts.roles.actor.policy
        self.notices: tuple[str, ...] = self.parts.engine.notices
        self.notices += backbone_notices(self.parts.roles.actor)
        self.notices += getattr(self.parts.reward, "notices", ())
        self.controllers = self.parts.algorithm.controllers

    def as_saved(self) -> AbstractContextManager[None]:
        """As it is."""
        return nullcontext()

    def steps(self, start: int, stop: Stop, heartbeat: Heartbeat) -> Iterator[StepOutcome]:
        """Iterations; what the shared backbone remembers is of one iteration, so it is no part of the state."""
        for result in train_rl(self.parts, start=start, controllers=self.controllers, stop=stop, heartbeat=heartbeat):
            self.controllers = result.controllers
            yield result

    def capture(self, step: int, values: dict[str, Any]) -> Checkpoint:
        """Learner, controllers and random streams."""
        return capture(step, self.learner, values, controllers=(self.parts.algorithm.controllers, self.controllers))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take them back."""
        restored = restore(checkpoint, self.learner, fresh=self.parts.algorithm.controllers)
        assert restored is not None
        self.controllers = restored

    def finish(self) -> dict[str, Any]:
        """Nothing more."""
        return {}


class FromRecords:
    """Supervised fine-tuning, reward models, DPO."""

    def __init__(self, recipe: Recipe, policy: LoadedModel, inputs: Inputs | None = None) -> None:
        self.parts = build_supervised(recipe, policy, inputs)
        self.learner, self.total = self.parts.learner, self.parts.steps
        learned = self.learner.model
        assert isinstance(learned, ScalarModel | ActorCritic)
        self.notices = backbone_notices(learned)
        self.model = learned if isinstance(learned, ScalarModel) else learned.policy

    def as_saved(self) -> AbstractContextManager[None]:
        """A reward model is centred."""
        return self.parts.as_saved(self.parts)

    def steps(self, start: int, stop: Stop, heartbeat: Heartbeat) -> Iterator[StepOutcome]:
        """One optimiser step a batch."""
        for step, metrics in train_supervised(self.parts, start=start, stop=stop, heartbeat=heartbeat):
            yield StepOutcome(step, metrics)

    def capture(self, step: int, values: dict[str, Any]) -> Checkpoint:
        """Learner, random streams, and how the shared backbone found what it remembers."""
        return capture(step, self.learner, values, shared=self.parts.shared)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take them back."""
        restore(checkpoint, self.learner, shared=self.parts.shared)

    def finish(self) -> dict[str, Any]:
        """Centring and the report on held-out records, for a reward model; then what the backbone is to be kept of."""
        report = self.parts.report(self.parts)
        if self.parts.shared is not None:
            self.parts.shared.write_kept()
        return report


def build_training(
    recipe: Recipe, policy: LoadedModel, inputs: Inputs | None = None, objects: Objects | None = None
) -> Training:
    """The training that a recipe asks for; its `inputs` are read here where they were not read before."""
    if isinstance(recipe, RLRecipe):
        return FromRollouts(recipe, policy, inputs, objects)
    return FromRecords(recipe, policy, inputs)
