"""The stages that sample answers: `collect`, `best_of_n`, and the first half of `rejection_sampling`.

A stage first writes its answers to `answers.jsonl`, then rates them, and notes last that it is done. What was written
is used again when the pipeline is resumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tether.config.pipeline_recipe import BestOfNRecipe, CollectRecipe, RejectionSamplingRecipe, ScoreSettings
from tether.config.recipes import SFTRecipe
from tether.errors import DataError
from tether.pipeline.answers import (
    held_out_prompts,
    load_policy_of,
    prompts_of_round,
    reward_of,
    sampled_groups,
    task_with,
)
from tether.pipeline.order import BEST_FILE, HELD_OUT_FILE, TRAIN_FILE
from tether.pipeline.rankings import read_lines, write_lines, write_split
from tether.pipeline.raters import ANSWERS, rated
from tether.pipeline.stage_context import StageContext
from tether.protocols import RewardFn
from tether.rewards.pool import close_workers
from tether.rewards.scoring import score_rollouts
from tether.seeds import derive_seed
from tether.types import Rollout

Samples = CollectRecipe | BestOfNRecipe | RejectionSamplingRecipe


def collect(context: StageContext, settings: CollectRecipe) -> dict[str, Any]:
    """Sample, rate, and write the ratings in two parts; returns the stage's figures."""
    sampled = sample_stage(context, settings, settings.reward if settings.rater == "reward" else None)
    groups, about = rated(context, settings, sampled)
    held_out = math.ceil(settings.held_out * len(groups))
    if len(groups) == held_out or (settings.held_out and not held_out):
        raise DataError(
            f"stage {context.step.folder}: the answers to only {len(groups)} of {len(sampled)} prompts could be ranked "
            "and not all tied: raise answers.prompts or answers.samples_per_prompt"
        )
    records = [record for group in groups for record in group]
    first = sum(map(len, groups[:held_out]))
    write_split(records, first, context.folder / TRAIN_FILE, context.folder / HELD_OUT_FILE)
    figures = {"prompts": len(sampled), "ranked_prompts": len(groups), "held_out_prompts": held_out}
    return context.finish(figures | {"pairs": sum(map(decided_pairs, records))} | about)


def decided_pairs(record: dict[str, Any]) -> int:
    """The number of pairs of a ranking that are not tied."""
    ranks = record["ranks"]
    return sum(one < other for one in ranks for other in ranks)


def best_of_n(context: StageContext, settings: BestOfNRecipe, truth: RewardFn | None) -> dict[str, Any]:
    """Keep the best answer to each prompt as a demonstration; the figures compare it with the mean answer."""
    sampled = sample_stage(context, settings, settings.reward, truth)
    return context.finish(write_best(context, sampled, settings.answers.samples_per_prompt))


def write_best(context: StageContext, sampled: Sequence[dict[str, Any]], count: int) -> dict[str, Any]:
    """Write the best answers, and return the figures of the choice. Unfinished answers are no demonstrations."""
    records, figures = [], []
    for each in sampled:
        known = [place for place, score in enumerate(each["scores"]) if score is not None]
        if not known:
            continue
        best = max(known, key=lambda place: each["scores"][place])
        figures.append((each, known, best))
        finished = [place for place in known if each["ended"][place]]
        if finished:
            place = max(finished, key=lambda place: each["scores"][place])
            records.append({"prompt": each["prompt"], "completion": each["answers"][place]})
    if not records:
        raise DataError(
            f"stage {context.step.folder}: no answer to any of {len(sampled)} prompts ended by itself, so there is "
            "none to learn from: raise answers.max_new_tokens"
        )
    write_lines(context.folder / BEST_FILE, records)
    found: dict[str, Any] = {"prompts": len(sampled), "n": count, "kept": len(records)}
    # The KL of best-of-n to its policy, at most (Stiennon et al. 2020; Beirami et al. 2024).
    found["kl_bound"] = math.log(count) - (count - 1) / count
    for name in ("scores", "true"):
        if name in sampled[0]:
            means = [_mean([each[name][place] for place in known]) for each, known, _ in figures]
            found[f"{name}_mean"] = _mean(means)
            found[f"{name}_best"] = _mean([each[name][best] for each, _, best in figures])
    return found


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def sample_stage(
    context: StageContext, settings: Samples, scores: ScoreSettings | None, truth: RewardFn | None = None
) -> list[dict[str, Any]]:
    """The answers of a stage, sampled once and then read from its folder."""
    file = context.folder / ANSWERS
    if file.is_file():
        return read_lines(file)
    context.folder.mkdir(parents=True, exist_ok=True)
    task, model = task_with(settings.task), load_policy_of(settings.model, context.round_seed)
    if isinstance(settings, BestOfNRecipe) and settings.split == "held_out":
        prompts = held_out_prompts(task, settings.answers.prompts, model, settings.answers.max_new_tokens)
    else:
        prompts = prompts_of_round(task, settings.answers, model, context.seed, context.step.round)
    reward = reward_of(scores, task, model, context.round_seed) if scores is not None else None
    advance = context.progress(len(prompts), "sample")
    groups = list(
        sampled_groups(
            model,
            prompts,
            settings.answers,
            derive_seed(context.round_seed, "answers"),
            stop=context.stop,
            advance=lambda done: advance(done, ""),
        )
    )
    if len(groups) < len(prompts):
        raise context.stopped()
    records = [answers_record(group) for group in groups]
    limit = scores.max_failure_rate if scores is not None else 1.0
    try:
        for name, rule, most in (("scores", reward, limit), ("true", truth, 1.0)):
            if rule is not None:
                _score(records, groups, name, rule, most, context)
    finally:
        close_workers()
    write_lines(file, records)
    return records


def answers_record(answers: Sequence[Rollout]) -> dict[str, Any]:
    """The answers to one prompt as a line of `answers.jsonl`."""
    prompt = answers[0].prompt
    return {
        "id": prompt.id,
        "prompt": [dict(message) for message in prompt.messages],
        "answers": [answer.completion.strip() or "(empty)" for answer in answers],
        "ended": [answer.finish == "stop" for answer in answers],
    }


def _score(
    records: list[dict[str, Any]],
    groups: Sequence[Sequence[Rollout]],
    name: str,
    reward: RewardFn,
    max_failure_rate: float,
    context: StageContext,
) -> None:
    """Add a score of every answer; None where there is none."""
    try:
        scores = score_rollouts(
            reward, [answer for group in groups for answer in group], max_failure_rate=max_failure_rate
        )
    except DataError as error:
        raise DataError(f"stage {context.step.folder}: {error}") from error
    values = iter(scores)
    for record, group in zip(records, groups, strict=True):
        known = [next(values) for _ in group]
        record[name] = [score.value if score.usable else None for score in known]


def rejection_recipe(context: StageContext, settings: RejectionSamplingRecipe) -> SFTRecipe:
    """Supervised fine-tuning on the best answers, which are sampled here."""
    if context.figures() is None:
        sampled = sample_stage(context, settings, settings.reward)
        context.finish(write_best(context, sampled, settings.answers.samples_per_prompt))
    data = settings.data.model_copy(update={"train": str(context.folder / BEST_FILE)})
    fields: dict[str, Any] = {name: getattr(settings, name) for name in SFTRecipe.model_fields}
    fields["data"] = data
    return SFTRecipe(**fields)
