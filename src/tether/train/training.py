"""The two kinds of training, from rollouts and from records, behind one interface, and their state in checkpoints.

The position is the number of steps taken: the data cursor, the learning rates and the seed of every stream follow from
it. Checkpoints also keep the process-wide random generators, for rewards and tasks that draw from them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.algorithms.algorithm import Controllers
from tether.config.recipes import Recipe, RLRecipe
from tether.learner.learner import Learner
from tether.learner.learner_state import LearnerState
from tether.learner.ranks import Packed
from tether.models.backbones import backbone_notices
from tether.models.load import LoadedModel
from tether.models.roles import ActorCritic
from tether.models.scalar_models import ScalarModel
from tether.models.shared_backbone import SharedBackbone
from tether.ops.advantages import MovingAverage
from tether.ops.kl import KLController
from tether.protocols import StepOutcome
from tether.rollout.ahead import lag_notices
from tether.seeds import derive_seed
from tether.store.checkpoints import Checkpoint
from tether.train.build import build_rl, build_supervised
from tether.train.inputs import Inputs
from tether.train.objects import Objects
from tether.train.rl import rollout_request, train_rl
from tether.train.supervised import train_supervised

KL_IGNORED = (
    "kl.apply_to is loss, and the objective of algorithm {} does not use coefficients.reference: the KL to the "
    "reference is measured and not penalized. Add it, as in PolicyObjective(..., kl_coef=coefficients.reference)."
)
Stop = Callable[[], bool]
Heartbeat = Callable[[str], None]


class Training(Protocol):
    """The training of a run: its steps, its state and its end."""

    @property
    def learner(self) -> Learner:
        """The learner that takes the optimizer steps."""
        ...

    @property
    def model(self) -> PreTrainedModel | ScalarModel:
        """The model that is saved at the end."""
        ...

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences for the user, before the first step."""
        ...

    @property
    def total(self) -> int:
        """Number of steps."""
        ...

    @property
    def digests(self) -> dict[str, str]:
        """Digests of other models that were loaded, which a resumed run must find unchanged."""
        ...

    def as_saved(self) -> AbstractContextManager[None]:
        """A context in which the model is as it will be at the end, to save it before the last step."""
        ...

    def steps(self, start: int, stop: Stop, heartbeat: Heartbeat) -> Iterator[StepOutcome]:
        """Take the steps from `start` on, until the last or until `stop()`."""
        ...

    def capture(self, step: int, values: dict[str, Any]) -> Checkpoint:
        """A checkpoint after `step` steps."""
        ...

    def restore(self, checkpoint: Checkpoint) -> Sequence[str]:
        """Restore the state of a checkpoint. Sentences say what of it a fork cannot use."""
        ...

    def finish(self) -> dict[str, Any]:
        """Finish after the last step; returns the report."""
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
        cap = self.parts.algorithm.advantage_settings.importance_sampling_cap
        self.notices += lag_notices(self.parts.queue.lag, self.parts.engine, cap)
        if recipe.kl.coef and self.parts.algorithm.ignores_reference_kl:
            self.notices += (KL_IGNORED.format(self.parts.algorithm.name),)
        self.controllers = self.parts.algorithm.controllers
        digest = self.parts.reference_digest
        self.digests = {"reference": digest} if digest else {}

    def as_saved(self) -> AbstractContextManager[None]:
        """The model is saved unchanged."""
        return nullcontext()

    def steps(self, start: int, stop: Stop, heartbeat: Heartbeat) -> Iterator[StepOutcome]:
        """One iteration a step. The cache of the shared backbone lasts one iteration, so checkpoints leave it out."""
        for result in train_rl(self.parts, start=start, controllers=self.controllers, stop=stop, heartbeat=heartbeat):
            self.controllers = result.controllers
            yield result

    def capture(self, step: int, values: dict[str, Any]) -> Checkpoint:
        """Capture learner, controllers, random generators and the rollouts that were asked for."""
        controllers, asked = (self.parts.algorithm.controllers, self.controllers), self.parts.queue.state
        return capture(step, self.learner, values, controllers=controllers, asked=asked)

    def restore(self, checkpoint: Checkpoint) -> Sequence[str]:
        """Restore them."""
        restored = restore(checkpoint, self.learner, fresh=self.parts.algorithm.controllers)
        assert restored is not None
        self.controllers = restored
        saved = checkpoint.values.get("rollouts")
        if saved is None:
            return ()
        unusable = self.parts.queue.restore(saved, checkpoint.tensors["rollouts"], partial(rollout_request, self.parts))
        return () if unusable is None else (unusable,)

    def finish(self) -> dict[str, Any]:
        """Return an empty report."""
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
        self.digests: dict[str, str] = {}

    def as_saved(self) -> AbstractContextManager[None]:
        """Centre a reward model while it is saved."""
        return self.parts.as_saved(self.parts)

    def steps(self, start: int, stop: Stop, heartbeat: Heartbeat) -> Iterator[StepOutcome]:
        """One optimiser step a batch."""
        for step, metrics in train_supervised(self.parts, start=start, stop=stop, heartbeat=heartbeat):
            yield StepOutcome(step, metrics)

    def capture(self, step: int, values: dict[str, Any]) -> Checkpoint:
        """Capture learner, random generators, and which rows the cache of the shared backbone was computed with."""
        return capture(step, self.learner, values, shared=self.parts.shared)

    def restore(self, checkpoint: Checkpoint) -> Sequence[str]:
        """Restore them."""
        restore(checkpoint, self.learner, shared=self.parts.shared)
        return ()

    def finish(self) -> dict[str, Any]:
        """Centre a reward model and report on held-out records; write the backbone cache that is kept."""
        report = self.parts.report(self.parts)
        if self.parts.shared is not None:
            self.parts.shared.write_kept()
        return report


