"""The manifest of a sweep: `sweep.json` in its folder, written whole or not at all, with its digest.

It holds what was asked, every setting, and what the sweep decided: which trials failed, and which were stopped early.
Scores are not in it: they are in the store, with the runs. This module needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tether.config.control_recipe import ControlRecipe
from tether.config.load import control_from_record, recipe_from_record
from tether.errors import ConfigError, StorageError
from tether.files import read_plain_json, sealed, unsealed
from tether.store.folder import write_whole
from tether.sweeps.variation import AnyRecipe, Variation

MANIFEST = "sweep.json"  # a folder with this file is a sweep
FORMAT = 1
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: a setting with a seed."""

    setting: int
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder in that of the sweep."""
        return f"{self.setting:03d}-seed{self.seed}"


@dataclass(frozen=True)
class TrialEnd:
    """Why a trial ended before its last step: `diverged`, or `failed` with the exit code."""

    state: str
    reason: str
    exit_code: int = 0


@dataclass(frozen=True)
class PruneDecision:
    """What was decided after `step` steps of a wave: the settings that were stopped, and the median of all values."""

    wave: int
    step: int
    median: float | None
    stopped: tuple[int, ...]


@dataclass(frozen=True)
class SweepManifest:
    """Everything that a sweep needs to go on; `folder` is where it lies."""

    folder: Path
    recipe: Mapping[str, Any]
    source: str  # the recipe's file, or the method
    variations: tuple[Variation, ...]
    sampler: str
    seeds: tuple[int, ...]
    metric: str
    direction: str
    prune: bool = False
    budget: int | None = None
    threads: int = 1
    settings: tuple[Mapping[str, Any], ...] = ()
    waves: tuple[int, ...] = ()  # the number of settings after each wave
    ends: Mapping[str, TrialEnd] = field(default_factory=dict[str, TrialEnd])
    decisions: tuple[PruneDecision, ...] = ()

    @property
    def name(self) -> str:
        """The name of the sweep, of its folder, and of the group of its runs."""
        return self.folder.name

    @property
    def workspace(self) -> Path:
        """The folder of all runs."""
        return self.folder.parent

    @property
    def base(self) -> AnyRecipe:
        """The recipe that is varied."""
        if self.recipe.get("method") == ControlRecipe.method:
            return control_from_record(self.recipe)
        return recipe_from_record(self.recipe)

    @property
    def url(self) -> str | None:
        """The database of the recipe, where it names one."""
        return self.recipe["store"].get("url")

    @property
    def stopped(self) -> dict[int, int]:
        """The settings that were stopped early, and after how many steps."""
        return {setting: each.step for each in self.decisions for setting in each.stopped}

    def trials(self, settings: Iterator[int] | range | None = None) -> list[Trial]:
        """The trials of some settings, by default of all: the first seed of each, then the second, and so on."""
        chosen = list(range(len(self.settings)) if settings is None else settings)
        return [Trial(setting, seed) for seed in self.seeds for setting in chosen]

    def run_name(self, trial: Trial) -> str:
        """The name of a trial's run in the workspace."""
        return f"{self.name}/{trial.name}"

    def changed(self, **changes: Any) -> SweepManifest:
        """The manifest with changes, once they are on disk."""
        now = replace(self, **changes)
        now.write()
        return now

    def asked(self) -> dict[str, Any]:
        """What the user asked for, as plain data; a sweep of the same name must agree."""
        return {
            "recipe": _without_place(self.recipe),
            "vary": [variation.as_json() for variation in self.variations],
            "sampler": self.sampler,
            "seeds": list(self.seeds),
            "budget": self.budget,
            "metric": self.metric,
            "direction": self.direction,
            "prune": self.prune,
        }

    def write(self) -> None:
        """Write it to its folder."""
        record = {
            "format": FORMAT,
            **self.asked(),
            "recipe": dict(self.recipe),
            "source": self.source,
            "threads": self.threads,
            "settings": [dict(values) for values in self.settings],
            "waves": list(self.waves),
            "ends": {name: asdict(end) for name, end in self.ends.items()},
            "decisions": [asdict(each) for each in self.decisions],
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / MANIFEST, sealed(json.loads(json.dumps(record))))
        except OSError as error:
            raise StorageError(f"cannot write {self.folder / MANIFEST} ({error.strerror})") from error


def _without_place(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe without the keys that say where its runs are, and how the database is reached."""
    run = {key: value for key, value in recipe["run"].items() if key not in ("name", "directory")}
    store = {key: value for key, value in recipe["store"].items() if key != "url"}
    return {**recipe, "run": run, "store": store}


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds a sweep."""
    try:
        return (folder / MANIFEST).is_file()
    except OSError:  # such as a name that is too long
        return False


def read_manifest(folder: Path) -> SweepManifest:
    """The manifest in a folder; raises ConfigError where it is missing or was changed."""
    path = folder / MANIFEST
    try:
        record = unsealed(read_plain_json(path, MAX_BYTES))
        if record["format"] != FORMAT:
            raise ConfigError(f"{path} is of another version of Tether (format {record['format']})")
        return SweepManifest(
            folder=folder,
            recipe=record["recipe"],
            source=record["source"],
            variations=tuple(Variation.from_json(each) for each in record["vary"]),
            sampler=record["sampler"],
            seeds=tuple(record["seeds"]),
            metric=record["metric"],
            direction=record["direction"],
            prune=record["prune"],
            budget=record["budget"],
            threads=record["threads"],
            settings=tuple(record["settings"]),
            waves=tuple(record["waves"]),
            ends={name: TrialEnd(**end) for name, end in record["ends"].items()},
            decisions=tuple(
                PruneDecision(each["wave"], each["step"], each["median"], tuple(each["stopped"]))
                for each in record["decisions"]
            ),
        )
    except FileNotFoundError:
        raise ConfigError(f"there is no sweep in {folder}: it has no {MANIFEST}") from None
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged ({str(error).partition(chr(10))[0]}): restore it from a copy; the runs beside it are "
            "whole, and `tether runs` lists them"
        ) from error


def find_sweeps(workspace: Path) -> list[Path]:
    """The folders of the sweeps of a workspace, the most recently written first."""
    found = [path.parent for path in workspace.glob(f"*/{MANIFEST}") if path.is_file()]
    return sorted(found, key=lambda folder: (folder / MANIFEST).stat().st_mtime, reverse=True)
