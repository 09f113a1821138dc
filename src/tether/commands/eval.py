"""`tether eval`: measure models on prompts. The options say which models, which prompts, and who judges."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.commands.options import (
    CommandParser,
    add_model_options,
    add_reading_options,
    check_models,
    count,
    load_named,
    on_this_device,
)
from tether.errors import ConfigError, DataError, StorageError, UsageError
from tether.seeds import derive_seed

if TYPE_CHECKING:
    from rich.console import Console

    from tether.config.base import Paths
    from tether.config.sections import PromptSettings, TaskSettings
    from tether.evaluation.evaluate import Evaluation
    from tether.evaluation.measure import EvaluationReport, NamedJudge, Question
    from tether.models.load import LoadedModel
    from tether.protocols import RewardFn

SUMMARY = "Measure a model on prompts, alone or against another, each number with its 95 % interval."
EPILOG = """examples:
  tether eval runs/ppo                                     on the task it was trained on
  tether eval runs/ppo --against runs/sft --prompts held_out.jsonl --judge runs/reward
  tether eval runs/ppo --against smollm2-135m --prompts held_out.jsonl --judge mine:rule --judge http://host/judge
  tether eval runs/ppo --metric my_metric.py:politeness
  tether eval smollm2-135m --task reasoning-gym:chain_sum --task-options '{min_digits: 1, max_digits: 1}'
  tether eval runs/ppo --samples 16 --pass-at 1,4,8        the chance that one of 1, 4, 8 answers is right
  tether eval runs/ppo --against smollm2-135m --suite      what it forgot; see docs/suite.md
