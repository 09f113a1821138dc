"""Metrics over all answers of one step: variety, repetition, concentration of the advantage.

They are cheap enough to record at every step. Where a run has not recorded them, the audits compute them from the
stored rollouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tether.store.recorded import StoredRollout

GRAM = 4  # tokens: a repeated 4-gram is a repetition, not just a common word
MIXER = np.uint64(0x9E3779B97F4A7C15)  # odd, with well-mixed bits: products wrap around and spread out
SHORTEST = 16  # tokens: repetition is not measured in shorter answers
TOP_PART = 0.05  # the "few" samples: this fraction of a step's answers, at least one
MIN_ROWS = 16  # with fewer answers, shares and correlations are noise


def step_measures(rollouts: Sequence[StoredRollout]) -> dict[str, float]:
    """All metrics that can be computed from one step's rollouts."""
    found: dict[str, float] = {}
    if not rollouts:
        return found
    found["prompts/distinct"] = float(len({rollout.prompt_id for rollout in rollouts}))
    found["prompts/asked"] = float(len({rollout.group_id for rollout in rollouts}))
    found["answers/top_share"] = top_answer_share(
        [rollout.prompt_id for rollout in rollouts], [rollout.completion for rollout in rollouts]
    )
    tokens = [rollout.answer("token") for rollout in rollouts]
    repeated = [repetition(answer) for answer in tokens if len(answer) >= SHORTEST]
    if repeated:
        found["answers/repetition"] = float(np.mean(repeated))
    lengths = np.array([len(answer) for answer in tokens], dtype=float)
    scores = np.array([rollout.score for rollout in rollouts], dtype=float)
    found["zero_std_groups"] = flat_groups([rollout.group_id for rollout in rollouts], scores)
    if len(rollouts) >= MIN_ROWS:
        found["length_score_correlation"] = correlation(lengths, scores)
        if all("advantage" in rollout.columns for rollout in rollouts):
            mass = [float(np.abs(rollout.answer("advantage")).sum()) for rollout in rollouts]
            found["advantage_top_share"] = top_share(mass)
    return {name: value for name, value in found.items() if np.isfinite(value)}


def top_answer_share(prompt_ids: Sequence[str], completions: Sequence[str]) -> float:
    """The largest fraction of distinct prompts that got the same answer; 1 / prompts where all answers differ.

    Answers are compared without surrounding white space and without case. With one prompt it is NaN.
    """
    prompts = set(prompt_ids)
    if len(prompts) < 2:
        return float("nan")
    given = {(prompt, text.strip().lower()) for prompt, text in zip(prompt_ids, completions, strict=True)}
    counts = Counter(text for _, text in given)
    return max(counts.values()) / len(prompts)


def most_common_answer(rollouts: Sequence[StoredRollout]) -> str:
    """The answer that most distinct prompts got, as first written."""
    given = {(rollout.prompt_id, rollout.completion.strip().lower()): rollout.completion for rollout in rollouts}
    counts = Counter(text for _, text in given)
    top = counts.most_common(1)[0][0]
    return next(rollout.completion for rollout in rollouts if rollout.completion.strip().lower() == top)


def repetition(tokens: ArrayLike) -> float:
    """1 - (distinct 4-grams / 4-grams) of one answer's tokens: 0 without repetition, near 1 in a loop."""
    row = np.asarray(tokens)
    if len(row) < GRAM:
        return 0.0
    row, count = row.astype(np.uint64), len(row) - GRAM + 1
    names = np.zeros(count, dtype=np.uint64)  # a hash per gram: equal for equal grams, rarely for others
    for place in range(GRAM):
        names = names * MIXER + row[place : place + count]
    names.sort()
    return 1.0 - (1 + int((names[1:] != names[:-1]).sum())) / count


def top_share(mass: ArrayLike) -> float:
    """The fraction of all |advantage| on the TOP_PART answers with the most of it; NaN where all are 0."""
    row: NDArray[np.float64] = np.sort(np.asarray(mass, dtype=float))[::-1]
    total = float(row.sum())
    few = max(1, round(TOP_PART * len(row)))
    return float(row[:few].sum()) / total if total > 0.0 else float("nan")


def flat_groups(group_ids: Sequence[int], scores: NDArray[np.float64]) -> float:
    """The fraction of groups whose samples all have the same score; NaN where no prompt has several answers."""
    groups: dict[int, list[float]] = {}
    for group, score in zip(group_ids, scores, strict=True):
        groups.setdefault(group, []).append(float(score))
    several = [group for group in groups.values() if len(group) > 1]
    return sum(max(group) == min(group) for group in several) / len(several) if several else float("nan")


def correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Pearson correlation; NaN where either array is constant."""
    if float(one.std()) < 1e-9 or float(other.std()) < 1e-9:
        return float("nan")
    return float(np.corrcoef(one, other)[0, 1])


def measured(metrics: Mapping[str, float], rollouts: Sequence[StoredRollout]) -> dict[str, float]:
    """One step's metrics, plus the metrics of its rollouts where they were not recorded."""
    return step_measures(rollouts) | dict(metrics)
