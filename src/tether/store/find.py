"""Resolve a name that the user gives to a run's folder, a model's folder, or a model's name."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tether.config.control_recipe import ControlRecipe
from tether.config.kl_settings import START
from tether.config.recipes import RLRecipe
from tether.errors import ConfigError
from tether.files import same_place
from tether.hub.catalog import EMBEDDED, looks_like_path
from tether.store.folder import is_run
from tether.store.header import kept_recipe, protected_recipe

POLICY = "policy.json"  # in the folder of a policy of `tether control`


def find_model(name: str) -> str:
    """The model to load for `name`: the saved model if it is a run's folder, otherwise `name` itself."""
    folder = Path(name).expanduser()
    if (folder / "model" / "config.json").is_file() or (folder / "model" / "adapter_config.json").is_file():
        return str(folder / "model")
    if (folder / POLICY).is_file() or (is_run(folder) and kept_recipe(folder).get("method") == ControlRecipe.method):
        raise ConfigError(
            f"{name} is of `tether control`: it holds a policy for an environment, which is no language model; "
            "tether.control.saved.SavedPolicy reads it"
        )
    if is_run(folder):
        raise ConfigError(
            f"{name} is a run without a saved model: it is not finished, or had run.save set to false; export its "
            f"newest checkpoint with `tether export {name} --checkpoint -1 --model FOLDER`"
        )
    if not folder.exists() and looks_like_path(name):
        raise ConfigError(f"there is no run and no model at {name}{_instead(folder)}")
    return name


def find_run_or_model(name: str) -> str:
    """Resolve a run's name as well: `ppo` means `runs/ppo` if no folder or embedded model has that name."""
    named = Path("runs") / name
    known = name in EMBEDDED or Path(name).expanduser().exists()
    return str(named) if not known and not looks_like_path(name) and is_run(named) else name


def _instead(folder: Path) -> str:
    """A suggestion for a mistyped name."""
    beside = folder.parent
    try:
        names = sorted(each.name for each in beside.iterdir() if each.is_dir())
    except OSError:
        return f": {beside} does not exist either" if not beside.exists() else ""
    close = get_close_matches(folder.name, names, n=1)
    return f": did you mean {beside / close[0]}?" if close else "; `tether runs` lists the runs"


def run_of(name: str) -> Path:
    """The folder of a run, given its own folder or its model's; `name` itself if it is not a run."""
    folder = Path(name).expanduser()
    return next((place for place in (folder, folder.parent) if is_run(place)), folder)


def run_config(name: str) -> dict[str, Any]:
    """The recipe that a run started with, given its folder or its model's; empty if it is not a run.

    Raises ConfigError if `recipe.json` was changed.
    """
    place = run_of(name)
    return protected_recipe(place) if is_run(place) else {}


def reference_path(recipe: RLRecipe) -> str:
    """The model that `kl.reference` names, by itself or by its run."""
    try:
        return find_model(recipe.kl.reference)
    except ConfigError as error:
        raise ConfigError(f"kl.reference: {error}") from None


def is_start(recipe: RLRecipe) -> bool:
    """Whether the KL is to the run's own policy at its start: by the word `start`, or by the path of its model."""
    return recipe.kl.reference == START or same_place(reference_path(recipe), find_model(recipe.model.path))
