"""The routes that start, stop, resume and fork runs, and that train a reward model and a policy on votes."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import Path as PathParameter
from fastapi import Query, Request
from pydantic import Field

from tether.config import RECIPES, Recipe
from tether.config.load import as_flags, change_settings, load_recipe, recipe_from_record
from tether.errors import ConfigError
from tether.store.find import find_model, run_config, run_of
from tether.store.folder import is_run
from tether.store.read import RunSummary, list_runs
from tether.studio.context import Studio, studio_of
from tether.studio.import_export import export_records
from tether.studio.label_records import skipped
from tether.studio.launcher import RunProcess, allowed_words
from tether.studio.replies import BIGGEST, Body, Refused, Reply, api_router
from tether.studio.run_queries import run_with_id, seconds_left
from tether.studio.vote_training import VOTES, TrainingRequest, decided_pairs, split_records, write_plan, write_sft_plan

launch_router = api_router()

Id = Annotated[int, PathParameter(ge=0, le=BIGGEST)]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
TITLES = {"sft": "demonstrations", "reward": "reward model", "ppo": "policy (PPO)"}
OURS = ("run.directory", "store.url")  # set by the workspace
ELSEWHERE = "settings: the workspace sets run.directory and store.url; leave them out"

Settings = dict[str, Any]


class NewRun(Body):
    """A new run: a method and the settings that differ from its defaults, by dotted keys."""

    method: str
    settings: Settings = Field(default_factory=dict, max_length=500)


class Fork(Body):
    """The step to fork from, and the changed settings."""

    step: Annotated[int, Field(ge=0, le=BIGGEST)] | None = None
    settings: Settings = Field(default_factory=dict, max_length=500)


@launch_router.post("/runs")
def start(request: Request, new: NewRun) -> Any:
    """Start a run in a separate process. Wrong settings are reported before anything starts."""
    studio = studio_of(request)
    if new.method not in RECIPES:
        raise Refused(422, f"method: choose one of {', '.join(RECIPES)}")
    name = free_name(studio, new.settings.get("run.name") or f"{new.method}-{time.strftime('%Y%m%d-%H%M%S')}")
    flags = flags_for(studio, new.settings | {"run.name": name})
    check_place(studio, load_recipe(new.method, None, flags), name)
    job = studio.launcher.tether(name, new.method, ["train", new.method, *flags])
    return Reply({"name": name, "job": job.id})


@launch_router.post("/runs/{run}/stop")
def stop(request: Request, run: Id) -> Any:
    """Stop a run that was started here; it writes a checkpoint and can be resumed."""
    studio = studio_of(request)
    job = studio.launcher.stop(run_with_id(studio.opened, run).name)
    return Reply({"name": job.name, "job": job.id})


@launch_router.post("/runs/{run}/resume")
def resume(request: Request, run: Id) -> Any:
    """Resume a run that was stopped or interrupted."""
    studio = studio_of(request)
    found = _at_rest(studio, run)
    if found.state == "done":
        raise Refused(409, f"{found.name} has completed all its steps: fork it to train more")
    words = ["resume", *_named(studio, found)]
    job = studio.launcher.tether(found.name, "resume", words)
    return Reply({"name": found.name, "job": job.id})


@launch_router.post("/runs/{run}/fork")
def fork(request: Request, run: Id, wanted: Fork) -> Any:
    """Fork a run from a checkpoint with other settings."""
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


@launch_router.get("/jobs")
def jobs(request: Request) -> Any:
    """The processes that this server started, and their states."""
    studio = studio_of(request)
    started = studio.launcher.jobs()
    runs = list_runs(studio.opened) if started else []
    return Reply({"jobs": [job.as_json() | {"stages": stages_of(studio, job, runs)} for job in started]})


def stages_of(studio: Studio, job: RunProcess, runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """The runs of a process in order; `run` is null for one that has not started.

    A process with a plan (vote_training.py) makes one run per command, in a folder of its own name.
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
    """A run and its workspace as arguments: absolute paths, which cannot be read as flags."""
    return [str(run.folder.absolute()), f"--workspace={studio.opened.workspace.directory.absolute()}"]


def _at_rest(studio: Studio, run: int) -> RunSummary:
    found = run_with_id(studio.opened, run)
    if found.state == "running":
        raise Refused(409, f"{found.name} is running")
    if not is_run(found.folder):
        raise Refused(409, f"the folder of {found.name} does not exist any more")
    return found


