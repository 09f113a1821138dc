"""Training and evaluating from Python: one function per method, one for any recipe, and `evaluate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from rich.console import Console

from tether.api.given import model_name, prompts_of, reward_of, source_of
from tether.api.run import MAX_NEW_TOKENS, Run
from tether.config.allowed_code import OBJECT
from tether.config.load import load_recipe
from tether.config.recipes import RECIPES, Recipe, RLRecipe
from tether.errors import ConfigError, Stopped
from tether.evaluation.judges import ScoreJudge
from tether.evaluation.measure import EvaluationReport, NamedJudge, Question, fitting, for_all, measure
from tether.evaluation.metrics import own_metrics
from tether.models.load import load_causal_lm
from tether.ops.sampling import check_sampling
from tether.progress import working
from tether.protocols import DoctorRule, ModelLoader, Sampling, StepHook, Task, Tracker
from tether.rewards.agree import agree_to_recipe
from tether.rewards.parts import build_reward
from tether.seeds import derive_seed
from tether.store.find import find_model, find_run_or_model, run_config
from tether.train.objects import KEYS, Objects, name_of
from tether.train.run import Forked, Watch, interruptions, print_notice, progress_bar, train_watched
from tether.user_code import Interrupted

OnStep = Callable[["Step"], object]


@dataclass(frozen=True)
class Step:
    """One step of a run; `on_step` is called with it."""

    step: int  # 0 for the first, as in the run's metrics and answers
    total: int
    metrics: Mapping[str, float]
    seconds_left: float  # an estimate from the steps so far


def ppo(
    model: str | Path | Run,
    prompts: Any = None,
    reward: Any = None,
    *,
    steps: int | None = None,
    held_out: Any = None,
    settings: Mapping[str, Any] | None = None,
    name: str | None = None,
    directory: str | Path = "runs",
    seed: int = 0,
    on_step: OnStep | None = None,
    progress: bool = True,
    task: str | Task | None = None,
    engine: Any = None,
    algorithm: Any = None,
    trackers: Sequence[Tracker | str] = (),
    doctor_rules: Sequence[DoctorRule] = (),
    loader: ModelLoader | None = None,
    hooks: Sequence[StepHook] = (),
) -> Run:
    """Train a model by PPO so that its answers to the prompts get more reward.

    `prompts` is a file, a list of texts or mappings, or a `datasets.Dataset`. `held_out` is the same, or the fraction
    of the prompts to hold out. `reward` is a function `f(prompt, completion, **columns)` that returns a number, or any
    other form that docs/python.md lists. `settings` are keys of the recipe, such as {"rollout.samples_per_prompt": 4}.
    `on_step` is called with a `Step` after each step, and may return False to stop. `task` replaces prompts and reward.
    `engine`, `algorithm`, `trackers`, `hooks`, `doctor_rules` and `loader` are your own parts: docs/extending.md. A
    tracker may also be a name, such as "wandb", as in `store.trackers`.

    Ctrl-C stops the run after the current step and raises `Stopped`, whose `run` can be resumed.
    """
    return _from_rollouts("ppo", locals())


def grpo(
    model: str | Path | Run,
    prompts: Any = None,
    reward: Any = None,
    *,
    steps: int | None = None,
    held_out: Any = None,
    settings: Mapping[str, Any] | None = None,
    name: str | None = None,
    directory: str | Path = "runs",
    seed: int = 0,
    on_step: OnStep | None = None,
    progress: bool = True,
    task: str | Task | None = None,
    engine: Any = None,
    algorithm: Any = None,
    trackers: Sequence[Tracker | str] = (),
    doctor_rules: Sequence[DoctorRule] = (),
    loader: ModelLoader | None = None,
    hooks: Sequence[StepHook] = (),
) -> Run:
    """Train a model by GRPO: like `ppo`, with advantages relative to a group of answers and no critic."""
    return _from_rollouts("grpo", locals())


def sft(
    model: str | Path | Run,
    data: Any,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    held_out: Any = None,
    settings: Mapping[str, Any] | None = None,
    name: str | None = None,
    directory: str | Path = "runs",
    seed: int = 0,
    on_step: OnStep | None = None,
    progress: bool = True,
    trackers: Sequence[Tracker | str] = (),
    doctor_rules: Sequence[DoctorRule] = (),
    loader: ModelLoader | None = None,
    hooks: Sequence[StepHook] = (),
) -> Run:
    """Fine-tune a model on demonstrations: a file, or a list of mappings such as {"prompt": ..., "completion": ...}."""
    return _from_records("sft", data, locals())


def reward_model(
    model: str | Path | Run,
    preferences: Any,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    held_out: Any = None,
    settings: Mapping[str, Any] | None = None,
    name: str | None = None,
    directory: str | Path = "runs",
    seed: int = 0,
    on_step: OnStep | None = None,
    progress: bool = True,
    trackers: Sequence[Tracker | str] = (),
    doctor_rules: Sequence[DoctorRule] = (),
    loader: ModelLoader | None = None,
    hooks: Sequence[StepHook] = (),
) -> Run:
    """Train a reward model on preferences: mappings such as {"prompt": ..., "chosen": ..., "rejected": ...}.

    The run can be passed as `reward` to `ppo`, `grpo` and `evaluate`.
    """
    return _from_records("reward", preferences, locals())


def dpo(
    model: str | Path | Run,
    preferences: Any,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    held_out: Any = None,
    settings: Mapping[str, Any] | None = None,
    name: str | None = None,
    directory: str | Path = "runs",
    seed: int = 0,
    on_step: OnStep | None = None,
    progress: bool = True,
    trackers: Sequence[Tracker | str] = (),
    doctor_rules: Sequence[DoctorRule] = (),
    loader: ModelLoader | None = None,
    hooks: Sequence[StepHook] = (),
) -> Run:
    """Train a model on preferences by DPO, without a reward model; `preferences` as for `reward_model`."""
    return _from_records("dpo", preferences, locals())


def train_recipe(
    method: str,
    recipe: str | Path | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    reward: Any = None,
    on_step: OnStep | None = None,
    progress: bool = True,
    task: str | Task | None = None,
    engine: Any = None,
    algorithm: Any = None,
    trackers: Sequence[Tracker | str] = (),
    doctor_rules: Sequence[DoctorRule] = (),
    loader: ModelLoader | None = None,
    hooks: Sequence[StepHook] = (),
) -> Run:
    """Train from a recipe file, with `settings` overriding its keys: `tether train METHOD RECIPE` from Python.

    `method` is one of `tether train --help`: sft, reward, ppo, reinforce, rloo, grpo, trpo, dpo.
    """
    given: dict[str, Any] = {}
    own = {"engine": engine, "algorithm": algorithm, "loader": loader, "reward": reward, "task": task}
    objects = _objects(given, {**own, "trackers": trackers, "hooks": hooks, "doctor_rules": doctor_rules})
    path = None if recipe is None else str(recipe)
    return _begin(method, path, _merged(settings, given), objects, on_step, progress)


# -- from arguments to a recipe -----------------------------------------------------------------------------------


def _from_rollouts(method: str, arguments: dict[str, Any]) -> Run:
    prompts, reward, task = (arguments[name] for name in ("prompts", "reward", "task"))
    if prompts is None and task is None:
        raise ConfigError("prompts is missing: give a list of texts or a file, or use a task instead (task=...)")
    if prompts is not None and task is not None:
        raise ConfigError("prompts and task are both given, and a task has its own prompts: leave one out")
    if prompts is not None and reward is None and not _sets_reward(arguments["settings"] or {}):
        raise ConfigError("reward is missing: give a function such as f(prompt, completion) that returns a number")
    given = _common(arguments)
    directory = str(arguments["directory"])
    if prompts is not None:
        given["task.prompts"] = source_of(prompts, directory, "prompts", texts=True)
    given |= _held_out("task", arguments["held_out"], directory, texts=True)
    objects = _objects(given, arguments)
    settings = _merged(arguments["settings"], given)
    return _begin(method, None, settings, objects, arguments["on_step"], arguments["progress"])


def _from_records(method: str, records: Any, arguments: dict[str, Any]) -> Run:
    directory = str(arguments["directory"])
    given = _common(arguments) | {"run.epochs": arguments["epochs"]}
    given["data.train"] = source_of(records, directory, "preferences" if method != "sft" else "data")
    given |= _held_out("data", arguments["held_out"], directory)
    objects = _objects(given, arguments)
    settings = _merged(arguments["settings"], given)
    return _begin(method, None, settings, objects, arguments["on_step"], arguments["progress"])


def _common(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "model.path": model_name(arguments["model"]),
        "run.steps": arguments["steps"],
        "run.name": arguments["name"],
        "run.directory": str(arguments["directory"]),
        "run.seed": arguments["seed"],
    }


def _held_out(section: str, held_out: Any, directory: str, *, texts: bool = False) -> dict[str, Any]:
    if held_out is None:
        return {}
    if isinstance(held_out, float):
        return {f"{section}.held_out_fraction": held_out}
    return {f"{section}.held_out": source_of(held_out, directory, "held_out", texts=texts)}


def _sets_reward(settings: Mapping[str, Any]) -> bool:
    return any(str(key).partition(".")[0] in ("reward", "task") for key in settings)


def _objects(given: dict[str, Any], arguments: Mapping[str, Any]) -> Objects:
    """The objects among the arguments; what a recipe can say of them, such as the name of code, is put into `given`."""
    passed: dict[str, Any] = {name: arguments[name] for name in ("trackers", "hooks", "doctor_rules")}
    if isinstance(passed["trackers"], list | tuple):
        trackers = cast("Sequence[Any]", passed["trackers"])
        given["store.trackers"] = [one for one in trackers if isinstance(one, str)] or None
        passed["trackers"] = [one for one in trackers if not isinstance(one, str)]
    if arguments.get("reward") is not None:
        given["reward.parts"], passed["rewards"] = reward_of(arguments["reward"])
    if (task := arguments.get("task")) is not None:
        given["task.name"] = task if isinstance(task, str) else f"{OBJECT}{name_of(task)}"
        passed["task"] = None if isinstance(task, str) else task
    for role, key in KEYS.items():
        one = arguments.get(role)
        if isinstance(one, str):
            given[key] = one
        else:
            passed[role] = one
    objects = Objects(**passed)
    if objects.names():
        given["run.objects"] = objects.names()
    return objects


def _merged(settings: Mapping[str, Any] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings merged with the arguments; a key that both contain raises ConfigError."""
    flat = dict[str, Any]()
    for key, value in (settings or {}).items():
        nested = isinstance(value, Mapping) and "." not in str(key)
        flat |= {f"{key}.{name}": inner for name, inner in value.items()} if nested else {str(key): value}
    own = {key: value for key, value in given.items() if value is not None}
    defaults = {"run.directory": "runs", "run.seed": 0}
    for key in [key for key in own if key in flat]:
        if own[key] != defaults.get(key):
            raise ConfigError(f"{key} is given twice, by an argument and in settings: leave one out")
        del own[key]
    return flat | own


