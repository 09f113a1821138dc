"""One evaluation, of one model or of two: sample the answers, score them, compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tether.config.sections import PromptSettings
from tether.data.prompts import PromptRule
from tether.errors import ConfigError
from tether.evaluation.evaluate import Evaluation, WinRate, compare, differences, evaluate_model, with_kl
from tether.evaluation.intervals import Estimate
from tether.evaluation.judges import Judge
from tether.evaluation.table import EvaluationReport
from tether.models.load import LoadedModel
from tether.models.precision import dtype_name
from tether.models.tokenizers import tokenizer_difference
from tether.progress import working
from tether.protocols import RewardFn, Sampling
from tether.rewards.model import reading_text
from tether.types import Prompt

SCORE = "score"  # the metric that the task's own reward is reported as


@dataclass(frozen=True)
class Question:
    """What is asked, and the task's reward where there is a task."""

    prompts: Sequence[Prompt]
    reward: RewardFn | None


@dataclass(frozen=True)
class NamedJudge:
    """A judge by the name that reports call it; one that scores has a reward too, which is reported by itself."""

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
) -> EvaluationReport:
    """Sample and score the answers of one model, or of two, which are then compared."""
    rewards = {SCORE: question.reward} if question.reward else {}
    rewards |= {judge.name: judge.reward for judge in judges if judge.reward and judge.name != "task"}
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
            notices.append(f"There is no KL: {error}.")
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
    """Without the prompts that are too long for one of the models; `notify` hears how many those were."""
    prompts = question.prompts
    for model in models:
        rule = PromptRule.of(PromptSettings(), model.context_length, sampling.max_new_tokens)
        found = rule.apply(prompts, model.tokenizer, "prompts")
        prompts = found.prompts
        for notice in found.notices:
            notify(notice)
    return Question(prompts, question.reward)


def for_all(reward: RewardFn, models: Sequence[LoadedModel]) -> RewardFn:
    """The reward, for answers of all models: where their tokenizers differ, token ids mean different texts."""
    first, *others = models
    differ = any(tokenizer_difference(first.tokenizer, other.tokenizer) for other in others)
    return reading_text(reward) if differ else reward
