"""The suite as a whole: which metrics it gives, measured on one model, and two measurements compared in pairs.

    before = run_suite(SuiteModel.of_loaded(start), ("perplexity", "arithmetic"))
    after = run_suite(SuiteModel.of_loaded(policy), ("perplexity", "arithmetic"))
    compare_suites(after, before)["arithmetic"].difference

A metric has one value per item: a passage, a problem, a prompt. Items are the same for every model, so that differences
are over pairs. Where several metrics are compared, a difference also has the interval at which all of them together
hold at 95 % (Bonferroni).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from tether.config.suite_names import LM_EVAL
from tether.errors import DataError
from tether.evaluation.metrics import LEVEL, Estimate, bootstrap, bootstrap_mean, wilson
from tether.evaluation.suite import arithmetic, instructions, open_answers
from tether.evaluation.suite.held_out_text import passages, score_texts
from tether.evaluation.suite.suite_model import SuiteModel
from tether.protocols import Sampling
from tether.seeds import derive_seed

PROBLEMS = 64
ADJUSTED_RESAMPLES = 20_000  # the adjusted interval lies far out in the tails
GREEDY = 0.0


@dataclass(frozen=True)
class Metric:
    """What a metric of the suite means, and how much of a change for the worse counts as a loss."""

    label: str
    better: Literal["higher", "lower"]
    margin: float  # a smaller change for the worse is no loss, however certain it is
    proportion: bool = False  # each item is a yes or a no
    judged: bool = True  # False: reported, and left to another metric to judge
    logarithmic: bool = False  # items hold logs: the value is exp of their mean


METRICS: dict[str, Metric] = {
    "bits_per_byte": Metric("held-out text, bits per byte", "lower", 0.05),
    "perplexity": Metric("held-out text, perplexity per token", "lower", 1.0, judged=False, logarithmic=True),
    "arithmetic": Metric("arithmetic, right", "higher", 0.05, proportion=True),
    "instructions": Metric("instructions followed", "higher", 0.05, proportion=True),
    "repetition": Metric("repeated 4-grams in an answer", "lower", 0.1),
    "sameness": Metric("4-grams shared between answers", "lower", 0.1),
}
LM_EVAL_MARGIN = 0.03


@dataclass(frozen=True)
class SuiteResult:
    """One measurement. `columns` has one value per item and metric; `directions` are of metrics of lm-eval."""

    names: tuple[str, ...]
    items: int | None
    seed: int
    columns: Mapping[str, tuple[float, ...]]
    directions: Mapping[str, Literal["higher", "lower"]] = dataclasses.field(default_factory=dict)

    def metric(self, name: str) -> Metric:
        """What a metric means."""
        if name in METRICS:
            return METRICS[name]
        better = self.directions[name]
        proportion = all(value in (0.0, 1.0) for value in self.columns[name])
        return Metric(name, better, LM_EVAL_MARGIN, proportion=proportion, judged=proportion)

    @property
    def estimates(self) -> dict[str, Estimate]:
        """Each metric with its 95 % interval."""
        return {name: self._estimate(name, column) for name, column in self.columns.items()}

    def _estimate(self, name: str, column: Sequence[float]) -> Estimate:
        metric, seed = self.metric(name), derive_seed(self.seed, "bootstrap", name)
        if metric.proportion:
            return wilson(sum(column), len(column))
        if metric.logarithmic:
            return bootstrap([column], lambda x: x[0].mean(dim=-1).exp(), seed=seed)
        return bootstrap_mean(column, seed=seed)

    def as_json(self) -> dict[str, Any]:
        """Plain values, read back by `from_json`."""
        return {**dataclasses.asdict(self), "columns": {name: list(column) for name, column in self.columns.items()}}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> SuiteResult:
        """The measurement that `as_json` wrote; raises KeyError, TypeError or ValueError for anything else."""
        columns = {str(name): tuple(map(float, column)) for name, column in record["columns"].items()}
        names, items = tuple(map(str, record["names"])), record["items"]
        return cls(names, items, int(record["seed"]), columns, dict(record["directions"]))


@dataclass(frozen=True)
class MetricChange:
    """How a metric differs between two measurements: the first minus the second."""

    first: Estimate
    second: Estimate
    difference: Estimate  # at 95 %
    adjusted: tuple[float, float]  # the interval at which all judged metrics together hold at 95 %
    metric: Metric


def run_suite(
    model: SuiteModel,
    names: Sequence[str],
    *,
    items: int | None = None,
    seed: int = 0,
) -> SuiteResult:
    """Measure the parts that are named; `items` limits the items of each part."""
    columns: dict[str, tuple[float, ...]] = {}
    directions: dict[str, Literal["higher", "lower"]] = {}
    for name in names:
        if not name.startswith(LM_EVAL):
            columns |= {key: tuple(values) for key, values in PARTS[name](model, items, seed).items()}
    tasks = [name.removeprefix(LM_EVAL) for name in names if name.startswith(LM_EVAL)]
    if tasks:
        from tether.evaluation.suite.lm_eval_bridge import run_tasks

        found = run_tasks(model, tasks, items=items, seed=seed)
        columns |= {key: column for key, (column, _) in found.items()}
        directions = {key: better for key, (_, better) in found.items()}
    return SuiteResult(tuple(names), items, seed, columns, directions)


def compare_suites(first: SuiteResult, second: SuiteResult) -> dict[str, MetricChange]:
    """First minus second for every metric of both, over pairs of the same items."""
    told = [(result.names, result.items, result.seed) for result in (first, second)]
    if told[0] != told[1]:
        raise DataError("two measurements can be compared only where both have the same parts, items and seed")
    shared = [name for name in first.columns if name in second.columns]
    judged = max(1, sum(first.metric(name).judged for name in shared))
    return {name: _change(first, second, name, judged) for name in shared}


def _change(first: SuiteResult, second: SuiteResult, name: str, judged: int) -> MetricChange:
    pairs, metric = [first.columns[name], second.columns[name]], first.metric(name)

    def statistic(columns: Tensor) -> Tensor:
        means = columns.mean(dim=-1)
        means = means.exp() if metric.logarithmic else means
        return means[0] - means[1]

    seed = derive_seed(first.seed, "difference", name)
    difference = bootstrap(pairs, statistic, seed=seed)
    level = 1.0 - (1.0 - LEVEL) / judged
    far = bootstrap(pairs, statistic, seed=seed, level=level, resamples=ADJUSTED_RESAMPLES)
    ends = first.estimates[name], second.estimates[name]
    return MetricChange(*ends, difference, (far.low, far.high), metric)


# -- the parts ----------------------------------------------------------------------------------------------------

Columns = dict[str, list[float]]
Part = Callable[[SuiteModel, int | None, int], Columns]


def _perplexity(model: SuiteModel, items: int | None, seed: int) -> Columns:
    del seed
    scores = score_texts(model, [passage.text for passage in passages()[:items]])
    return {
        "bits_per_byte": [score.bits_per_byte for score in scores],
        "perplexity": [score.nats_per_token for score in scores],
    }


def _arithmetic(model: SuiteModel, items: int | None, seed: int) -> Columns:
    asked = arithmetic.problems(min(PROBLEMS, items or PROBLEMS), seed)
    prompts = [problem.prompt(number) for number, problem in enumerate(asked)]
    answers = model.answers(prompts, Sampling(arithmetic.MAX_NEW_TOKENS, GREEDY), seed, "arithmetic")
    right = [arithmetic.is_right(problem, each.completion) for problem, each in zip(asked, answers, strict=True)]
    return {"arithmetic": [float(each) for each in right]}


def _instructions(model: SuiteModel, items: int | None, seed: int) -> Columns:
    asked = instructions.INSTRUCTIONS[:items]
    prompts = [instruction.prompt(number) for number, instruction in enumerate(asked)]
    answers = model.answers(prompts, Sampling(instructions.MAX_NEW_TOKENS, GREEDY), seed, "instructions")
    followed = [each.check(answer.completion) for each, answer in zip(asked, answers, strict=True)]
    return {"instructions": [float(each) for each in followed]}


def _repetition(model: SuiteModel, items: int | None, seed: int) -> Columns:
    prompts = open_answers.prompts(len(open_answers.QUESTIONS[:items]))
    sampling = Sampling(open_answers.MAX_NEW_TOKENS, 1.0)
    texts = [each.completion for each in model.answers(prompts, sampling, seed, "repetition")]
    return {"repetition": open_answers.repetition(texts), "sameness": open_answers.sameness(texts)}


PARTS: dict[str, Part] = {
    "perplexity": _perplexity,
    "arithmetic": _arithmetic,
    "instructions": _instructions,
    "repetition": _repetition,
}


def is_finite(result: SuiteResult) -> bool:
    """Whether every value is a finite number; a diverged model gives others."""
    return all(math.isfinite(value) for column in result.columns.values() for value in column)