# -- running ------------------------------------------------------------------------------------------------------


def _begin(
    method: str,
    path: str | None,
    settings: dict[str, Any],
    objects: Objects,
    on_step: OnStep | None,
    progress: bool,
) -> Run:
    recipe = load_recipe(method, path, settings=settings)
    others = [name for name in objects.names() if not name.startswith("loader ")]
    if others and not isinstance(recipe, RLRecipe):
        rollouts = ", ".join(name for name, kind in RECIPES.items() if issubclass(kind, RLRecipe))
        raise ConfigError(f"{method} trains on records and takes no {others[0]}: that is for {rollouts}")
    agree_to_recipe(recipe, path, [f"--{key}" for key in settings])
    return go(recipe, objects, on_step=on_step, progress=progress)


def go(
    recipe: Recipe,
    objects: Objects,
    *,
    on_step: OnStep | None,
    progress: bool,
    resume: bool = False,
    forked: Forked | None = None,
) -> Run:
    """Run a recipe to its end, or until it is stopped."""
    console = Console(stderr=True, quiet=not progress)
    with (
        interruptions(_interrupt) as asked,
        progress_bar(recipe.method, f"loading {recipe.model.path}", False, console) as bar,
    ):
        watch = _StepWatch(bar, on_step)
        trained = train_watched(
            recipe,
            watch,
            console,
            stop=lambda: asked() or watch.stopped,
            resume=resume,
            forked=forked,
            objects=objects,
        )
    run = Run(trained.folder.path, objects=objects, store_url=recipe.store.url)
    if not trained.finished and not watch.stopped:
        stopped = Stopped(
            f"stopped after {trained.steps} of {trained.total} steps; nothing is lost: resume with "
            f"tether.load_run({str(run.path)!r}).resume()"
        )
        stopped.run = run
        raise stopped
    return run


