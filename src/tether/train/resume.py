"""Resuming and forking a run: finding its folder, its recipe and its checkpoints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tether.config.allowed_code import code_names, is_code
from tether.config.control_recipe import ControlRecipe
from tether.config.load import change_settings, recipe_from_record
from tether.config.recipes import Recipe, RecordsRecipe, RLRecipe
from tether.config.rewards import ModelPart
from tether.config.sections import PromptSettings, TaskSettings
from tether.errors import ConfigError, UsageError
from tether.learner.ranks import current_ranks
from tether.models.load import resolve_device
from tether.models.precision import AUTO
from tether.models.save import save_model
from tether.progress import say
from tether.rewards.agree import agree_to_names, agree_to_run
from tether.store import checkpoints
from tether.store.database.open import FILE, absolute
from tether.store.folder import RECIPE, RunFolder, is_run, recipe_record, run_path
from tether.store.header import check_own_files, protected_recipe
from tether.store.lineage import models_of
from tether.train.build import load_policy
from tether.train.objects import Objects, check_objects
from tether.train.provenance import environment_of, model_changes, model_digests, other_models
from tether.train.run import Forked, run_recipe
from tether.train.training import build_training


def run_folder(words: str, directory: str = "runs") -> Path:
    """The folder of a run, by its path or by its name in the workspace."""
    for place in (Path(words).expanduser(), Path(directory) / words):
        if is_run(place):
            return place
    raise ConfigError(
        f"there is no run at {words}, nor at {Path(directory) / words}: `tether runs` lists what there is"
    )


def stored_recipe(folder: Path, *, original: bool = False) -> Recipe:
    """The recipe that a run started with, with the folder where the run is now.

    Raises ConfigError where `recipe.json` was changed; with `original` that is only a notice.
    """
    record = protected_recipe(folder, say, original=original)
    if record.get("method") == ControlRecipe.method:
        raise ConfigError(f"{folder} is a run of `tether control`: it has no language model, and only resuming goes on")
    try:
        recipe = recipe_from_record(record)
    except ValueError as error:
        raise ConfigError(f"{folder / RECIPE} is damaged, or of another version: {error}") from error
    return located(recipe, folder)


LocatedRecipe = TypeVar("LocatedRecipe", Recipe, ControlRecipe)


def located(recipe: LocatedRecipe, folder: Path) -> LocatedRecipe:
    """The recipe with the place where its run is now."""
    if recipe.run.name is not None and run_path(recipe).resolve() == folder.resolve():
        return recipe
    place, workspace = _workspace_around(folder, recipe.run.name)
    name = place.relative_to(workspace).as_posix()
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"directory": str(workspace), "name": name})})


def _workspace_around(folder: Path, name: str | None) -> tuple[Path, Path]:
    """The folder and the workspace of a run whose folder was moved, renamed, or linked.

    It is as far up as the run's name has parts, if the folder still ends in that name; else where the nearest store is.
    A folder that a link leads to belongs where the link is, if there is a store.
    """
    parts = Path(name).parts if name else ()
    for place in (absolute(folder), folder.resolve()):
        if parts and place.parts[-len(parts) :] == parts:
            found = place.parents[len(parts) - 1]
        else:
            found = next((above for above in place.parents if (above / FILE).is_file()), place.parent)
        if (found / FILE).is_file():
            break
    return place, found


def resume_run(words: str, directory: str, *, json_output: bool) -> int:
    """Resume a run to its last step."""
    recipe = resumable_recipe(run_folder(words, directory))
    return run_recipe(recipe, json_output=json_output, resume=True)


def resumable_recipe(folder: Path) -> Recipe:
    """The recipe of a run to resume. Raises ConfigError where it may not, or cannot, be resumed here."""
    recipe = stored_recipe(folder)
    if not RunFolder(folder).is_finished:
        agree_to_run(recipe, folder)
        _check_resumable(recipe, folder)
    return recipe


def start(recipe: Recipe, *, json_output: bool) -> int:
    """Start a run. Where a launcher starts lost ranks again, resume the run that they began."""
    if (begun := begun_before(recipe)) is None:
        return run_recipe(recipe, json_output=json_output)
    named = recipe.run.model_copy(update={"name": begun.name if recipe.run.name is None else recipe.run.name})
    return start_or_resume(recipe.model_copy(update={"run": named}), json_output=json_output)


def begun_before(recipe: Recipe) -> Path | None:
    """The folder of the run that this process's launcher began, where it starts the ranks again."""
    if not (launch := current_ranks().launch):
        return None
    named = [run_path(recipe)] if recipe.run.name is not None else Path(recipe.run.directory).glob("*")
    return next((folder for folder in named if RunFolder(folder).launch == launch), None)


