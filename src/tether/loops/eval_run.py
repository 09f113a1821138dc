"""From the options of `tether eval` to an evaluation: which models, which prompts, who judges."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from yaml import YAMLError

from tether.config.parts import RewardSettings, TaskSettings
from tether.config.read_yaml import read_value
from tether.config.rewards import FunctionPart, ModelPart, RemotePart
from tether.data.records import read_prompts
from tether.errors import ConfigError, DataError, StorageError, UsageError
from tether.loops.eval_report import Report, as_json, print_report
from tether.loops.evaluate import Evaluation, WinRate, compare, differences, evaluate_model, with_kl
from tether.loops.judges import Judge, RemoteJudge, ScoreJudge
from tether.metrics.intervals import Estimate
from tether.models.load import LoadedModel, check_same_vocabulary, load_causal_lm
from tether.models.precision import AUTO, dtype_name
from tether.protocols import RewardFn, Sampling
from tether.rewards.build import build_reward, function_reward
from tether.rewards.model import RewardModelReward
from tether.rewards.remote import token_from
from tether.rewards.tasks import build_task
from tether.runs.find import find_model, run_config
from tether.seeds import derive_seed
from tether.types import Prompt

SCORE = "score"  # the metric that the task's own reward is reported as


@dataclass(frozen=True)
class Question:
    """What is asked, and the task's reward where there is a task."""

    prompts: Sequence[Prompt]
    reward: RewardFn | None


@dataclass(frozen=True)
class NamedJudge:
    """A judge of the command line; one that scores has a reward too, which is reported by itself."""

    name: str
    judge: Judge
    reward: RewardFn | None


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


def evaluate(options: argparse.Namespace, console: Console) -> Report:
    """Load, sample, score, compare."""
    rollout = run_config(options.model).get("rollout", {})
    temperature = rollout.get("temperature", 1.0) if options.temperature is None else options.temperature
    sampling = Sampling(options.max_new_tokens or rollout.get("max_new_tokens", 128), temperature)
    names = [options.model, *([options.against] if options.against else [])]
    models = [load(name, options, console) for name in names]
    question = ask(options, models[0])
    judges = [find_judge(spec, options, question, models) for spec in options.judge or default_judges(question)]
    rewards = {SCORE: question.reward} if question.reward else {}
    rewards |= {judge.name: judge.reward for judge in judges if judge.reward and judge.name != "task"}
    evaluations: list[Evaluation] = []
    for name, model in zip(names, models, strict=True):
        console.print(f"[dim]{name}: sampling {len(question.prompts)} x {options.samples} answers[/dim]")
        given = {"samples_per_prompt": options.samples, "seed": options.seed, "max_batch": options.max_batch or "auto"}
        evaluations.append(
            evaluate_model(model, question.prompts, sampling=sampling, name=name, rewards=rewards, **given)
        )
    notices = [notice for model in models for notice in model.notices]
    wins: dict[str, WinRate] = {}
    apart: dict[str, Estimate] = {}
    if len(models) == 2:
        for judge in judges:
            wins[judge.name] = compare(evaluations[0], evaluations[1], judge.judge, seed=options.seed)
        apart = differences(evaluations[0], evaluations[1], seed=options.seed)
        try:
            evaluations[0] = with_kl(evaluations[0], models[0], models[1], seed=options.seed)
        except ConfigError as error:
            notices.append(f"There is no KL: {error}.")
    settings = {
        "prompts": len(question.prompts),
        "samples": options.samples,
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "seed": options.seed,
        "dtype": dtype_name(models[0].model.dtype),
    }
    return Report(tuple(evaluations), apart, wins, settings, tuple(dict.fromkeys(notices)))


def load(name: str, options: argparse.Namespace, console: Console) -> LoadedModel:
    """A model by the name that the command line gives it."""
    console.print(f"[dim]loading {name}[/dim]")
    seed = derive_seed(options.seed, "model")  # of tiny-bytes: the model that a run with this seed starts from
    return load_causal_lm(find_model(name), dtype=options.dtype, device=options.device, seed=seed)


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
        question = _of_run(config, policy, options.seed)
    elif config.get("data", {}).get("held_out"):
        question = Question(read_prompts(config["data"]["held_out"]), None)
    else:
        raise UsageError("eval needs something to ask: --prompts FILE or --task NAME (a run of RL has its own)")
    prompts = read_prompts(options.prompts) if options.prompts else question.prompts
    if not prompts:
        raise DataError("the task has no held-out prompts: give some with --prompts")
    return Question(prompts[: options.limit], question.reward)


def _task_settings(options: argparse.Namespace) -> TaskSettings:
    text = options.task_options or "{}"
    try:
        return TaskSettings.model_validate({"name": options.task, "options": read_value(text)}, strict=True)
    except (ValidationError, YAMLError) as error:
        raise UsageError(f"--task-options must be a mapping such as '{{max_digits: 1}}', not {text!r}") from error


def _of_task(settings: TaskSettings) -> Question:
    task = build_task(settings)
    return Question(task.held_out(), task.reward())


def _of_run(config: dict[str, Any], policy: LoadedModel, seed: int) -> Question:
    """The held-out prompts of the run's task, scored as the run scored."""
    try:
        settings = TaskSettings.model_validate(config["task"])
        parts = RewardSettings.model_validate(config.get("reward", {})).parts
    except ValidationError as error:
        raise ConfigError(f"the run's recipe cannot be read: {error.errors()[0]['msg']}") from error
    if settings.prompts:
        raise UsageError(f"the run was trained on {settings.prompts}: name other prompts with --prompts FILE")
    question = _of_task(settings)
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
        if Path(spec).expanduser().is_dir():
            reward = _reward_model(spec, options.dtype, models)
        elif ":" in spec:
            reward = function_reward(FunctionPart(kind="function", function=spec, takes="text"))
        else:
            raise UsageError(f"--judge {spec}: neither task, nor package.module:function, nor a folder, nor http://...")
    except ValidationError as error:
        raise UsageError(f"--judge {spec}: {error.errors()[0]['msg']}") from error
    return NamedJudge(spec, ScoreJudge(reward), reward)


def _reward_model(folder: str, dtype: Any, models: Sequence[LoadedModel]) -> RewardModelReward:
    """It reads token ids, so every model must share its vocabulary."""
    part = ModelPart(kind="model", path=find_model(folder), dtype=dtype)
    reward = RewardModelReward.load(part, models[0])
    for model in models[1:]:
        check_same_vocabulary(model, reward.vocabulary, f"reward model {folder}")
    return reward


def write_answers(path: str, report: Report) -> None:
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
