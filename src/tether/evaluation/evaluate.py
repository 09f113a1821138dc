"""Measure a model on prompts, or two models against each other; every number has a confidence interval.

    first = evaluate_model(policy, prompts, sampling=Sampling(64), rewards={"score": task.reward()})
    second = evaluate_model(start, prompts, sampling=Sampling(64), rewards={"score": task.reward()})
    print(first.metrics["score"], compare(first, second, ScoreJudge(task.reward())).rate)

Prompts are independent, answers are not: with several samples per prompt, the samples are averaged first, and intervals
are over prompts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tether.data.rows import attention_mask, pad_right
from tether.errors import ConfigError, DataError
from tether.evaluation.judges import Judge, Pair
from tether.evaluation.metrics import (
    Estimate,
    bootstrap_mean,
    distinct_n,
    distinct_without_each,
    jackknife,
    paired_difference,
    repetition_rate,
    rouge,
    wilson,
)
from tether.evaluation.pass_at_k import passes
from tether.learner.batching import micro_batches
from tether.models.backbones import OutputLayer, backbone_of
from tether.models.load import LoadedModel, check_same_vocabulary
from tether.models.roles import ReferencePolicy
from tether.models.shared_backbone import side_by_side
from tether.ops.kl import Estimator, kl_estimate
from tether.protocols import RewardFn, Sampling
from tether.rewards.scoring import FAILED, failure_errors, score_rollouts
from tether.rollout.native import NativeEngine
from tether.seeds import derive_seed
from tether.types import Prompt, Rollout, Score, Sequences

ESTIMATORS: tuple[Estimator, ...] = ("k1", "k3")
TASK_SCORE = "score"  # the name of the task's own reward
REFERENCES = ("reference", "completion")  # record fields that ROUGE compares with; without them, the prompt's answer


@dataclass(frozen=True)
class Evaluation:
    """One model's answers to some prompts, and their metrics.

    `columns` has one value per prompt: the mean over its samples, NaN where there is none. `metrics` summarizes them.
    """

    name: str
    rollouts: tuple[Rollout, ...]  # the samples of a prompt are adjacent
    sampling: Sampling
    columns: Mapping[str, tuple[float, ...]]
    metrics: Mapping[str, Estimate]
    unscored: Mapping[str, int]  # by reward: the number of answers without a score, which are excluded
    errors: tuple[str, ...] = ()  # the rewards' messages about those


@dataclass(frozen=True)
class WinRate:
    """How often the first model's answer was preferred; a tie is half a win. `rate` is over the judged pairs."""

    rate: Estimate
    wins: int
    losses: int
    ties: int
    order_disagreement: int  # ties because the judge's choice changed with the order of the answers
    unjudged: int


def evaluate_model(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    name: str = "model",
    rewards: Mapping[str, RewardFn] | None = None,
    samples_per_prompt: int = 1,
    seed: int = 0,
    max_num_seqs: int | Literal["auto"] = "auto",
    pass_at: Sequence[int] = (),
) -> Evaluation:
    """Sample answers and measure them. With the same seed and prompts, two models get the same random draws.

    `pass_at` adds pass@k of each reward for these k.
    """
    engine = NativeEngine(loaded, max_num_seqs=max_num_seqs)
    stream = derive_seed(seed, "evaluate")
    rollouts = engine.generate(prompts, sampling, samples_per_prompt=samples_per_prompt, seed=stream)
    given = {"sampling": sampling, "name": name, "rewards": rewards, "seed": seed, "pass_at": pass_at}
    return evaluate_rollouts(rollouts, **given)


