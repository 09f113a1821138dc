"""The plan of a run (memory, time) and what its steps really took; checks that the run fits into memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tether.config.recipes import Recipe, RLRecipe
from tether.data.examples import Ranking
from tether.errors import ConfigError
from tether.learner.ranks import current_ranks
from tether.models.load import LoadedModel, resolve_device
from tether.plan.machine import Machine, device_memory, device_name, machine_for
from tether.plan.plan import Plan, free_memory, make_plan, weights_fit, weights_on_disk, whole_fits
from tether.plan.table import Measured
from tether.plan.workload import PROMPTS_LOOKED_AT, Lengths, Shape, shape_of
from tether.protocols import StepHook, StepOutcome
from tether.store.find import find_model
from tether.train.training import FromRecords, FromRollouts, Training

FILE = "plan.json"
LARGE = 2**31  # bytes of weights on disk above which the plan is checked before loading


@dataclass(frozen=True)
class RunPlan:
    """Predictions and measurements."""

    plan: Plan
    measured: Measured

    @classmethod
    def of(cls, recipe: Recipe, shape: Shape, training: Training, policy: LoadedModel) -> RunPlan:
        """Predict, and start to measure."""
        device = policy.model.device
        machine = machine_for(str(device), recipe.model.dtype)
        algorithm = training.parts.algorithm if isinstance(training, FromRollouts) else None
        ranks = current_ranks().count
        plan = make_plan(recipe, shape, _lengths(recipe, training, policy), machine, algorithm, ranks)
        return cls(plan, Measured(on_cpu=device.type == "cpu"))

    def as_json(self) -> dict[str, Any]:
        """Both, as plain data."""
        return {"predicted": self.plan.as_json(), "measured": self.measured.as_json()}


class PlanMeasurements(StepHook):
    """Measures time, tokens and memory of the steps, to compare with the plan."""

    def __init__(self, measured: Measured) -> None:
        self.measured = measured

    def after_step(self, outcome: StepOutcome) -> None:
        """Add a step."""
        self.measured.see(outcome.metrics)

    def finish(self) -> None:
        """Read the peak memory of the process, before saving the model adds to it."""
        self.measured.finish()


def check_weights(recipe: Recipe, free: int | None = None) -> None:
    """Raise ConfigError, before loading, where the weights, gradients and optimizer state of a large model cannot fit.

    `free` are the bytes to plan for, by default those that are. A small model is looked at once it is loaded.
    """
    path = find_model(recipe.model.path)
    if recipe.run.memory_check != "error" or weights_on_disk(path) < LARGE:
        return
    device = resolve_device(recipe.model.device)
    machine = Machine(device.type, device_name(device), device_memory(device), 1.0, 1.0, "not measured")
    free = free_memory(device) if free is None else free
    judged = weights_fit(recipe, shape_of(path), machine, free, current_ranks().count)
    if judged.verdict == "refused":
        raise ConfigError(judged.sentence)


def check_room(recipe: Recipe, plan: Plan, training: Training, free: int, notify: Callable[[str], None]) -> None:
    """Raise ConfigError where a run does not fit into `free` bytes, or shrink its micro-batches, as the recipe says."""
    if recipe.run.memory_check == "off":
        return
    judged = whole_fits(recipe, plan, free)
    if judged.verdict == "refused" and recipe.run.memory_check == "error":
        raise ConfigError(judged.sentence)
    if judged.sentence:
        notify(judged.sentence[0].upper() + judged.sentence[1:])
    if judged.micro_batch_tokens is not None:
        training.learner.micro_batch_tokens = judged.micro_batch_tokens


def _lengths(recipe: Recipe, training: Training, policy: LoadedModel) -> Lengths:
    if isinstance(recipe, RLRecipe):
        assert isinstance(training, FromRollouts)
        return Lengths.of(training.parts.prompts.take(0, PROMPTS_LOOKED_AT), policy.tokenizer)
    assert isinstance(training, FromRecords)
    examples = training.parts.examples.items
    rows = [row for each in examples for row in (each.rows if isinstance(each, Ranking) else (each,))]
    return Lengths.of_rows([len(row.tokens) for row in rows])
