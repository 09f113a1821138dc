"""From the options of `tether eval` to an evaluation: which models, which prompts, who judges."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from yaml import YAMLError

from tether.config.allowed_code import names_in, names_of_record
from tether.config.base import Paths, read_columns
from tether.config.read_yaml import read_value
from tether.config.rewards import FunctionPart, ModelPart, RemotePart
from tether.config.sections import PromptSettings, RewardSettings, TaskSettings
from tether.data.prompts import read_prompts
from tether.data.sources import shown_source
from tether.errors import ConfigError, DataError, StorageError, UsageError
from tether.evaluation.evaluate import Evaluation
from tether.evaluation.judges import RemoteJudge, ScoreJudge
from tether.evaluation.measure import (
    EvaluationReport,
    NamedJudge,
    Question,
    as_json,
    fitting,
    for_all,
    measure,
    print_report,
)
from tether.evaluation.own_metrics import own_metrics
from tether.models.load import LoadedModel, load_causal_lm
from tether.models.precision import AUTO
from tether.progress import working
from tether.protocols import RewardFn, Sampling
from tether.rewards.agree import agree_to_names
from tether.rewards.function import FunctionReward
from tether.rewards.model import RewardModelReward
from tether.rewards.parts import build_reward
from tether.rewards.remote import token_from
from tether.rewards.tasks import build_task
from tether.seeds import derive_seed
from tether.store.find import find_model, find_run_or_model, run_config, run_of


def evaluate_and_print(options: argparse.Namespace) -> int:
    """Print a table, or one JSON object."""
    console = Console(stderr=True, quiet=options.json)
    report = evaluate(options, console)
    if options.answers:
        write_answers(options.answers, report)
    if options.json:
        print(json.dumps(as_json(report)))
    else:
        print_report(report)
    return 0


def evaluate(options: argparse.Namespace, console: Console) -> EvaluationReport:
    """Load, sample, score, compare."""
    options.model = find_run_or_model(options.model)
    options.against = find_run_or_model(options.against) if options.against else None
    rollout = run_config(options.model).get("rollout", {})
    temperature = rollout.get("temperature", 1.0) if options.temperature is None else options.temperature
    sampling = Sampling(options.max_new_tokens or rollout.get("max_new_tokens", 128), temperature)
    names = [options.model, *([options.against] if options.against else [])]
    metrics = own_metrics(options.metric, "--metric", derive_seed(options.seed, "metrics"))
    models = [load(name, options, console) for name in names]
    question = fitting(ask(options, models[0]), models, sampling, lambda text: console.print(text, markup=False))
    if question.reward is not None:
        question = Question(question.prompts, for_all(question.reward, models))
    judges = [find_judge(spec, options, question, models) for spec in options.judge or default_judges(question)]
    return measure(
        names,
        models,
        question,
        judges,
        sampling,
        samples=options.samples,
        seed=options.seed,
        max_num_seqs=options.max_num_seqs or "auto",
        quiet=console.quiet,
        metrics=metrics,
    )


def load(name: str, options: argparse.Namespace, console: Console) -> LoadedModel:
    """A model by the name that the command line gives it."""
    seed = derive_seed(options.seed, "model")  # of tiny-bytes: the model that a run with this seed starts from
    path = find_model(name)
    with working(f"loading {name}", quiet=console.quiet):
        return load_causal_lm(path, dtype=options.dtype, device=options.device, seed=seed)


def ask(options: argparse.Namespace, policy: LoadedModel) -> Question:
    """The prompts and the reward: the task named, the file named, or those of the run itself."""
    config = run_config(options.model)
    if options.task_options and not options.task:
        raise UsageError("--task-options needs --task")
    if options.task:
        question = _of_task(_task_settings(options))
    elif options.prompts:
        question = Question([], None)
    elif "task" in config:
        question = _of_run(config, policy, options)
    elif config.get("data", {}).get("held_out"):
        question = Question(read_prompts(_paths(config["data"]["held_out"]), reading_of(options)), None)
    else:
        raise UsageError("eval needs something to ask: --prompts FILE or --task NAME (a run of RL has its own)")
    prompts = read_prompts(options.prompts, reading_of(options)) if options.prompts else question.prompts
    if not prompts:
        raise DataError("the task has no held-out prompts: give some with --prompts")
    return Question(prompts[: options.limit], question.reward)


def reading_of(options: argparse.Namespace) -> PromptSettings:
    """How prompts are read: as the run read its own, but for what the command line says."""
    known = run_config(options.model).get("data", {})
    given = {name: value for name, value in known.items() if name in PromptSettings.model_fields and name != "truncate"}
    if getattr(options, "columns", None):
        given["columns"] = read_columns(options.columns)
    given |= {name: getattr(options, name) for name in ("split", "config") if getattr(options, name, None)}
    try:
        return PromptSettings.model_validate({**given, "overlong": "drop"})
    except ValidationError as error:
        raise UsageError(f"--columns: {error.errors()[0]['msg']}") from error


def _paths(value: str | list[str]) -> Paths:
    return value if isinstance(value, str) else tuple(value)


def _task_settings(options: argparse.Namespace) -> TaskSettings:
    text = options.task_options or "{}"
    try:
        return TaskSettings.model_validate({"name": options.task, "options": read_value(text)}, strict=True)
    except (ValidationError, YAMLError) as error:
        raise UsageError(f"--task-options must be a mapping such as '{{max_digits: 1}}', not {text!r}") from error


def _of_task(settings: TaskSettings, data: PromptSettings | None = None) -> Question:
    task = build_task(settings, data)
    return Question(task.held_out(), task.reward())


def _of_run(config: dict[str, Any], policy: LoadedModel, options: argparse.Namespace) -> Question:
    """The held-out prompts of the run's task, scored as the run scored."""
    seed = options.seed
    try:
        settings = TaskSettings.model_validate(config["task"])
        data = PromptSettings.model_validate(config.get("data", {}))
        parts = RewardSettings.model_validate(config.get("reward", {})).parts
    except ValidationError as error:
        raise ConfigError(f"the run's recipe cannot be read: {error.errors()[0]['msg']}") from error
    agree_to_names(names_in(settings, parts), names_of_record(config), run_of(options.model))
    question = _of_task(settings, data)
    if settings.prompts is not None and not question.prompts:
        raise UsageError(
            f"the run was trained on {shown_source(settings.prompts)} and held nothing out: name other prompts with "
            "--prompts FILE"
        )
    parts = tuple(held_here(part) for part in parts)
    return Question(question.prompts, build_reward(parts, own=question.reward, policy=policy, seed=seed))