def evaluate_rollouts(
    rollouts: Sequence[Rollout],
    *,
    sampling: Sampling,
    name: str = "model",
    rewards: Mapping[str, RewardFn] | None = None,
    seed: int = 0,
    pass_at: Sequence[int] = (),
) -> Evaluation:
    """Measure existing answers, such as those of a `ScriptedEngine`."""
    answers: dict[str, list[float]] = {}
    unscored: dict[str, int] = {}
    errors: list[str] = []
    for reward_name, reward in (rewards or {}).items():
        scores = score_rollouts(reward, rollouts, max_failure_rate=1.0)
        errors += [f"{reward_name}: {error}" for error in failure_errors(scores)]
        scored = _columns(scores, reward_name)
        answers |= scored
        unscored[reward_name] = sum(map(math.isnan, scored[reward_name]))
    answers |= _rouge(rollouts)
    answers["ended"] = [float(rollout.finish == "stop") for rollout in rollouts]
    answers["length"] = [float(rollout.response_length) for rollout in rollouts]
    answers["repetition"] = [repetition_rate(rollout.completion) for rollout in rollouts]
    groups = _groups(rollouts)
    columns = {key: tuple(_mean([values[row] for row in rows]) for rows in groups) for key, values in answers.items()}
    for reward_name in unscored:
        values = answers[reward_name]
        for k in pass_at:
            key = f"pass@{k}" if reward_name == TASK_SCORE else f"pass@{k}/{reward_name}"
            columns[key] = tuple(passes([values[row] for row in rows], k) for rows in groups)
    proportions = {"ended", *(key for key in columns if key.partition("/")[0] in unscored or key.startswith("pass@"))}
    metrics = {
        key: _estimate(finite, key in proportions, derive_seed(seed, "bootstrap", key))
        for key, column in columns.items()
        if (finite := [value for value in column if not math.isnan(value)])
    }
    metrics |= _diversity([[rollouts[row].completion for row in rows] for rows in groups])
    return Evaluation(name, tuple(rollouts), sampling, columns, metrics, unscored, tuple(errors))


def with_kl(
    evaluation: Evaluation, model: LoadedModel, reference: LoadedModel, *, micro_batch_tokens: int = 8192, seed: int = 0
) -> Evaluation:
    """The evaluation with `kl_k1` and `kl_k3`: KL(model || reference) of a whole answer, from the model's own samples.

    The same pass computes both models' log-probs, at the sampling temperature over the whole vocabulary, so the KL of a
    model to itself is exactly 0. Greedy answers are not samples, so no KL can be estimated from them.
    """
    temperature = evaluation.sampling.temperature
    if temperature == 0.0:
        raise ConfigError("the KL is estimated from sampled answers: choose a temperature above 0")
    check_same_vocabulary(model, reference, "reference")
    batch = _batch(evaluation.rollouts, model.pad_id, temperature)
    ours, theirs = _logprobs(model, reference, batch, micro_batch_tokens)
    groups, columns, metrics = _groups(evaluation.rollouts), dict(evaluation.columns), dict(evaluation.metrics)
    for estimator in ESTIMATORS:
        per_token = kl_estimate(ours, theirs, estimator).masked_fill(~batch.response_mask, 0.0)
        sums = per_token.double().sum(dim=1).tolist()
        key = f"kl_{estimator}"
        columns[key] = tuple(_mean([sums[row] for row in rows]) for rows in groups)
        metrics[key] = bootstrap_mean(columns[key], seed=derive_seed(seed, "bootstrap", key))
    return dataclasses.replace(evaluation, columns=columns, metrics=metrics)


def compare(
    first: Evaluation, second: Evaluation, judge: Judge, *, seed: int = 0, max_failure_rate: float = 0.1
) -> WinRate:
    """The first model's win rate over the second. Raises if more than `max_failure_rate` of the pairs are unjudged."""
    ids = [[(rollout.prompt.id, rollout.sample_id) for rollout in side.rollouts] for side in (first, second)]
    if ids[0] != ids[1]:
        raise DataError("two models can be compared only on the same prompts, with the same number of samples of each")
    pairs = [Pair(one, other) for one, other in zip(first.rollouts, second.rollouts, strict=True)]
    verdicts = list(judge(pairs))
    if len(verdicts) != len(pairs):
        raise DataError(
            f"the judge returned {len(verdicts)} verdicts on {len(pairs)} pairs: it must return one for each"
        )
    worth = {"first": 1.0, "tie": 0.5, "second": 0.0, None: math.nan}
    values = [worth[verdict.choice] for verdict in verdicts]
    unjudged = sum(map(math.isnan, values))
    if unjudged == len(pairs) or unjudged > max_failure_rate * len(pairs):
        reasons = sorted({verdict.reason for verdict in verdicts if verdict.choice is None})
        raise DataError(f"the judge gave no verdict on {unjudged} of {len(pairs)} pairs ({', '.join(reasons)})")
    means = [_mean([values[row] for row in rows]) for rows in _groups(first.rollouts)]
    finite = [mean for mean in means if not math.isnan(mean)]
    return WinRate(
        rate=_estimate(finite, True, derive_seed(seed, "wins")),
        wins=values.count(1.0),
        losses=values.count(0.0),
        ties=values.count(0.5),
        order_disagreement=sum(not verdict.orders_agree for verdict in verdicts),
        unjudged=unjudged,
    )