def _interrupt() -> NoReturn:
    """Handle the second Ctrl-C: raise KeyboardInterrupt at once, which user code's errors cannot hide."""
    raise Interrupted


class _StepWatch(Watch):
    """Reports every step to the progress bar, then to the program's own `on_step`."""

    def __init__(self, bar: Watch, on_step: OnStep | None) -> None:
        self.bar, self.on_step = bar, on_step
        self.stopped = False
        self._total, self._first, self._began = 0, 0, 0.0

    def begin(self, total: int, done: int) -> None:
        """Training starts: `total` steps, of which `done` are complete."""
        self.bar.begin(total, done)
        self._total, self._first, self._began = total, done, time.monotonic()

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """A step is complete."""
        self.bar.advance(step, metrics)
        if self.on_step is None:
            return
        passed, done = time.monotonic() - self._began, step + 1
        left = passed / (done - self._first) * (self._total - done)
        if self.on_step(Step(step, self._total, dict(metrics), left)) is False:
            self.stopped = True

    def heartbeat(self, words: str) -> None:
        """A phase of a step starts."""
        self.bar.heartbeat(words)


def evaluate(
    model: str | Path | Run,
    prompts: Any,
    reward: Any = None,
    *,
    metrics: Sequence[Callable[..., float] | str] = (),
    against: str | Path | Run | None = None,
    n: int = 1,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    progress: bool = True,
) -> EvaluationReport:
    """Measure a model's answers to prompts: `report.metrics["score"]` has a mean and its 95 % interval.

    `prompts` and `reward` are as for `ppo`. With `against`, a second model answers the same prompts with the same
    random draws: `report.differences` has the difference of each metric, `report.win_rates["reward"]` how often the
    first model's answer got the higher reward. Length and temperature are by default those of the model's run.
    `metrics` are functions of your own, `f(prompt, completion, **columns)`, or names of them such as `mine.py:f`: each
    is reported under its name.
    """
    if n < 1:
        raise ConfigError(f"n is {n}: it must be at least 1")
    names = [find_run_or_model(model_name(each)) for each in (model, against) if each is not None]
    rollout = run_config(names[0]).get("rollout", {})
    sampling = Sampling(
        max_new_tokens=rollout.get("max_new_tokens", MAX_NEW_TOKENS) if max_new_tokens is None else max_new_tokens,
        temperature=rollout.get("temperature", 1.0) if temperature is None else temperature,
    )
    check_sampling(sampling)
    asked = prompts_of(prompts)
    parts, functions = reward_of(reward) if reward is not None else ([], {})
    own = own_metrics(metrics, "metrics", derive_seed(seed, "metrics"))
    for metric in own:
        metric.check(asked)
    checked = load_recipe("ppo", settings={"reward.parts": parts})
    assert isinstance(checked, RLRecipe)
    console = Console(stderr=True, quiet=not progress)
    models = []
    for name in names:
        with working(f"loading {name}", quiet=not progress):
            models.append(load_causal_lm(find_model(name), dtype=dtype, device=device, seed=derive_seed(seed, "model")))
    question = fitting(Question(asked, None), models, sampling, lambda text: print_notice(console, text))
    judges: list[NamedJudge] = []
    if parts:
        scorer = build_reward(checked.reward.parts, own=None, policy=models[0], seed=seed, functions=functions)
        scorer = for_all(scorer, models)
        question = Question(question.prompts, scorer)
        judges.append(NamedJudge("reward", ScoreJudge(scorer), None))
    return measure(names, models, question, judges, sampling, samples=n, seed=seed, quiet=not progress, metrics=own)
