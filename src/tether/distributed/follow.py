"""The other ranks: they build the training that rank 0 names, take its steps with it, and write nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tether.config.load import recipe_from_record
from tether.config.recipes import Recipe, RLRecipe
from tether.distributed.group import ProcessGroup
from tether.distributed.group_ranks import UNLIKE, GroupRanks, checksum, hear_checkpoint, prompt_of
from tether.errors import ConfigError, RankLost
from tether.models.load import LoadedModel
from tether.rewards.consent import consenting
from tether.rewards.tasks import RecipeTask
from tether.train.build import load_policy
from tether.train.inputs import Inputs
from tether.train.objects import Objects, with_named_code
from tether.train.provenance import code_digests
from tether.train.training import Training, build_training, seed_everything, set_random_state
from tether.types import Rollout, Score


def follow(group: ProcessGroup) -> None:
    """Do what rank 0 tells, until it tells the end."""
    message, _ = group.hear()
    if message["what"] == "end":
        return
    training = built(group, message)
    start = restored(training, group)
    if start is None:
        return
    steps = training.steps(start, lambda: False, lambda words: None)  # noqa: ARG005
    ranks = training.learner.ranks
    assert isinstance(ranks, GroupRanks)
    while (message := group.hear()[0])["what"] != "end":
        match message["what"]:
            case "step":
                if message["weights"] not in (None, checksum(training.learner)):
                    raise RankLost(UNLIKE)
                next(steps)
            case "whole":  # while rank 0 is at work
                with ranks.gathered():
                    if group.hear()[0]["what"] == "end":
                        return
            case "write":
                ranks.write_share(Path(message["folder"]), training.capture(0, {}))
            case what:
                raise AssertionError(f"rank 0 tells {what}")


def restored(training: Training, group: ProcessGroup) -> int | None:
    """Take over rank 0's state; the number of steps taken, or None where rank 0 found something wrong first."""
    checkpoint = hear_checkpoint(group)
    if checkpoint is None:
        return None
    if checkpoint.tensors["learner"]:
        training.restore(checkpoint)
    else:  # a sharded run begins with the weights that each rank built
        set_random_state(checkpoint.tensors["random"], checkpoint.values["random"])
        training.learner.micro_batch_tokens = int(checkpoint.values["learner"]["micro_batch_tokens"]["now"])
    return checkpoint.step


def built(group: ProcessGroup, message: dict[str, Any]) -> Training:
    """The training of a recipe, without its rewards and its task, which only rank 0 has."""
    recipe = recipe_from_record(message["recipe"])
    seed_everything(recipe.run.seed)
    policy: LoadedModel = load_policy(recipe, verify=False)
    objects = with_same_algorithm(recipe, message["code"], group.index)
    training = build_training(*without_user_code(recipe, policy, message["prompts"]), objects)
    GroupRanks(group).deal(training, recipe)
    return training


def with_same_algorithm(recipe: Recipe, code: dict[str, Any], rank: int) -> Objects:
    """The algorithm that the recipe names, which every rank runs: by the consent of rank 0, and only the same code."""
    if not isinstance(recipe, RLRecipe) or recipe.algorithm is None:
        return Objects()
    with consenting(folder=Path(code["folder"]), given=tuple(code["allowed"]), tell=None, ask=None):
        found = code_digests(recipe)
        for name, digest in code["digests"].items():
            if found.get(name) != digest:
                raise ConfigError(f"{name} is other code on rank {rank} than on rank 0: copy it to the same place")
        return with_named_code(_of_algorithm(recipe), Objects())


def _of_algorithm(recipe: RLRecipe) -> RLRecipe:
    """The recipe without the code that rank 0 alone runs."""
    store = recipe.store.model_copy(update={"trackers": ()})
    run = recipe.run.model_copy(update={"doctor_rules": ()})
    return recipe.model_copy(update={"store": store, "run": run})


def without_user_code(
    recipe: Recipe, policy: LoadedModel, prompts: dict[str, Any]
) -> tuple[Recipe, LoadedModel, Inputs | None]:
    """What to build from: rank 0's prompts, and a reward that is never called."""
    if not isinstance(recipe, RLRecipe):
        return recipe, policy, None
    training, evaluation = ([prompt_of(record) for record in prompts[name]] for name in ("training", "evaluation"))
    reward = recipe.reward.model_copy(update={"parts": ()})
    alone = {"workers": 0, "servers": ()}  # rank 0 samples where workers do
    recipe = recipe.model_copy(update={"reward": reward, "rollout": recipe.rollout.model_copy(update=alone)})
    return recipe, policy, Inputs(task=RecipeTask(training, evaluation, _never))


def _never(rollouts: Sequence[Rollout]) -> list[Score]:
    raise AssertionError(f"a reward was called on a rank that scores nothing ({len(rollouts)} rollouts)")
