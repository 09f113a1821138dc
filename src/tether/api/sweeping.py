"""Sweeps from Python: the same settings, checks and files as `tether sweep`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.api.run import Run, load_run
from tether.config.load import change_settings, load_section
from tether.config.recipe_file import any_recipe_named
from tether.config.recipes import RECIPES
from tether.config.sweep_settings import SweepSettings
from tether.files import read_plain_json, unsealed
from tether.rewards.agree import agree_to_recipe
from tether.sweeps.prepare import SweepRequest, prepare
from tether.sweeps.run_sweep import run_sweep
from tether.sweeps.sweep_table import TABLE


@dataclass(frozen=True)
class Sweep:
    """A sweep that has ended: its table, its report and its runs."""

    folder: Path
    report: Path

    @property
    def settings(self) -> list[dict[str, Any]]:
        """One mapping for each setting: its values, those of its seeds, its interval, its chance of being the best."""
        return unsealed(read_plain_json(self.folder / TABLE))["settings"]

    @property
    def best(self) -> dict[str, Any] | None:
        """The values of the best setting; None where no setting has all its seeds."""
        complete = [each for each in self.settings if each["interval"] and each["chance_of_best"] is not None]
        return next((each["values"] for each in complete if each["behind_best"] is None), None)

    def runs(self) -> list[Run]:
        """The runs of all trials that began."""
        names = sorted(path.parent.name for path in self.folder.glob("*/recipe.json"))
        return [load_run(f"{self.folder.name}/{name}", directory=self.folder.parent) for name in names]


def sweep(
    recipe: str | Path,
    vary: Mapping[str, Any] | None = None,
    *,
    seeds: int | None = None,
    sampler: str | None = None,
    budget: int | None = None,
    metric: str | None = None,
    direction: str | None = None,
    prune: bool | None = None,
    settings: Mapping[str, Any] | None = None,
    name: str | None = None,
    directory: str | Path | None = None,
    jobs: int | None = None,
) -> Sweep:
    """Run a recipe with several settings and seeds, each in a process of its own, and compare them.

    `recipe` is a recipe's file or a method's name. `vary` maps keys of the recipe to lists of values, or to ranges such
    as "0.01..0.3:log:5"; what is not given is taken from the file's section `sweep`. `settings` change the recipe for
    all trials. The same call again continues a sweep that was stopped. docs/sweeps.md describes the rest.
    """
    source = str(recipe)
    path = None if source in RECIPES else source
    given = {"vary": vary, "seeds": seeds, "sampler": sampler, "budget": budget, "metric": metric}
    given |= {"direction": direction, "prune": prune}
    asked = load_section(
        SweepSettings, "sweep", path, (), {key: each for key, each in given.items() if each is not None}
    )
    placed = {"run.directory": str(directory)} if directory is not None else {}
    chosen = change_settings(any_recipe_named(source, ()), (), {**(settings or {}), **placed})
    manifest = prepare(SweepRequest(chosen, source, asked, name))
    agree_to_recipe(chosen, path, [f"--{key}" for key in settings or ()])
    ended = run_sweep(manifest, jobs=jobs)
    return Sweep(ended.folder, ended.folder / "report.html")