def held_here(part: Any) -> Any:
    """A part of a run's reward, as it can be held on this machine, whatever device the run was on.

    A reward model in bfloat16 stays in it where the device computes in it, and is in float32 elsewhere.
    """
    bfloat16 = isinstance(part, ModelPart) and part.dtype == "bfloat16"
    return part.model_copy(update={"dtype": AUTO}) if bfloat16 else part


def default_judges(question: Question) -> list[str]:
    """Where nobody is named, the task judges, if there is one."""
    return ["task"] if question.reward else []


def find_judge(spec: str, options: argparse.Namespace, question: Question, models: Sequence[LoadedModel]) -> NamedJudge:
    """The judge that a word of the command line names."""
    try:
        if spec == "task":
            if question.reward is None:
                raise UsageError("--judge task needs a task: name it with --task")
            return NamedJudge(spec, ScoreJudge(question.reward), question.reward)
        if spec.startswith(("http://", "https://")):
            part = RemotePart(kind="remote", url=spec, timeout_seconds=options.judge_timeout)
            token = token_from(options.judge_token_env)
            return NamedJudge(spec, RemoteJudge(part, token=token, seed=options.seed), None)
        if Path(spec).expanduser().is_dir() or (spec.count("/") == 1 and ":" not in spec and spec[0] not in "./~"):
            reward = _reward_model(spec, options.dtype, models)
        elif ":" in spec:
            part = FunctionPart(kind="function", function=spec)
            reward = FunctionReward(part, field=f"--judge {spec}", seed=derive_seed(options.seed, "judge"))
        else:
            raise UsageError(
                f"--judge {spec}: neither task, nor package.module:function, nor the folder or Hugging Face id of a "
                "reward model, nor http://..."
            )
    except ValidationError as error:
        raise UsageError(f"--judge {spec}: {error.errors()[0]['msg']}") from error
    return NamedJudge(spec, ScoreJudge(reward), reward)


def _reward_model(folder: str, dtype: Any, models: Sequence[LoadedModel]) -> RewardFn:
    """It reads tokens where every model has its tokenizer, else text."""
    part = ModelPart(kind="model", path=folder, dtype=dtype)
    return for_all(RewardModelReward.load(part, models[0]), models)


def write_answers(path: str, report: EvaluationReport) -> None:
    """One line for each answer of each model; scores are the prompt's mean."""
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            for evaluation in report.evaluations:
                places = {group: place for place, group in enumerate(dict.fromkeys(_group_ids(evaluation)))}
                for rollout in evaluation.rollouts:
                    place = places[rollout.group_id]
                    scores = {key: column[place] for key, column in evaluation.columns.items()}
                    line = {
                        "model": evaluation.name,
                        "id": rollout.prompt.id,
                        "prompt": rollout.prompt.messages[-1]["content"],
                        "completion": rollout.completion,
                        "finish": rollout.finish,
                        "metrics": {key: value for key, value in scores.items() if not math.isnan(value)},
                    }
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    except OSError as error:
        raise StorageError(f"--answers: cannot write {path} ({error.strerror})") from error


def _group_ids(evaluation: Evaluation) -> list[int]:
    return [rollout.group_id for rollout in evaluation.rollouts]
