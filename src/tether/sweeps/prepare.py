"""From what the user asked to a manifest: everything is checked before anything is trained or written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tether.config.allowed_code import SEAL, code_names, seal_record
from tether.config.control_recipe import ControlRecipe
from tether.config.recipes import RecordsRecipe, RLRecipe
from tether.config.sweep_settings import SweepSettings
from tether.errors import ConfigError
from tether.rewards import consent
from tether.store.folder import is_run, recipe_record, write_whole
from tether.sweeps.design import MAX_SETTINGS, budget_of, chosen_sampler, listed_settings
from tether.sweeps.manifest import SweepManifest, is_sweep, read_manifest
from tether.sweeps.pruning import rung_steps
from tether.sweeps.variation import AnyRecipe, Variation, read_variations

MIN_PARTS = ("loss", "kl", "error")  # a metric with such a name is better when it is lower
LENGTH = ("run.steps", "run.epochs", "run.environment_steps")


@dataclass(frozen=True)
class SweepRequest:
    """What the command line or a program asks for."""

    recipe: AnyRecipe
    source: str  # the recipe's file, or the method
    settings: SweepSettings
    name: str | None = None


def prepare(request: SweepRequest) -> SweepManifest:
    """The manifest of a new sweep, or that of the same sweep begun before; nothing is written."""
    recipe, settings = request.recipe, request.settings
    variations = read_variations(recipe, settings.vary)
    sampler = chosen_sampler(settings, variations)
    if settings.prune:
        _check_prunable(recipe, variations)
    listed = listed_settings(recipe, variations, sampler)
    budget = budget_of(settings, sampler)
    if budget is not None and budget > MAX_SETTINGS:
        raise ConfigError(f"--budget {budget}: a sweep draws at most {MAX_SETTINGS:,} settings")
    metric = settings.metric or default_metric(recipe)
    folder = Path(recipe.run.directory) / sweep_name(request)
    manifest = SweepManifest(
        folder=folder,
        recipe=recipe_record(recipe),
        source=request.source,
        variations=variations,
        sampler=sampler,
        seeds=tuple(range(recipe.run.seed, recipe.run.seed + settings.seeds)),
        metric=metric,
        direction=settings.direction or default_direction(metric),
        prune=settings.prune,
        budget=budget,
        settings=tuple(listed),
        waves=(len(listed),) if listed else (),
    )
    if is_sweep(folder):
        return begun_before(read_manifest(folder), manifest)
    if is_run(folder) or (folder.exists() and any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already and is no sweep: choose another --name, or move it away")
    return manifest


def begin_folder(manifest: SweepManifest) -> None:
    """Write a new sweep's folder: the seal of the code that its recipe names, and the manifest."""
    manifest.folder.mkdir(parents=True, exist_ok=True)
    if seal := seal_record(code_names(manifest.base), consent.current().root):
        write_whole(manifest.folder / SEAL, seal)
    manifest.write()


def sweep_name(request: SweepRequest) -> str:
    """The name of the sweep: as given, or the recipe's file without its ending."""
    name = request.name or request.recipe.run.name or Path(request.source).stem
    if not name.isprintable() or Path(name).name != name or name in (".", "..") or len(name) > 80:
        raise ConfigError(f"--name {name!r:.90} is not the name of a folder: use up to 80 letters, digits and dashes")
    return name


def begun_before(there: SweepManifest, now: SweepManifest) -> SweepManifest:
    """The sweep that is there, where it is the same; with more seeds or a larger budget it is continued with them."""
    asked, before = now.asked(), there.asked()
    differ = [key for key in asked if asked[key] != before[key]]
    if "seeds" in differ and now.seeds[: len(there.seeds)] == there.seeds and _may_grow(there):
        there = replace(there, seeds=now.seeds)
        differ.remove("seeds")
    if "budget" in differ and (now.budget or 0) > (there.budget or 0):
        there = replace(there, budget=now.budget)
        differ.remove("budget")
    if not differ:
        return replace(there, recipe=now.recipe)  # the same but for the password of a database, which is not recorded
    words = ", ".join("recipe" if key == "recipe" else f"--{key}" for key in differ)
    raise ConfigError(
        f"{there.folder} holds a sweep with other settings ({words} differ): choose another --name, or resume that one "
        f"with `tether sweep --resume {there.name}`"
    )


def _may_grow(there: SweepManifest) -> bool:
    """Whether more seeds leave the settings as they are: tpe and --prune looked at the seeds that there were."""
    return there.sampler != "tpe" and not there.prune


def default_metric(recipe: AnyRecipe) -> str:
    """The metric that judges a method, held out where the recipe evaluates."""
    if isinstance(recipe, ControlRecipe):
        return "score"
    if isinstance(recipe, RLRecipe):
        return "held_out/score" if recipe.evaluation.every else "score"
    return "held_out/loss" if isinstance(recipe, RecordsRecipe) and recipe.data.holds_out else "loss"


def default_direction(metric: str) -> str:
    """Whether less of a metric is better."""
    words = metric.rpartition("/")[2].split("_")
    return "min" if any(part in words for part in MIN_PARTS) else "max"


def total_steps(recipe: AnyRecipe) -> int:
    """The number of steps of a run of this recipe; of records in epochs it is not known before they are read."""
    return recipe.iterations if isinstance(recipe, ControlRecipe) else recipe.run.steps


def _check_prunable(recipe: AnyRecipe, variations: tuple[Variation, ...]) -> None:
    for variation in variations:
        if variation.key in LENGTH:
            raise ConfigError(
                f"--prune compares settings at the same step, and --vary {variation.key} changes the length"
            )
    if getattr(recipe.run, "epochs", None) is not None:
        raise ConfigError("--prune needs to know the number of steps: set run.steps in place of run.epochs")
    if not rung_steps(total_steps(recipe)):
        raise ConfigError(f"--prune: {total_steps(recipe)} steps are too few to stop early: set run.steps to 4 or more")