def free_name(studio: Studio, name: Any) -> str:
    """Check the name of a new run, which is also its folder."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > 120:
        raise ConfigError("run.name: use letters, digits, dots, dashes and underscores, with / between folders")
    if is_run(studio.opened.workspace.folder(name)):
        raise ConfigError(f"run.name: there is a run called {name} already; choose another name")
    return name


def flags_for(studio: Studio, settings: Settings) -> list[str]:
    """The settings as command-line flags. The page cannot choose where the run is stored."""
    taken = [key for key in OURS if key in settings]
    if taken:
        raise ConfigError(f"{taken[0]}: the workspace sets this; leave it out")
    return as_flags({**settings, "run.directory": str(studio.opened.workspace.directory)})


def check_place(studio: Studio, recipe: Recipe, name: str) -> None:
    """Check that the run will be in the workspace under its name, whatever the settings contain."""
    run = recipe.run
    if (run.directory, run.name, recipe.store.url) != (str(studio.opened.workspace.directory), name, None):
        raise ConfigError(ELSEWHERE)


# -- training on votes --------------------------------------------------------------------------------------------

router = api_router()

Place = Annotated[int, Field(ge=0, le=BIGGEST)]
DEFAULT_MODEL = "tiny-bytes"  # if the source of the answers is not known
Steps = Annotated[int, Field(ge=1, le=1_000_000)]


class TrainSettings(Body):
    """Settings of the two runs that differ from their defaults, by dotted keys."""

    reward: dict[str, Any] = Field(default_factory=dict, max_length=200)
    ppo: dict[str, Any] = Field(default_factory=dict, max_length=200)


class TrainRequest(Body):
    """The votes to train on, and the model that the policy starts from."""

    queue_id: Place
    from_run: Place | None = None
    model: str | None = Field(default=None, min_length=1, max_length=1000)
    name: str | None = Field(default=None, max_length=100)
    reward_steps: Steps = 60
    ppo_steps: Steps = 40
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.2
    settings: TrainSettings = TrainSettings()


class DemonstrationTraining(Body):
    """The demonstrations to train on, and the model that the policy starts from."""

    queue_id: Place
    from_run: Place | None = None
    model: str | None = Field(default=None, min_length=1, max_length=1000)
    name: str | None = Field(default=None, max_length=100)
    steps: Steps = 60
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    settings: dict[str, Any] = Field(default_factory=dict, max_length=200)


@router.post("/train")
def train(request: Request, wanted: TrainRequest) -> Any:
    """Train a reward model on a queue's votes, and then a policy against it."""
    studio = studio_of(request)
    studio.labels.queue(wanted.queue_id)
    _check_settings([*wanted.settings.reward, *wanted.settings.ppo])
    votes = studio.labels.usable_votes(wanted.queue_id)
    split = split_records(export_records(votes, "rankings"), wanted.held_out)
    start = _start(studio, wanted.from_run, wanted.model, votes)
    name = wanted.name or f"votes-{wanted.queue_id}-{time.strftime('%Y%m%d-%H%M%S')}"
    for run in ("reward", "ppo"):
        free_name(studio, f"{name}/{run}")
    plan_request = TrainingRequest(
        name=name,
        queue=wanted.queue_id,
        model=start.model,
        config=start.config,
        folder=start.folder,
        reward_steps=wanted.reward_steps,
        ppo_steps=wanted.ppo_steps,
        considered=_considered(studio, wanted.queue_id),
        reward_settings=wanted.settings.reward,
        ppo_settings=wanted.settings.ppo,
    )
    plan = write_plan(studio.opened.workspace.directory, plan_request, split)
    job = studio.launcher.python(name, "train", ["-m", "tether.studio.train_process", str(plan), *allowed_words()])
    reply = {"name": name, "job": job.id, "votes": len(split.votes), "pairs": decided_pairs(split.train)}
    reply |= {"examples": len(split.train), "from": start.model}
    return Reply(reply | {"reward_run": f"{name}/reward", "ppo_run": f"{name}/ppo"})


@router.post("/train/demonstrations")
def train_on_demonstrations(request: Request, wanted: DemonstrationTraining) -> Any:
    """Fine-tune a model on the demonstrations of a queue, with their conversations and system prompts."""
    studio = studio_of(request)
    if studio.labels.queue(wanted.queue_id).kind != "demonstration":
        raise Refused(422, f"queue {wanted.queue_id} holds no demonstrations: train on its votes instead")
    _check_settings(list(wanted.settings))
    votes = studio.labels.usable_votes(wanted.queue_id)
    split = split_records(export_records(votes, "messages"), wanted.held_out, "demonstrations are written")
    start = _start(studio, wanted.from_run, wanted.model, votes)
    name = wanted.name or f"demonstrations-{wanted.queue_id}-{time.strftime('%Y%m%d-%H%M%S')}"
    free_name(studio, f"{name}/sft")
    plan_request = TrainingRequest(
        name=name,
        queue=wanted.queue_id,
        model=start.model,
        config=start.config,
        sft_steps=wanted.steps,
        considered=_considered(studio, wanted.queue_id),
        sft_settings=wanted.settings,
    )
    plan = write_sft_plan(studio.opened.workspace.directory, plan_request, split)
    job = studio.launcher.python(name, "train", ["-m", "tether.studio.train_process", str(plan), *allowed_words()])
    reply = {"name": name, "job": job.id, "votes": len(split.votes), "examples": len(split.train)}
    return Reply(reply | {"from": start.model, "sft_run": f"{name}/sft"})


