"""Finding what a run left behind by the name a person gives it: a run's folder, a model's folder, or a model's name."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tether.errors import ConfigError
from tether.hub.catalog import EMBEDDED, looks_like_path
from tether.store.folder import is_run
from tether.store.header import protected_recipe


def find_model(name: str) -> str:
    """What to load for `name`: a run's saved model where it is a run's folder, otherwise `name` itself."""
    folder = Path(name).expanduser()
    if (folder / "model" / "config.json").is_file() or (folder / "model" / "adapter_config.json").is_file():
        return str(folder / "model")
    if is_run(folder):
        raise ConfigError(
            f"{name} is a run without a saved model: it is not finished, or had run.save set to false; take what it "
            f"has learned so far with `tether export {name} --checkpoint -1 --model FOLDER`"
        )
    if not folder.exists() and looks_like_path(name):
        raise ConfigError(f"there is no run and no model at {name}{_instead(folder)}")
    return name


def find_run_or_model(name: str) -> str:
    """The same for a command that takes runs by name as well: `ppo` is `runs/ppo` where nothing else is called so."""
    named = Path("runs") / name
    known = name in EMBEDDED or Path(name).expanduser().exists()
    return str(named) if not known and not looks_like_path(name) and is_run(named) else name


def _instead(folder: Path) -> str:
    """What lies beside it, for somebody who mistyped a name."""
    beside = folder.parent
    try:
        names = sorted(each.name for each in beside.iterdir() if each.is_dir())
    except OSError:
        return f": {beside} is not there either" if not beside.exists() else ""
    close = get_close_matches(folder.name, names, n=1)
    return f": did you mean {beside / close[0]}?" if close else "; `tether runs` lists the runs there are"


def run_of(name: str) -> Path:
    """The folder of the run that is meant by its own folder or by its model's; `name` itself where it is no run."""
    folder = Path(name).expanduser()
    return next((place for place in (folder, folder.parent) if is_run(place)), folder)


def run_config(name: str) -> dict[str, Any]:
    """The recipe that a run was begun with, also where its model's folder is named; empty where it is no run.

    Raises ConfigError where the folder's recipe is another.
    """
    place = run_of(name)
    return protected_recipe(place) if is_run(place) else {}
