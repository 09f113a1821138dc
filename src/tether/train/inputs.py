"""The prompts or records that a recipe names, parsed and checked before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tether.config.recipes import DPORecipe, Recipe, RewardRecipe, RLRecipe, SFTRecipe
from tether.config.sections import DataSettings
from tether.data.examples import Parsed, parse_demonstrations, parse_rankings
from tether.data.prompts import PromptRule
from tether.data.sources import places_of, shown_source
from tether.errors import ConfigError, DataError
from tether.models.tokenizer import TextModel, read_tokenizer
from tether.protocols import Task
from tether.rewards.tasks import RecipeTask, build_task, fitted
from tether.store.find import find_model


@dataclass(frozen=True)
class Inputs:
    """A task for RL; records for the rest."""

    task: RecipeTask | None = None
    train: Parsed | None = None
    held_out: Parsed | None = None
    centre: Parsed | None = None  # demonstrations that a reward model's scores are centred on

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know before training starts."""
        return self.task.notices if self.task is not None else ()


def read_before_loading(recipe: Recipe, task_object: Task | None = None, *, own_loader: bool = False) -> Inputs | None:
    """The inputs, with the tokenizer alone; None where it cannot be read by itself, and the model must come first.

    With `own_loader` the user's function gives the tokenizer together with the model.
    """
    if not isinstance(recipe, RLRecipe):
        return read_inputs(recipe)
    # First, so that a wrong file is reported even if the model is wrong too.
    task = build_task(recipe.task, recipe.data, task_object)
    if own_loader:
        return None
    try:
        model = read_tokenizer(find_model(recipe.model.path))
    except ConfigError:
        return None  # loading the model says what is wrong with it
    return Inputs(task=checked(recipe, task, model))


def read_inputs(recipe: Recipe, model: TextModel | None = None, task_object: Task | None = None) -> Inputs:
    """The prompts or records of a recipe; prompts are checked against the limits of `model`."""
    match recipe:
        case RLRecipe():
            assert model is not None
            return Inputs(task=checked(recipe, build_task(recipe.task, recipe.data, task_object), model))
        case SFTRecipe():
            return _records(recipe.data, parse_demonstrations)
        case RewardRecipe():
            found = _records(recipe.data, parse_rankings)
            centre = parse_demonstrations(recipe.reward.center_on) if recipe.reward.center_on else None
            return Inputs(train=found.train, held_out=found.held_out, centre=centre)
        case DPORecipe():
            return _records(recipe.data, parse_rankings)
        case _:
            raise ValueError(f"{recipe.method} reads neither prompts nor records")


def checked(recipe: RLRecipe, task: RecipeTask, model: TextModel) -> RecipeTask:
    """The task with the prompts that fit the model. Raises ConfigError where `evaluation.every` has no prompts."""
    if recipe.evaluation.every and not task.held_out():
        raise ConfigError(
            f"evaluation.every is {recipe.evaluation.every}, and task {recipe.task.task_name} holds out no prompts: "
            "let its held_out() return some, or set evaluation.every to 0"
        )
    return fitted(task, PromptRule.of(recipe.data, model.context_length, recipe.rollout.max_new_tokens), model)


def _records(data: DataSettings, parse: Callable[..., Parsed]) -> Inputs:
    return Inputs(train=parse(data.train, data), held_out=_held_out(data, parse))


def _held_out(data: DataSettings, parse: Callable[..., Parsed]) -> Parsed | None:
    source = data.held_out
    if source is None and data.held_out_split is not None:
        if not all(place.has_splits for place in places_of(data.train)):
            raise DataError(
                f"data.held_out_split is {data.held_out_split}, and {shown_source(data.train)} has no splits: set "
                "data.held_out to a file"
            )
        source = data.train
    return parse(source, data, split=data.held_out_split) if source is not None else None
