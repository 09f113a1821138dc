"""Run a pipeline, stage after stage. Every stage leaves its result on disk, so it can be resumed anywhere."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tether.config.allowed_code import SEAL, CodeName, code_names, names_in, seal_record
from tether.config.load_pipeline import pipeline_from_record
from tether.config.pipeline_recipe import (
    BestOfNRecipe,
    CollectRecipe,
    Pipeline,
    RejectionSamplingRecipe,
    Stage,
    task_of,
)
from tether.config.recipes import Recipe, RLRecipe
from tether.config.rewards import Part, TaskPart
from tether.errors import ConfigError, Stopped, StorageError, TetherError
from tether.files import read_plain_json
from tether.hub.tiny_model import tiny_model, tiny_tokenizer
from tether.models.save import save_model
from tether.pipeline.answers import reward_of, task_with
from tether.pipeline.collect import best_of_n, collect, rejection_recipe
from tether.pipeline.measure_rounds import measure_round, read_measured, reward_step
from tether.pipeline.order import RANDOM, START_FOLDER, PipelineStep, StagePlaces, check_references, steps_of
from tether.pipeline.pipeline_report import stage_figures, summarise, write_pipeline_report
from tether.pipeline.stage_context import StageContext, resume_words
from tether.pipeline.stage_progress import Show, notify_once, stage_progress, train_stage
from tether.progress import working
from tether.rewards import consent
from tether.rewards.agree import agree_to_names
from tether.seeds import derive_seed
from tether.store.find import find_model
from tether.store.folder import PIPELINE, RunFolder, write_whole
from tether.train.run import interruptions

PROGRESS, SUMMARY, LOCK = "progress.json", "summary.json", ".lock"
SHOWN = {
    "score": "score",
    "reward/true": "true",
    "kl_ref_k3": "KL",
    "loss": "loss",
    "accuracy": "accuracy",
    "response_length": "length",
}
SAMPLERS = (CollectRecipe, BestOfNRecipe, RejectionSamplingRecipe)
LOCAL_FILES = (".jsonl", ".json", ".csv", ".parquet", ".txt")


@dataclass
class PipelineRun:
    """A pipeline that is running."""

    places: StagePlaces
    console: Console
    show: Show
    stop: Callable[[], bool]
    notify: Callable[[str], None]
    json_output: bool
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline."""
        return self.places.pipeline

    @property
    def root(self) -> Path:
        """Its folder."""
        return self.places.root

    def emit(self, line: Mapping[str, Any]) -> None:
        """Print one line of JSON, where that was asked for."""
        if self.json_output:
            print(json.dumps(line), flush=True)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record the duration of a stage, summed over its attempts."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - began, 1)
            write_whole(self.root / PROGRESS, {"seconds": self.seconds})


# -- starting and resuming ----------------------------------------------------------------------------------------


def run_pipeline(pipeline: Pipeline, *, json_output: bool) -> int:
    """Start a pipeline, or resume the one of its name if that is the same, with as many rounds or more."""
    root = Path(pipeline.settings.directory) / pipeline.settings.name
    check_pipeline(pipeline)
    prepare_folder(pipeline, root)
    return _run(pipeline, root, json_output=json_output)


def resume_pipeline(root: Path, *, json_output: bool, rounds: int | None = None) -> int:
    """Resume the pipeline in this folder; `rounds` may add some."""
    pipeline = stored_pipeline(root)
    names = pipeline_names(pipeline)
    agree_to_names(names, names, root)
    if rounds is not None:
        if rounds < pipeline.settings.rounds:
            raise ConfigError(f"--rounds {rounds}: {root} has {pipeline.settings.rounds} rounds already; name more")
        pipeline = replace(pipeline, settings=pipeline.settings.model_copy(update={"rounds": rounds}))
        write_whole(root / PIPELINE, pipeline.record())
    return _run(pipeline, root, json_output=json_output)


