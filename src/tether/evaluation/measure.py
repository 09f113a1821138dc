"""One evaluation, of one model or of two: sample, score, compare; reported as a table or as JSON."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tether.config.sections import PromptSettings
from tether.data.prompts import PromptRule
from tether.errors import ConfigError
from tether.evaluation.evaluate import (
    TASK_SCORE,
    Evaluation,
    WinRate,
    compare,
    differences,
    evaluate_model,
    with_kl,
)
from tether.evaluation.judges import Judge
from tether.evaluation.metrics import LEVEL, Estimate, OwnMetric
from tether.models.load import LoadedModel
from tether.models.precision import dtype_name
from tether.models.tokenizer import tokenizer_difference
from tether.progress import working
from tether.protocols import RewardFn, Sampling
from tether.reports.charts import interval_text
from tether.reports.safe_text import visible
from tether.rewards.model import reading_text
from tether.types import Prompt, Rollout

__all__ = ["MEANINGS", "EvaluationReport", "as_json", "cell", "print_report", "visible"]

MEANINGS = {
    "score": "task score",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "ended": "ended with an end token",
    "length": "length in tokens",
    "repetition": "repeated 4-grams",
    "distinct_1": "distinct words",
    "distinct_2": "distinct pairs of words",
    "kl_k1": "KL to the other, k1",
    "kl_k3": "KL to the other, k3",
}


@dataclass(frozen=True)
class EvaluationReport:
    """All results of `tether eval`."""

    evaluations: tuple[Evaluation, ...]
    differences: dict[str, Estimate]
    win_rates: dict[str, WinRate]  # of the first model, by judge
    settings: dict[str, Any]
    notices: tuple[str, ...]

    @property
    def metrics(self) -> Mapping[str, Estimate]:
        """The first model's metrics."""
        return self.evaluations[0].metrics


def as_json(report: EvaluationReport) -> dict[str, Any]:
    """One object: settings, models with their metrics, differences, win rates, notices."""
    return {
        **report.settings,
        "level": LEVEL,
        "models": [
            {"name": evaluation.name, "metrics": _metrics(evaluation.metrics), "unscored": dict(evaluation.unscored)}
            for evaluation in report.evaluations
        ],
        "differences": _metrics(report.differences),
        "win_rates": {name: dataclasses.asdict(win) for name, win in report.win_rates.items()},
        "notices": list(report.notices),
    }


def print_report(report: EvaluationReport) -> None:
    """Print a table, the win rates, and two example answers."""
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120, highlight=False)
    with console.capture() as captured:  # rich would exit on a closed pipe
        console.print(_table(report))
        for name, win in report.win_rates.items():
            console.print(_win_line(name, win, report.evaluations[0].name))
        for line in _unscored(report.evaluations):
            console.print(f"[yellow]{line}[/yellow]")
        for notice in report.notices:
            console.print(f"[dim]{escape(notice)}[/dim]")
        first = [evaluation.rollouts[0] for evaluation in report.evaluations]
        console.print(f"\n[bold]{escape(visible(first[0].prompt.messages[-1]['content']))}[/bold]")
        for evaluation, rollout in zip(report.evaluations, first, strict=True):
            console.print(f"[cyan]{escape(evaluation.name)}[/cyan]  {escape(_shortened(rollout))}")
    print(captured.get(), end="")


def cell(estimate: Estimate) -> str:
    """0.62 [0.55, 0.69]."""
    return interval_text(estimate.value, estimate.low, estimate.high)


def _table(report: EvaluationReport) -> Table:
    settings = report.settings
    sampled = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    title = f"{settings['prompts']} prompts x {settings['samples']}, {sampled}, seed {settings['seed']}"
    title += f", {settings['dtype']}"
    table = Table(title=f"{title}; {LEVEL:.0%} intervals", title_justify="left")
    table.add_column("")
    for evaluation in report.evaluations:
        table.add_column(escape(evaluation.name), justify="right")
    if report.differences:
        table.add_column("difference", justify="right")
    keys = dict.fromkeys(key for evaluation in report.evaluations for key in evaluation.metrics)
    for key in keys:
        row = [evaluation.metrics.get(key) for evaluation in report.evaluations]
        row += [report.differences.get(key)] if report.differences else []
        table.add_row(escape(MEANINGS.get(key, key)), *(escape(cell(found)) if found else "" for found in row))
    return table