def _check_settings(keys: list[str]) -> None:
    for key in keys:
        if key in (*OURS, "run.name"):
            raise Refused(422, f"settings: {key} cannot be set here")


def _considered(studio: Studio, queue: int) -> list[int]:
    return [vote.id for vote in studio.labels.standing_votes(queue)]


@dataclass(frozen=True)
class _Start:
    """The model that a training starts from, and the recipe that trained it, if there is one."""

    model: str
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    folder: Path | None = None  # of the run of this recipe


def _start(studio: Studio, run: int | None, model: str | None, votes: list[Any]) -> _Start:
    """The given run or model; else the run or model that most judged answers came from."""
    if run is not None:
        found = run_with_id(studio.opened, run)
        return _Start(_model_of(found), found.config, found.folder)
    if model is not None:
        return _Start(model, run_config(model), run_of(model))
    sources = [one.get("source", {}) for vote in votes for one in (vote.meta, *vote.answers)]
    runs = Counter(source["run"] for source in sources if source.get("run"))
    known = {one.name: one for one in list_runs(studio.opened)}
    for name, _ in runs.most_common():
        if name in known:
            return _Start(_model_of(known[name]), known[name].config, known[name].folder)
    models = Counter(source["model"] for source in sources if source.get("model"))
    for name, _ in models.most_common(1):
        return _Start(name, run_config(name), run_of(name))
    return _Start(DEFAULT_MODEL)


def _model_of(run: RunSummary) -> str:
    """The final model of a run; if it saved none, the model that it started from."""
    if (run.folder / "model").is_dir():
        return str(Path(find_model(str(run.folder))).resolve())
    return run.config.get("model", {}).get("path", DEFAULT_MODEL)


# -- progress -----------------------------------------------------------------------------------------------------


@router.get("/train/curve")
def curve(request: Request, queue: Annotated[int, Query(ge=0, le=BIGGEST)]) -> Any:
    """The held-out accuracy of every reward model of a queue by its number of votes, and the number of newer votes.

    For a queue of demonstrations, the points are the runs that were fine-tuned on them, with their held-out loss.
    """
    studio = studio_of(request)
    studio.labels.queue(queue)
    votes = studio.labels.usable_votes(queue)
    records = export_records(votes, "rankings")
    demonstrations = [vote for vote in votes if vote.kind == "demonstration" and not skipped(vote.choice)]
    trained = [(run, used) for run in list_runs(studio.opened) if (used := _votes_of(run, queue)) is not None]
    trained.sort(key=lambda pair: pair[0].id)  # in the order they were started
    last = trained[-1][1] if trained else {}
    known = set(last.get("considered", ()))
    return Reply(
        {
            "votes": len(votes),
            "pairs": decided_pairs(records),
            "examples": len(records) + len(demonstrations),
            "since_last": sum(vote.id not in known for vote in votes),
            "points": [_point(studio, run, used) for run, used in trained],
        }
    )


def _votes_of(run: RunSummary, queue: int) -> dict[str, Any] | None:
    """The votes that a reward model of this queue, or a model tuned on its demonstrations, was trained on."""
    if run.method not in ("reward", "sft"):
        return None
    try:
        used = json.loads((run.folder / VOTES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return used if isinstance(used, dict) and used.get("queue") == queue else None


def _point(studio: Studio, run: RunSummary, used: dict[str, Any]) -> dict[str, Any]:
    def last(metric: str) -> float | None:
        measured = studio.metrics.series(run.id).get(metric)
        return float(measured.values[-1]) if measured is not None and len(measured.values) else None

    return {
        "run": run.name,
        "id": run.id,
        "votes": len(used.get("votes", ())),
        "pairs": used.get("pairs"),
        "method": run.method,
        "accuracy": last("held_out/accuracy"),
        "loss": last("held_out/loss"),
        "held_out": used.get("held_out_pairs"),
        "created": run.created,
        "state": run.state,
    }