def stored_pipeline(root: Path) -> Pipeline:
    """The pipeline of a folder, where the folder is now."""
    try:
        pipeline = pipeline_from_record(read_plain_json(root / PIPELINE))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{root / PIPELINE} is damaged, or of another version: {error}") from error
    place = pipeline.settings.model_copy(update={"directory": str(root.parent), "name": root.name})
    return replace(pipeline, settings=place)


def prepare_folder(pipeline: Pipeline, root: Path) -> None:
    """Create the folder, or check that it holds this very pipeline."""
    if (root / PIPELINE).is_file():
        stored = stored_pipeline(root)
        same = pipeline.settings.model_copy(update={"rounds": stored.settings.rounds, "directory": str(root.parent)})
        changed = _changes(stored.record(), replace(pipeline, settings=same).record())
        if changed:
            raise ConfigError(
                f"{root} holds a pipeline with other settings ({', '.join(changed[:4])}): choose another --name, or "
                f"go on with that one: {resume_words(root)}"
            )
        if pipeline.settings.rounds < stored.settings.rounds:
            raise ConfigError(
                f"rounds is {pipeline.settings.rounds}, and {root} has {stored.settings.rounds}: name more"
            )
    elif root.exists() and any(root.iterdir()):
        raise ConfigError(f"{root} is not a pipeline's folder: choose another with --name, or move it away")
    try:
        root.mkdir(parents=True, exist_ok=True)
        if seal := seal_record(pipeline_names(pipeline), consent.current().root):
            write_whole(root / SEAL, seal)
        write_whole(root / PIPELINE, pipeline.record())
    except OSError as error:
        raise StorageError(f"directory: cannot write to {root} ({error.strerror})") from error