def build_training(
    recipe: Recipe, policy: LoadedModel, inputs: Inputs | None = None, objects: Objects | None = None
) -> Training:
    """The training that a recipe asks for; `inputs` are read here unless they are given."""
    if isinstance(recipe, RLRecipe):
        return FromRollouts(recipe, policy, inputs, objects)
    return FromRecords(recipe, policy, inputs)


Kind = TypeVar("Kind", KLController, MovingAverage)


def capture(
    step: int,
    learner: Learner,
    values: dict[str, Any],
    *,
    shared: SharedBackbone | None = None,
    controllers: tuple[Controllers, Controllers] | None = None,
    asked: Callable[[], Packed] | None = None,
) -> Checkpoint:
    """A checkpoint after `step` steps; `controllers` are the first ones and the current ones.

    Its tensors are copies: training may go on while it is written. `asked` is called last: it waits for rollouts that
    are sampled meanwhile.
    """
    state = learner.state(copy=True)
    tensors: dict[str, Mapping[str, Tensor]] = {"learner": state.tensors, "random": random_tensors()}
    if shared is not None:
        tensors["backbone"] = shared.memory()
    rollouts, columns = asked() if asked is not None else ({"asked": {}}, {})
    if rollouts["asked"]:
        values = values | {"rollouts": rollouts}
        tensors["rollouts"] = columns
    return Checkpoint(
        step,
        tensors,
        values
        | {
            "learner": state.numbers,
            "random": random_numbers(),
            "controllers": controllers_as_json(*controllers) if controllers is not None else None,
        },
    )


def restore(
    checkpoint: Checkpoint, learner: Learner, *, shared: SharedBackbone | None = None, fresh: Controllers | None = None
) -> Controllers | None:
    """Restore what `capture` kept. Returns the controllers, if any; one whose settings changed starts afresh."""
    learner.load_state(LearnerState(dict(checkpoint.tensors["learner"]), checkpoint.values["learner"]))
    if shared is not None and "backbone" in checkpoint.tensors:
        shared.restore_rows(checkpoint.tensors["backbone"])
    set_random_state(checkpoint.tensors["random"], checkpoint.values["random"])
    saved = checkpoint.values["controllers"]
    if fresh is None or saved is None:
        return fresh
    baseline = saved.get("baseline")
    return Controllers(
        _controller(fresh.reference, saved["reference"]),
        _controller(fresh.old, saved["old"]),
        fresh.baseline if fresh.baseline is None or baseline is None else _controller(fresh.baseline, baseline),
    )


# -- controllers --------------------------------------------------------------------------------------------------


def controllers_as_json(start: Controllers, now: Controllers) -> dict[str, Any]:
    """The controllers' kinds and numbers, at first and now."""
    return {
        "reference": _as_json(start.reference, now.reference),
        "old": _as_json(start.old, now.old),
        "baseline": None if now.baseline is None else _as_json(start.baseline, now.baseline),
    }


def _as_json(start: Any, now: Any) -> dict[str, Any]:
    return {"kind": type(now).__name__, "start": asdict(start), "now": asdict(now)}


def _controller(fresh: Kind, saved: Mapping[str, Any]) -> Kind:
    """The saved controller if it started like the recipe's; otherwise the recipe's, as in a fork that changes it."""
    kind: Any = type(fresh)
    settings: Any = fresh  # a dataclass: `train/objects.py` checked it
    if saved["kind"] != kind.__name__ or saved["start"].keys() != asdict(settings).keys():
        return fresh
    return kind(**saved["now"]) if fresh == kind(**saved["start"]) else fresh


# -- random generators of the process -----------------------------------------------------------------------------


def seed_everything(seed: int) -> None:
    """Start the process-wide generators from the run's seed."""
    torch.manual_seed(derive_seed(seed, "torch"))
    random.seed(derive_seed(seed, "python"))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(derive_seed(seed, "numpy") % 2**32)


def random_tensors() -> dict[str, Tensor]:
    """The states of torch's generators, by device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda/{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def random_numbers() -> dict[str, Any]:
    """The states of Python's generator, and of numpy's where it is loaded."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, list(numbers), gauss]}
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        states["numpy"] = [kind, keys.tolist(), int(position), int(has_gauss), float(cached)]
    return states


def set_random_state(tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Restore every generator; devices that no longer exist are ignored."""
    torch.set_rng_state(tensors["cpu"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda/{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda/{index}"], index)
    version, state, gauss = numbers["python"]
    random.setstate((version, tuple(state), gauss))
    if "numpy" in numbers and "numpy" in sys.modules:
        kind, keys, *rest = numbers["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