def _win_line(judge: str, win: WinRate, name: str) -> str:
    counts = f"{win.wins} won, {win.losses} lost, {win.ties} tied"
    if win.order_disagreement:
        counts += f" ({win.order_disagreement} because the judge's choice changed with the order)"
    if win.unjudged:
        counts += f", {win.unjudged} not judged"
    return f"[bold]Win rate of {escape(name)} by {escape(judge)}: {escape(cell(win.rate))}[/bold]  {counts}"


def _unscored(evaluations: tuple[Evaluation, ...]) -> list[str]:
    return [
        f"{escape(evaluation.name)}: {number} answers have no {escape(name)}, and are left out of it"
        for evaluation in evaluations
        for name, number in evaluation.unscored.items()
        if number
    ]


def _shortened(rollout: Rollout, most: int = 400) -> str:
    text = visible(rollout.completion.strip())
    return text if len(text) <= most else text[:most] + " ..."


def _metrics(metrics: Any) -> dict[str, Any]:
    return {name: dataclasses.asdict(estimate) for name, estimate in metrics.items()}


@dataclass(frozen=True)
class Question:
    """The prompts, and the task's reward where there is a task."""

    prompts: Sequence[Prompt]
    reward: RewardFn | None


@dataclass(frozen=True)
class NamedJudge:
    """A judge with its name in reports; a judge that scores also has a reward, which is reported separately."""

    name: str
    judge: Judge
    reward: RewardFn | None


def measure(
    names: Sequence[str],
    models: Sequence[LoadedModel],
    question: Question,
    judges: Sequence[NamedJudge],
    sampling: Sampling,
    *,
    samples: int,
    seed: int,
    max_num_seqs: int | Literal["auto"] = "auto",
    quiet: bool,
    metrics: Sequence[OwnMetric] = (),
    pass_at: Sequence[int] = (),
) -> EvaluationReport:
    """Sample and score the answers of one model, or of two, which are then compared."""
    rewards: dict[str, RewardFn] = {TASK_SCORE: question.reward} if question.reward else {}
    rewards |= {judge.name: judge.reward for judge in judges if judge.reward and judge.name != "task"}
    for metric in metrics:
        metric.check(question.prompts)
        rewards[metric.name] = metric
    evaluations: list[Evaluation] = []
    for name, model in zip(names, models, strict=True):
        with working(f"{name}: sampling {len(question.prompts)} x {samples} answers", quiet=quiet):
            evaluations.append(
                evaluate_model(
                    model,
                    question.prompts,
                    sampling=sampling,
                    name=name,
                    rewards=rewards,
                    samples_per_prompt=samples,
                    seed=seed,
                    max_num_seqs=max_num_seqs,
                    pass_at=pass_at,
                )
            )
    notices = [notice for model in models for notice in model.notices]
    notices += [f"{one.name}: not every answer was scored. {error}" for one in evaluations for error in one.errors]
    wins: dict[str, WinRate] = {}
    apart: dict[str, Estimate] = {}
    if len(models) == 2:
        for judge in judges:
            with working(f"{judge.name} judges", quiet=quiet):
                wins[judge.name] = compare(evaluations[0], evaluations[1], judge.judge, seed=seed)
        apart = differences(evaluations[0], evaluations[1], seed=seed)
        try:
            evaluations[0] = with_kl(evaluations[0], models[0], models[1], seed=seed)
        except ConfigError as error:
            notices.append(f"No KL was computed: {error}.")
    settings = {
        "prompts": len(question.prompts),
        "samples": samples,
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "seed": seed,
        "dtype": dtype_name(models[0].model.dtype),
    }
    return EvaluationReport(tuple(evaluations), apart, wins, settings, tuple(dict.fromkeys(notices)))


def fitting(
    question: Question, models: Sequence[LoadedModel], sampling: Sampling, notify: Callable[[str], None]
) -> Question:
    """The prompts without those that are too long for one of the models; `notify` gets their number."""
    prompts = question.prompts
    for model in models:
        rule = PromptRule.of(PromptSettings(), model.context_length, sampling.max_new_tokens)
        found = rule.apply(prompts, model.tokenizer, "prompts")
        prompts = found.prompts
        for notice in found.notices:
            notify(notice)
    return Question(prompts, question.reward)


def for_all(reward: RewardFn, models: Sequence[LoadedModel]) -> RewardFn:
    """The reward for answers of all models; if tokenizers differ, it reads text, since token ids differ in meaning."""
    first, *others = models
    differ = any(tokenizer_difference(first.tokenizer, other.tokenizer) for other in others)
    return reading_text(reward) if differ else reward
