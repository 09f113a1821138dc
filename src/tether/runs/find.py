"""Finding what a run left behind by the name a person gives it: a run's folder, a model's folder, or a model's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tether.errors import ConfigError
from tether.runs.folder import RECIPE, is_run


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
    return name


def run_config(name: str) -> dict[str, Any]:
    """The resolved recipe of a run's folder, also where its model's folder is named; empty where it is no run."""
    folder = Path(name).expanduser()
    for place in (folder, folder.parent):
        if is_run(place):
            try:
                config = json.loads((place / RECIPE).read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{place / RECIPE} is damaged ({error})") from None
            return config if isinstance(config, dict) else {}
    return {}