"""


def eval_command(words: list[str]) -> int:
    """Evaluate and print a table, or one JSON object."""
    options = eval_parser().parse_args(words)
    check_models(options.model, options.against)
    if options.suite is not None:
        from tether.commands.eval_suite import suite_command

        return suite_command(options)

    from rich.console import Console

    from tether.evaluation.measure import as_json, print_report

    report = evaluate_models(options, Console(stderr=True, quiet=options.json))
    if options.answers:
        write_answers(options.answers, report)
    if options.json:
        print(json.dumps(as_json(report)))
    else:
        print_report(report)
    return 0


def eval_parser() -> CommandParser:
    """All options of `tether eval`."""
    parser = CommandParser("eval", SUMMARY, EPILOG)
    parser.add_argument("model", metavar="MODEL", help="a run's folder, a model's folder, a name or a Hugging Face id")
    parser.add_argument("--against", metavar="OTHER", help="a second model, on the same prompts and random draws")
    asked = parser.add_argument_group("what is asked")
    asked.add_argument(
        "--prompts",
        metavar="FILE",
        help="records with `prompt`: a file, a glob, a saved dataset's folder, a dataset's id",
    )
    add_reading_options(asked)
    asked.add_argument(
        "--task", metavar="NAME", help="a task: its held-out prompts, and its score (default: the run's)"
    )
    asked.add_argument("--task-options", metavar="YAML", help="options of the task, such as '{max_digits: 1}'")
    asked.add_argument("--limit", type=count, metavar="N", help="use only the first N prompts")
    asked.add_argument(
        "--suite",
        nargs="?",
        const="all",
        metavar="NAMES",
        help="in place of prompts, a suite of capabilities: perplexity, arithmetic, instructions, repetition, or all "
        "four (the default); or tasks of lm-evaluation-harness: lm-eval:hellaswag,arc_easy",
    )
    judged = parser.add_argument_group("how answers are judged")
    judged.add_argument(
        "--judge",
        action="append",
        default=[],
        metavar="WHO",
        help="who says which answer is better: task, package.module:function of (prompt, completion, answer), the "
        "folder of a reward model, or the address of a judge (http://...); repeatable",
    )
    judged.add_argument("--judge-token-env", metavar="NAME", help="environment variable with a remote judge's token")
    judged.add_argument(
        "--judge-timeout", type=float, default=30.0, metavar="S", help="seconds before a request times out (30)"
    )
    judged.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="FILE.PY:NAME",
        help="a metric of your own, reported beside the others: a function of (prompt, completion, **columns) that "
        "returns a number; repeatable",
    )
    sampled = parser.add_argument_group("how answers are sampled")
    sampled.add_argument("-n", "--samples", type=count, default=1, metavar="N", help="answers to each prompt (1)")
    judged.add_argument(
        "--pass-at",
        type=whole_numbers,
        default=(),
        metavar="K,...",
        help="pass@K by the task's score: the chance that at least one of K answers scores 1; needs --samples of K or "
        "more",
    )
    sampled.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the run's, or 1)")
    sampled.add_argument("--max-new-tokens", type=count, metavar="N", help="default: the run's, or 128")
    sampled.add_argument("--seed", type=int, default=0, metavar="S", help="seed of every random draw (0)")
    add_model_options(parser)
    parser.add_argument("--answers", metavar="FILE", help="write every answer, with its scores, to this .jsonl file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def evaluate_models(options: argparse.Namespace, console: Console) -> EvaluationReport:
    """Load, sample, score, compare."""
    from tether.evaluation.measure import Question, fitting, for_all, measure
    from tether.evaluation.metrics import own_metrics
    from tether.protocols import Sampling
    from tether.seeds import derive_seed
    from tether.store.find import find_run_or_model, run_config

    check_pass_at(options)
    options.model = find_run_or_model(options.model)
    options.against = find_run_or_model(options.against) if options.against else None
    rollout = run_config(options.model).get("rollout", {})
    temperature = rollout.get("temperature", 1.0) if options.temperature is None else options.temperature
    sampling = Sampling(options.max_new_tokens or rollout.get("max_new_tokens", 128), temperature)
    names = [options.model, *([options.against] if options.against else [])]
    metrics = own_metrics(options.metric, "--metric", derive_seed(options.seed, "metrics"))
    models = [load_named(name, options, console) for name in names]
    question = fitting(ask(options, models[0]), models, sampling, lambda text: console.print(text, markup=False))
    if question.reward is not None:
        question = Question(question.prompts, for_all(question.reward, models))
    if options.pass_at and question.reward is None:
        raise UsageError("--pass-at needs a score: name a task with --task")
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
        pass_at=options.pass_at,
    )


def whole_numbers(words: str) -> tuple[int, ...]:
    """The positive numbers of a list such as 1,4,8."""
    return tuple(dict.fromkeys(count(word.strip()) for word in words.split(",")))


def check_pass_at(options: argparse.Namespace) -> None:
    """Raise where there are fewer answers than pass@k needs."""
    if options.pass_at and max(options.pass_at) > options.samples:
        raise UsageError(
            f"--pass-at {max(options.pass_at)} needs at least as many answers to each prompt, and --samples is "
            f"{options.samples}: raise it"
        )
    if options.pass_at and options.temperature == 0.0:
        raise UsageError("--pass-at needs different answers to a prompt: choose a --temperature above 0")


def ask(options: argparse.Namespace, policy: LoadedModel) -> Question:
    """The prompts and the reward: the task named, the file named, or those of the run itself."""
    from tether.data.prompts import read_prompts
    from tether.evaluation.measure import Question
    from tether.store.find import run_config

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
    """How prompts are read: as the run read its own, with the options of the command line."""
    from pydantic import ValidationError

    from tether.config.base import read_columns
    from tether.config.sections import PromptSettings
    from tether.store.find import run_config

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
    from pydantic import ValidationError
    from yaml import YAMLError

    from tether.config.read_yaml import read_value
    from tether.config.sections import TaskSettings

    text = options.task_options or "{}"
    try:
        return TaskSettings.model_validate({"name": options.task, "options": read_value(text)}, strict=True)
    except (ValidationError, YAMLError) as error:
        raise UsageError(f"--task-options must be a mapping such as '{{max_digits: 1}}', not {text!r}") from error


def _of_task(settings: TaskSettings, data: PromptSettings | None = None) -> Question:
    from tether.evaluation.measure import Question
    from tether.rewards.tasks import build_task

    task = build_task(settings, data)
    return Question(task.held_out(), task.reward())


def _of_run(config: dict[str, Any], policy: LoadedModel, options: argparse.Namespace) -> Question:
    """The held-out prompts of the run's task, scored as the run scored."""
    from pydantic import ValidationError

    from tether.config.allowed_code import names_in, names_of_record
    from tether.config.sections import PromptSettings, RewardSettings, TaskSettings
    from tether.data.sources import shown_source
    from tether.evaluation.measure import Question
    from tether.rewards.agree import agree_to_names
    from tether.rewards.parts import build_reward
    from tether.store.find import run_of

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
    parts = tuple(on_this_device(part) for part in parts)
    return Question(question.prompts, build_reward(parts, own=question.reward, policy=policy, seed=seed))


def default_judges(question: Question) -> list[str]:
    """The judges if none is named: the task, if there is one."""
    return ["task"] if question.reward else []


def find_judge(spec: str, options: argparse.Namespace, question: Question, models: Sequence[LoadedModel]) -> NamedJudge:
    """The judge that a word of the command line names."""
    from pydantic import ValidationError

    from tether.config.rewards import FunctionPart, RemotePart
    from tether.evaluation.judges import RemoteJudge, ScoreJudge
    from tether.evaluation.measure import NamedJudge
    from tether.rewards.function import FunctionReward
    from tether.rewards.remote import token_from

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
    from tether.config.rewards import ModelPart
    from tether.evaluation.measure import for_all
    from tether.rewards.model import RewardModelReward

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