def start_or_resume(recipe: Recipe, *, json_output: bool) -> int:
    """`--resume auto`: resume the run of this name if there is one, else start it."""
    if recipe.run.name is None:
        raise ConfigError("--resume auto needs run.name: without a name there is no telling which run is meant")
    folder = run_path(recipe)
    if not is_run(folder) or RunFolder(folder).is_free:
        return run_recipe(recipe, json_output=json_output)
    stored = stored_recipe(folder)
    before, now = _flat(recipe_record(stored)), _flat(recipe_record(recipe))
    if now.get("run.epochs") is not None and before.get("run.epochs") == now["run.epochs"]:
        now["run.steps"] = before.get("run.steps")  # follows from the data, which a resumed run checks
    changed = [key for key in {**before, **now} if not _agree(key, before.get(key), now.get(key))]
    if changed:
        raise ConfigError(
            f"{folder} was started with another recipe ({', '.join(changed)} differ): give it another run.name, or "
            f"fork it with `tether fork {folder}`"
        )
    # The recorded recipe, precisions included; only the password of a database is not recorded.
    started = stored.model_copy(update={"run": recipe.run, "store": recipe.store})
    if not RunFolder(folder).is_finished:
        _check_resumable(started, folder)
    return run_recipe(started, json_output=json_output, resume=True)


def _check_resumable(recipe: Recipe, folder: Path) -> None:
    check_own_files(folder)
    check_precision(recipe, folder)


def fork_run(words: str, directory: str, step: int | None, flags: Sequence[str], *, json_output: bool) -> int:
    """Continue from one of a run's checkpoints with changed settings, as a run of its own."""
    child, forked = forked_recipe(run_folder(words, directory), step, flags)
    begun = begun_before(child)
    if begun is not None and not RunFolder(begun).is_free:
        return run_recipe(resumable_recipe(begun), json_output=json_output, resume=True)
    return run_recipe(child, json_output=json_output, forked=forked)


def forked_recipe(
    folder: Path, step: int | None, flags: Sequence[str] = (), settings: Mapping[str, Any] | None = None
) -> tuple[Recipe, Forked]:
    """The recipe of a fork, and the checkpoint that it starts from.

    What changes is given as flags, or as `settings` by a Python program.
    """
    parent = stored_recipe(folder, original=True)
    path = _checkpoint_at(folder, step)
    checkpoint = checkpoints.read(path)
    parent_name = parent.run.name or folder.name
    named = parent.run.model_copy(update={"name": f"{parent_name}-fork-{checkpoint.step}"})
    child = change_settings(parent.model_copy(update={"run": named}), flags, settings)
    from_epochs = isinstance(child, RecordsRecipe) and child.run.epochs is not None  # known once the data is read
    if checkpoint.step >= child.run.steps and not from_epochs:
        raise ConfigError(f"run.steps is {child.run.steps}, and step {checkpoint.step} is not before it: set it higher")
    if child.model.dtype not in (parent.model.dtype, AUTO):
        raise ConfigError(
            f"--model.dtype {child.model.dtype}: {folder} was started in {parent.model.dtype}, and a fork continues "
            "in the precision of its checkpoint: leave it out, or start a new run"
        )
    check_precision(child, folder)
    typed = [*flags, *(f"--{key}" for key in settings or ())]
    agree_to_names(code_names(child), code_names(parent), folder, typed)
    return child, Forked(checkpoint, parent_name, str(folder))


def export_checkpoint(options: argparse.Namespace) -> int:
    """Write the model of a checkpoint, for a stopped run that is good enough."""
    if not options.model or options.to or options.rollouts or options.metrics or options.best:
        raise UsageError("--checkpoint goes with --model DIR alone, or with --merge, --gguf or --push")
    folder, target = run_folder(options.run, options.workspace or "runs"), Path(options.model).expanduser()
    if target.exists():
        raise UsageError(f"--model: {target} exists already; name a new folder")
    step = checkpoint_model(folder, options.checkpoint, target)
    print(json.dumps({"model": str(target), "step": step}) if options.json else f"model: {target}")
    return 0


