"""The routes that start, stop, resume and fork runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Path, Request
from pydantic import Field

from tether.config import RECIPES, Recipe
from tether.config.load import as_flags, change_settings, load_recipe, recipe_from_record
from tether.errors import ConfigError
from tether.store.folder import is_run
from tether.store.read import RunSummary, list_runs
from tether.studio.context import Studio, studio_of
from tether.studio.launcher import RunProcess
from tether.studio.replies import BIGGEST, Body, Refused, Reply, api_router
from tether.studio.run_queries import run_with_id, seconds_left

router = api_router()

Id = Annotated[int, Path(ge=0, le=BIGGEST)]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
TITLES = {"sft": "demonstrations", "reward": "reward model", "ppo": "policy (PPO)"}
OURS = ("run.directory", "store.url")  # the workspace says these
ELSEWHERE = "settings: the workspace says where a run goes; leave run.directory and store.url out"

Settings = dict[str, Any]


class NewRun(Body):
    """A run to be started: a method and the settings that are not its defaults, by dotted keys."""

    method: str
    settings: Settings = Field(default_factory=dict, max_length=500)


class Fork(Body):
    """Where to branch off, and what is to be different."""

    step: Annotated[int, Field(ge=0, le=BIGGEST)] | None = None
    settings: Settings = Field(default_factory=dict, max_length=500)


@router.post("/runs")
def start(request: Request, new: NewRun) -> Any:
    """Start a run in a process of its own. A setting that is wrong is told before anything starts."""
    studio = studio_of(request)
    if new.method not in RECIPES:
        raise Refused(422, f"method: choose one of {', '.join(RECIPES)}")
    name = free_name(studio, new.settings.get("run.name") or f"{new.method}-{time.strftime('%Y%m%d-%H%M%S')}")
    flags = flags_for(studio, new.settings | {"run.name": name})
    check_place(studio, load_recipe(new.method, None, flags), name)
    job = studio.launcher.tether(name, new.method, ["train", new.method, *flags])
    return Reply({"name": name, "job": job.id})


@router.post("/runs/{run}/stop")
def stop(request: Request, run: Id) -> Any:
    """Stop a run that was started here; it keeps a checkpoint, and can be resumed."""
    studio = studio_of(request)
    job = studio.launcher.stop(run_with_id(studio.opened, run).name)
    return Reply({"name": job.name, "job": job.id})


@router.post("/runs/{run}/resume")
def resume(request: Request, run: Id) -> Any:
    """Go on with a run that was stopped or interrupted."""
    studio = studio_of(request)
    found = _at_rest(studio, run)
    if found.state == "done":
        raise Refused(409, f"{found.name} has taken all its steps: fork it to go on from there")
    words = ["resume", *_named(studio, found)]
    job = studio.launcher.tether(found.name, "resume", words)
    return Reply({"name": found.name, "job": job.id})


@router.post("/runs/{run}/fork")
def fork(request: Request, run: Id, wanted: Fork) -> Any:
    """Branch off from a checkpoint with other settings."""
    studio = studio_of(request)
    found = run_with_id(studio.opened, run)
    name = free_name(studio, wanted.settings.get("run.name") or f"{found.name}-fork-{time.strftime('%H%M%S')}")
    flags = flags_for(studio, wanted.settings | {"run.name": name})
    forked = change_settings(recipe_from_record(dict(found.config)), flags).run
    if (forked.directory, forked.name) != (str(studio.opened.workspace.directory), name):
        raise ConfigError(ELSEWHERE)
    at = [] if wanted.step is None else [f"--step={wanted.step}"]
    words = ["fork", *_named(studio, found), *at, *flags]
    job = studio.launcher.tether(name, "fork", words)
    return Reply({"name": name, "job": job.id})


@router.get("/jobs")
def jobs(request: Request) -> Any:
    """What this server started, and how it fares."""
    studio = studio_of(request)
    started = studio.launcher.jobs()
    runs = list_runs(studio.opened) if started else []
    return Reply({"jobs": [job.as_json() | {"stages": stages_of(studio, job, runs)} for job in started]})


def stages_of(studio: Studio, job: RunProcess, runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """The runs that a process makes, one after the other; `run` is null for one that has not begun.

    A process with a plan (vote_training.py) makes one run a command, below a folder of its own name.
    """
    plan = studio.opened.workspace.folder(job.name) / "data" / "plan.json"
    try:
        methods = [words[1] for words in json.loads(plan.read_text(encoding="utf-8"))["commands"]]
    except (OSError, ValueError, KeyError, IndexError):
        methods = []
    names = {f"{job.name}/{method}": method for method in methods} or {job.name: job.kind}
    known = {run.name: run for run in runs}
    return [
        {"title": TITLES.get(method, method), "run": _progress(studio, known.get(name))}
        for name, method in names.items()
    ]


def _progress(studio: Studio, run: RunSummary | None) -> dict[str, Any] | None:
    if run is None:
        return None
    shown = {"id": run.id, "name": run.name, "state": run.state, "step": run.steps_done, "steps": run.steps_target}
    return shown | {"seconds_left": seconds_left(studio.opened, run)}


def _named(studio: Studio, run: RunSummary) -> list[str]:
    """A run and its workspace as words that can be nothing else: paths from the root, none of them like a flag."""
    return [str(run.folder.absolute()), f"--workspace={studio.opened.workspace.directory.absolute()}"]


def _at_rest(studio: Studio, run: int) -> RunSummary:
    found = run_with_id(studio.opened, run)
    if found.state == "running":
        raise Refused(409, f"{found.name} is running")
    if not is_run(found.folder):
        raise Refused(409, f"the folder of {found.name} is not there any more")
    return found


def free_name(studio: Studio, name: Any) -> str:
    """The name of a new run, which is also its folder."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > 120:
        raise ConfigError("run.name: use letters, digits, dots, dashes and underscores, with / between folders")
    if is_run(studio.opened.workspace.folder(name)):
        raise ConfigError(f"run.name: there is a run called {name} already; choose another name")
    return name


def flags_for(studio: Studio, settings: Settings) -> list[str]:
    """The settings as words of the command line. Where the run goes is not for the page to say."""
    taken = [key for key in OURS if key in settings]
    if taken:
        raise ConfigError(f"{taken[0]}: the workspace says this; leave it out")
    return as_flags({**settings, "run.directory": str(studio.opened.workspace.directory)})


def check_place(studio: Studio, recipe: Recipe, name: str) -> None:
    """The run goes into the workspace under its name, whatever the settings held."""
    run = recipe.run
    if (run.directory, run.name, recipe.store.url) != (str(studio.opened.workspace.directory), name, None):
        raise ConfigError(ELSEWHERE)
