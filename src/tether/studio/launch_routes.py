"""The routes that start, stop, resume and fork runs."""

from __future__ import annotations

import json
import re
import time
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import Field

from tether.config import RECIPES
from tether.config.load import change_settings, load_recipe, recipe_from_record
from tether.errors import ConfigError
from tether.runs.folder import is_run
from tether.runs.read import RunSummary
from tether.studio.context import Studio, studio_of
from tether.studio.replies import BIGGEST, Body, Refused, Reply
from tether.studio.run_queries import run_with_id

router = APIRouter(prefix="/api", default_response_class=Reply)

Id = Annotated[int, Path(ge=0, le=BIGGEST)]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
OURS = ("run.directory", "store.url")  # the workspace says these

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
    load_recipe(new.method, None, flags)
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
    words = ["resume", str(found.folder), "--workspace", str(studio.opened.workspace.directory)]
    job = studio.launcher.tether(found.name, "resume", words)
    return Reply({"name": found.name, "job": job.id})


@router.post("/runs/{run}/fork")
def fork(request: Request, run: Id, wanted: Fork) -> Any:
    """Branch off from a checkpoint with other settings."""
    studio = studio_of(request)
    found = run_with_id(studio.opened, run)
    name = free_name(studio, wanted.settings.get("run.name") or f"{found.name}-fork-{time.strftime('%H%M%S')}")
    flags = flags_for(studio, wanted.settings | {"run.name": name})
    change_settings(recipe_from_record(dict(found.config)), flags)
    at = [] if wanted.step is None else ["--step", str(wanted.step)]
    words = ["fork", str(found.folder), "--workspace", str(studio.opened.workspace.directory), *at, *flags]
    job = studio.launcher.tether(name, "fork", words)
    return Reply({"name": name, "job": job.id})


@router.get("/jobs")
def jobs(request: Request) -> Any:
    """What this server started, and how it fares."""
    return Reply({"jobs": [job.as_json() for job in studio_of(request).launcher.jobs()]})


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
    flags = [word for key, value in settings.items() for word in (f"--{key}", _word(value))]
    return ["--run.directory", str(studio.opened.workspace.directory), *flags]


def _word(value: Any) -> str:
    """A value as a flag takes it: a text as it stands, anything else as YAML, of which JSON is a part."""
    return value if isinstance(value, str) else json.dumps(value)