def _changes(before: Any, now: Any, key: str = "") -> list[str]:
    """The dotted keys that differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            each
            for name in {**before, **now}
            for each in _changes(before.get(name), now.get(name), f"{key}.{name}" if key else name)
        ]
    return [] if before == now else [key]


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Keep a second process out of the folder."""
    with (root / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another process is running the pipeline in {root}: wait for it, or stop it") from None
        yield


# -- checks before anything runs ----------------------------------------------------------------------------------


def check_pipeline(pipeline: Pipeline) -> None:
    """Raise ConfigError for what would end a later stage: references, names of files, models and tasks."""
    check_references(pipeline)
    places = StagePlaces(pipeline, Path(pipeline.settings.directory) / pipeline.settings.name)
    if pipeline.settings.policy is not None:
        find_model(pipeline.settings.policy)
    for step in steps_of(pipeline):
        if step.round <= 1:
            _check_files(step, pipeline)
            if isinstance(step.stage.settings, SAMPLERS) and step.stage.settings.model.loader is not None:
                raise _wrong(step.stage, "model.loader", "a stage that samples answers reads saved models only")
            if isinstance(step.stage.settings, Recipe) and step.stage.settings.distributed.shard != "none":
                raise _wrong(step.stage, "distributed.shard", "a pipeline trains in one process")
    if pipeline.has_truth:
        _check_truth(places)


def _check_truth(places: StagePlaces) -> None:
    pipeline = places.pipeline
    if places.policy_before(1) is None:
        raise ConfigError(
            "truth: there is no policy before the rounds to compare with: add a stage such as sft to `stages:`, or set "
            "`policy:`"
        )
    task = task_with(pipeline.settings.task)
    there = len(task.held_out())
    if there < pipeline.settings.truth.prompts:
        raise ConfigError(
            f"truth.prompts is {pipeline.settings.truth.prompts}, but the task holds out {there} prompts: ask for fewer"
        )
    if not pipeline.settings.truth.parts and task.reward() is None:
        raise ConfigError("truth names no parts, and the task has no reward of its own: set truth.parts")


def _check_files(step: PipelineStep, pipeline: Pipeline) -> None:
    """Files and models that the stage names itself, and not another stage."""
    for key, value in _texts(step.stage.settings.model_dump(mode="json"), ""):
        if value.startswith("stage:"):
            continue
        if key in ("model.path", "kl.reference", "roles.critic_init") or key.endswith(".path"):
            try:
                find_model(value)
            except ConfigError as error:
                raise _wrong(step.stage, key, str(error)) from None
        is_data = key.partition(".")[0] in ("data", "task", "ptx") or key == "reward.center_on"
        if is_data and value.endswith(LOCAL_FILES) and not set(value) & set("*?[") and not Path(value).is_file():
            raise _wrong(step.stage, key, f"there is no file {value}")
    task = task_of(step.stage.settings)
    if task is not None and task != pipeline.settings.task:
        task_with(task)


def _texts(plain: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(plain, dict | list):
        items = plain.items() if isinstance(plain, dict) else enumerate(plain)
        for name, value in items:
            yield from _texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(plain, str):
        yield key, plain


def _wrong(stage: Stage, key: str, message: str) -> ConfigError:
    return ConfigError(f"stage {stage.name}, {key}: {message}")


def pipeline_names(pipeline: Pipeline) -> tuple[CodeName, ...]:
    """The code and the addresses that the stages name."""
    found = list(names_in(pipeline.settings.task, pipeline.settings.truth.parts))
    for stage in pipeline.all_stages:
        settings = stage.settings
        if isinstance(settings, Recipe):
            found += code_names(settings)
        if isinstance(settings, SAMPLERS):
            found += names_in(settings.task, settings.reward.parts)
        if isinstance(settings, CollectRecipe) and settings.rater == "judge":
            found.append(CodeName("judge.url", settings.judge.url, settings.judge.token_env or "", is_address=True))
    return tuple(dict.fromkeys(found))


# -- the stages ---------------------------------------------------------------------------------------------------


def _run(pipeline: Pipeline, root: Path, *, json_output: bool) -> int:
    console = Console(stderr=True)
    with alone(root), interruptions() as stop, stage_progress(console) as show:
        run = PipelineRun(StagePlaces(pipeline, root), console, show, stop, notify_once(console), json_output)
        if (root / PROGRESS).is_file():
            run.seconds = read_plain_json(root / PROGRESS)["seconds"]
        _save_random_policy(run)
        for number in range(pipeline.settings.rounds + 1):
            for step in run.places.steps:
                if step.round == number:
                    _step(run, step)
            _measure(run, number)
        with run.timed("report"):
            summary = summarise(run.places, run.seconds)
            report = write_pipeline_report(run.places, summary)
    write_whole(root / SUMMARY, summary)
    run.emit(summary)
    scored = [each for each in summary["rounds"] if "true_score" in each]
    if scored:
        path = " → ".join(f"{each['true_score']:.3f}" for each in scored)
        console.print(f"\nTrue score by round: {path}", highlight=False, soft_wrap=True)
    console.print(f"Report: {report}", highlight=False, soft_wrap=True)
    return 0


def _save_random_policy(run: PipelineRun) -> None:
    """Save a first policy whose weights are drawn from the seed."""
    folder = run.root / START_FOLDER
    if run.pipeline.settings.policy == RANDOM and not (folder / "config.json").is_file():
        save_model(tiny_model(derive_seed(run.pipeline.settings.seed, "model")), tiny_tokenizer(), folder)


def _step(run: PipelineRun, step: PipelineStep) -> None:
    """Run one stage, unless it is done; an error names the stage and says how to go on."""
    context = StageContext(
        step,
        run.places.folder(step),
        run.root,
        run.pipeline.settings.seed,
        _title(step),
        run.show,
        run.stop,
        run.notify,
    )
    if _is_done(context):
        return
    if run.stop():
        raise context.stopped("stopped before it began")
    try:
        with run.timed(step.folder):
            _carry_out(run, context)
    except Stopped:
        raise
    except TetherError as error:
        said = str(error) if str(error).startswith("stage ") else f"stage {step.folder}: {error}"
        hint = "" if resume_words(run.root) in said else f". What is done is kept; go on with: {resume_words(run.root)}"
        raise type(error)(f"{said}{hint}") from error
    figures = stage_figures(context.folder)
    run.emit({"stage": step.folder, "seconds": run.seconds[step.folder], **figures})


def _title(step: PipelineStep) -> str:
    return f"{step.round} {step.stage.name}" if step.round else step.stage.name


def _is_done(context: StageContext) -> bool:
    if context.step.stage.trains:
        return RunFolder(context.folder).is_finished
    return context.figures() is not None


def _carry_out(run: PipelineRun, context: StageContext) -> None:
    settings = run.places.resolved(context.step)
    match settings:
        case CollectRecipe():
            with working(context.title, announce=False, spinner=False):
                collect(context, settings)
            return
        case BestOfNRecipe():
            task = task_with(run.pipeline.settings.task)
            shared = run.pipeline.has_truth and settings.task == run.pipeline.settings.task
            truth = reward_of(run.pipeline.settings.truth, task, None, context.seed) if shared else None
            best_of_n(context, settings, truth)
            return
        case RejectionSamplingRecipe():
            recipe: Recipe = rejection_recipe(context, settings)
        case Recipe():
            recipe = settings
        case _:
            raise AssertionError(f"no stage has the settings {type(settings).__name__}")
    recipe = with_place(with_truth(recipe, run.pipeline), run.places, context)
    advance = context.progress(recipe.run.steps)
    trained = train_stage(recipe, context.folder, advance, SHOWN, stop=run.stop, notify=run.notify)
    if not trained.finished:
        raise context.stopped(f"stopped after {trained.steps} of {trained.total} steps")


def with_place(recipe: Recipe, places: StagePlaces, context: StageContext) -> Recipe:
    """The recipe with its run in the pipeline's folder, and the seed of its round unless it has its own."""
    settings = places.pipeline.settings
    given = {"name": f"{places.root.name}/{context.step.folder}", "directory": str(places.root.parent)}
    seed = recipe.run.seed or settings.seed + context.step.round
    group = recipe.run.group or settings.name
    return recipe.model_copy(update={"run": recipe.run.model_copy(update=given | {"seed": seed, "group": group})})


def with_truth(recipe: Recipe, pipeline: Pipeline) -> Recipe:
    """The recipe with the true score as a part without weight, so that it is measured in every step of RL."""
    if not (isinstance(recipe, RLRecipe) and pipeline.has_truth and recipe.task == pipeline.settings.task):
        return recipe
    parts, truth = recipe.reward.parts, pipeline.settings.truth.parts
    if not parts or "true" in {part.label for part in parts} or len(truth) > 1:
        return recipe
    measured: Sequence[Part] = [part.model_copy(update={"name": "true", "weight": 0.0}) for part in truth]
    measured = measured or [TaskPart(kind="task", name="true", weight=0.0)]
    return recipe.model_copy(update={"reward": recipe.reward.model_copy(update={"parts": (*parts, *measured)})})


def _measure(run: PipelineRun, number: int) -> None:
    """Measure a round that is done, unless it was."""
    nothing = not run.pipeline.has_truth and reward_step(run.places, number) is None
    if nothing or read_measured(run.root, number) is not None:
        return
    if run.stop():
        raise Stopped(f"stopped before round {number} was measured; resume with: {resume_words(run.root)}")
    title = f"measure round {number}"
    advance = run.show(title, 1)
    with run.timed(title), working(title, announce=False, spinner=False):
        measured = measure_round(run.places, number)
    true = measured.get("metrics", {}).get("true")
    advance(1, f"true {true['value']:.3f}  KL {measured['metrics']['kl_k3']['value']:.2f}" if true else "")