def differences(first: Evaluation, second: Evaluation, *, seed: int = 0) -> dict[str, Estimate]:
    """First minus second, for every per-prompt metric that both have, over the prompts where both have a value."""
    found: dict[str, Estimate] = {}
    for key in [key for key in first.columns if key in second.columns]:
        both = zip(first.columns[key], second.columns[key], strict=True)
        kept = [pair for pair in both if not any(map(math.isnan, pair))]
        if kept:
            ours, theirs = zip(*kept, strict=True)
            found[key] = paired_difference(ours, theirs, seed=derive_seed(seed, "difference", key))
    return found


def reference_text(prompt: Prompt) -> str | None:
    """The reference text that ROUGE compares with, if there is one."""
    candidates = [*(prompt.meta.get(field) for field in REFERENCES), prompt.answer]
    return next((text for text in candidates if isinstance(text, str) and text.strip()), None)


# -- small parts --------------------------------------------------------------------------------------------------


def _columns(scores: Sequence[Score], name: str) -> dict[str, list[float]]:
    """The reward's values under its name, and each part under `name/part`; NaN where there is none."""
    parts = dict.fromkeys(part for score in scores for part in score.parts if FAILED not in part.split("/"))
    values = {name: [score.value if score.valid and math.isfinite(score.value) else math.nan for score in scores]}
    return values | {f"{name}/{part}": [score.parts.get(part, math.nan) for score in scores] for part in parts}


def _rouge(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    rows: list[dict[str, float]] = []
    for rollout in rollouts:
        reference = reference_text(rollout.prompt)
        rows.append({} if reference is None else rouge(rollout.completion, reference)._asdict())
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [row.get(key, math.nan) for row in rows] for key in keys}


def _diversity(groups: Sequence[Sequence[str]]) -> dict[str, Estimate]:
    found: dict[str, Estimate] = {}
    for n in (1, 2):
        value = distinct_n([text for texts in groups for text in texts], n)
        without = [part for part in distinct_without_each(groups, n) if not math.isnan(part)]
        if not math.isnan(value):
            found[f"distinct_{n}"] = jackknife(value, without, bounds=(0.0, 1.0))
    return found


def _estimate(values: Sequence[float], proportion: bool, seed: int) -> Estimate:
    """Wilson's interval where every prompt is 0, 1 or a tie, since a bootstrap has no width where all agree."""
    if proportion and all(value in (0.0, 0.5, 1.0) for value in values):
        return wilson(sum(values), len(values))
    return bootstrap_mean(values, seed=seed)


def _groups(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """The row indices of each prompt."""
    groups: dict[int, list[int]] = {}
    for row, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group_id, []).append(row)
    return list(groups.values())


def _mean(values: Sequence[float]) -> float:
    """The mean of the values that are not NaN; NaN where there are none."""
    kept = [value for value in values if not math.isnan(value)]
    return sum(kept) / len(kept) if kept else math.nan


def _batch(rollouts: Sequence[Rollout], pad_id: int, temperature: float) -> Sequences:
    tokens = [rollout.token_ids for rollout in rollouts]
    return Sequences(
        tokens=pad_right(tokens, pad_id),
        attention_mask=attention_mask(tokens),
        response_mask=pad_right([rollout.response_mask for rollout in rollouts], False),
        temperature=temperature,
    )


@torch.no_grad()
def _logprobs(
    model: LoadedModel, reference: LoadedModel, batch: Sequences, micro_batch_tokens: int
) -> tuple[Tensor, Tensor]:
    """(B, T) log-probs of the answers' tokens under each model, on the CPU."""
    models = model.model, reference.model
    backbones = side_by_side(*map(backbone_of, models))
    roles = [
        ReferencePolicy(backbone, OutputLayer.of(whole)) for backbone, whole in zip(backbones, models, strict=True)
    ]
    columns = torch.zeros(batch.tokens.shape), torch.zeros(batch.tokens.shape)
    for rows in micro_batches(batch, micro_batch_tokens):
        micro = batch.select(rows)
        start, end = micro.span()
        for role, whole, column in zip(roles, models, columns, strict=True):
            column[rows, start:end] = role.logprobs(micro.trimmed().to(whole.device)).float().cpu()
    return columns