def checkpoint_model(folder: Path, step: int, target: Path, objects: Objects | None = None) -> int:
    """Write the model after `step` steps of a run (-1: of its newest checkpoint) to a folder; returns the step.

    Of `objects` only the algorithm, which decides whether the checkpoint holds a critic, and the loader count. Of the
    code that the recipe names only `model.loader` is run, with the user's consent.
    """
    checkpoint = checkpoints.read(_checkpoint_at(folder, step if step >= 0 else None))
    recipe = stored_recipe(folder)
    if any(name.startswith(("algorithm ", "loader ")) for name in recipe.run.objects):
        check_objects(recipe, objects or Objects(), folder, "resume")
    objects = Objects(algorithm=objects.algorithm, loader=objects.loader) if objects is not None else Objects()
    if isinstance(recipe, RLRecipe) and recipe.algorithm is not None:
        has_critic = any(name.startswith("critic/") for name in checkpoint.tensors["learner"])
        objects = replace(objects, algorithm=lambda shipped: replace(shipped, needs_critic=has_critic))
    check_precision(recipe, folder)
    names = code_names(recipe)
    agree_to_names([name for name in names if name.field == "model.loader"], names, folder)
    recipe = without_code(recipe)
    policy = load_policy(recipe, loader=objects.own_loader())
    digests = model_digests(policy) | {"models": other_models(list(models_of(recipe_record(recipe))))}
    if changed := model_changes(checkpoint, digests, environment_of(policy, recipe.run.seed)):
        raise ConfigError(
            f"{', '.join(changed)} changed since the run {folder} began, so its checkpoint is not the model it was: "
            "put the old one back"
        )
    training = build_training(recipe, policy, objects=objects)
    training.restore(checkpoint)
    save_model(training.model, policy.tokenizer, target)
    return checkpoint.step


def without_code(recipe: Recipe) -> Recipe:
    """The recipe with the same model and roles, in which Tether's own parts take the place of code that it names.

    A reward model on the shared backbone stays, for it is part of what the roles share. So does `model.loader`: there
    is no model without it.
    """
    shipped = tuple(name for name in recipe.store.trackers if not is_code(name))
    recipe = recipe.model_copy(
        update={
            "store": recipe.store.model_copy(update={"trackers": shipped}),
            "run": recipe.run.model_copy(update={"doctor_rules": ()}),
        }
    )
    if not isinstance(recipe, RLRecipe):
        return recipe
    engine = "auto" if is_code(recipe.rollout.engine) else recipe.rollout.engine
    shared = tuple(part for part in recipe.reward.parts if isinstance(part, ModelPart) and part.shared)
    return recipe.model_copy(
        update={
            "task": TaskSettings(),
            "data": PromptSettings(),
            "algorithm": None,
            "rollout": recipe.rollout.model_copy(update={"engine": engine}),
            "reward": recipe.reward.model_copy(update={"parts": shared}),
            "evaluation": recipe.evaluation.model_copy(update={"every": 0, "patience": 0}),
        }
    )


def check_precision(recipe: Recipe, folder: Path) -> None:
    """Raise ConfigError where this device cannot compute in the precision of the run, which its checkpoints keep."""
    if resolve_device(recipe.model.device).type != "cpu":
        return
    if recipe.model.dtype == "bfloat16":
        raise ConfigError(
            f"{folder} was started in bfloat16, which is slow and imprecise on a CPU, so it cannot be resumed or "
            "exported here: use a CUDA device, or start a new run"
        )
    for place, part in enumerate(recipe.reward.parts if isinstance(recipe, RLRecipe) else ()):
        if isinstance(part, ModelPart) and part.dtype == "bfloat16":
            raise ConfigError(
                f"{folder} was started with its reward model (reward.parts.{place}) in bfloat16, which is slow and "
                "imprecise on a CPU: resume it on a CUDA device, or start a new run"
            )


def _agree(key: str, before: object, now: object) -> bool:
    """Whether a resumed run may have this value of a key."""
    if key in ("run.directory", "run.name"):  # the same folder has many spellings
        return True
    chosen_then = key.endswith("dtype") and now == AUTO  # the record has the dtype that was chosen then
    return chosen_then or before == now


def _checkpoint_at(folder: Path, step: int | None) -> Path:
    """The checkpoint after `step` steps, or the newest."""
    found = dict(checkpoints.listed(RunFolder(folder).checkpoints))
    if not found:
        raise ConfigError(f"{folder} has no checkpoint to fork from: set checkpoint.every for the next run")
    if step is None:
        return found[max(found)]
    if step not in found:
        steps = ", ".join(map(str, found))
        raise ConfigError(f"--step: {folder} has checkpoints after {steps} steps; checkpoint.keep_every keeps more")
    return found[step]


def _flat(record: object, prefix: str = "") -> dict[str, object]:
    """A nested record by dotted keys; the items of a list by their places."""
    if not isinstance(record, dict | list):
        return {prefix: record}
    flat: dict[str, object] = {}
    for key, value in record.items() if isinstance(record, dict) else enumerate(record):
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
