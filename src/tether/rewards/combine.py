"""Combine several rewards into a weighted sum that keeps each part's value and failures.

In `Score.parts`, a part that scored has its raw value under its name. A part that failed has no value but
`NAME/failed/REASON: 1`, and a part that does not apply to a rollout has `NAME/not_applicable: 1`. The logged metrics
are therefore a function of the scores alone. Rollouts are also converted to plain data and back here, for functions
that take texts and columns and for worker processes.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from tether.errors import DataError, TetherError
from tether.protocols import RewardFn
from tether.rewards.calling import NOT_APPLICABLE, Signature, explain
from tether.types import Message, Prompt, Rollout, Score
from tether.user_code import is_its_own

TENSORS = {"token_ids": torch.int64, "response_mask": torch.bool}
TENSORS |= {"behavior_logprobs": torch.float32, "untruncated_logprobs": torch.float32}


def sample_of(rollout: Rollout, signature: Signature) -> dict[str, Any]:
    """The sample that a function of this signature gets (`tether.rewards.calling` lists the keys)."""
    prompt = rollout.prompt
    with_ids = signature.takes == "trl" and any(map(signature.wants, ("completion_ids", "completions_ids")))
    return {
        "prompt": prompt.messages[-1]["content"],
        "messages": [dict(message) for message in prompt.messages],
        "completion": rollout.completion,
        "answer": prompt.answer,
        "id": prompt.id,
        "finish": rollout.finish,
        "as_messages": holds_messages(prompt),
        "completion_ids": rollout.token_ids[rollout.response_mask].tolist() if with_ids else [],
        "step": rollout.trained_in,
        "columns": {str(name): value for name, value in prompt.meta.items() if signature.wants(str(name))},
    }


def holds_messages(prompt: Prompt) -> bool:
    """Whether a prompt was given as messages, or could only have been given as messages."""
    return prompt.as_messages or [message["role"] for message in prompt.messages] != ["user"]


def plain_rollout(rollout: Rollout, signature: Signature) -> dict[str, Any]:
    """A whole rollout as JSON values. A float32 is restored exactly from its decimal text."""
    rest = {"group_id": rollout.group_id, "sample_id": rollout.sample_id, "policy_version": rollout.policy_version}
    return sample_of(rollout, signature) | rest | {name: getattr(rollout, name).tolist() for name in TENSORS}


def rollout_from(plain: dict[str, Any]) -> Rollout:
    """The rollout that `plain_rollout` wrote."""
    prompt = Prompt(
        plain["id"],
        tuple(cast(list[Message], plain["messages"])),
        plain["answer"],
        plain["columns"],
        plain["as_messages"],
    )
    return Rollout(
        prompt=prompt,
        group_id=plain["group_id"],
        sample_id=plain["sample_id"],
        completion=plain["completion"],
        finish=plain["finish"],
        policy_version=plain["policy_version"],
        step=plain["step"],
        **{name: torch.tensor(plain[name], dtype=dtype) for name, dtype in TENSORS.items()},
    )


def private_copies(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Copies of rollouts that user code may sort and modify without changing the run."""
    copies: list[Rollout] = []
    for rollout in rollouts:
        try:
            prompt = copy.deepcopy(rollout.prompt)
        except Exception as error:  # a task may put any object into `meta`
            raise DataError(
                f"prompt {rollout.prompt.id!r} has a value that cannot be copied ({type(error).__name__}: {error}): "
                "keep plain data in its meta"
            ) from error
        tensors = {name: getattr(rollout, name).clone() for name in TENSORS}
        copies.append(dataclasses.replace(rollout, prompt=prompt, **tensors))
    return copies


FAILED = "failed"


def failed(reason: str, error: str = "") -> Score:
    """The score of a rollout that could not be scored: masked out and counted by reason, never treated as zero.

    `error` is a one-line explanation for the user.
    """
    return Score(math.nan, {f"{FAILED}/{reason}": 1.0}, valid=False, error=error)


class WeightedReward(NamedTuple):
    """One part of a combined reward."""

    name: str
    weight: float
    reward: RewardFn


@dataclass(frozen=True)
class CombinedReward:
    """The weighted sum of its parts. A rollout that any part failed to score has no valid score.

    A part that does not apply to a rollout adds nothing to its sum; one to which no part applies has no valid score.
    """

    parts: tuple[WeightedReward, ...]

    @property
    def notices(self) -> tuple[str, ...]:
        """Messages of the parts for the user."""
        return tuple(notice for part in self.parts for notice in getattr(part.reward, "notices", ()))

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise where a part cannot score the answers to these prompts."""
        for part in self.parts:
            check_reward(part.reward, prompts)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout; each part gets the whole batch."""
        columns = [self._column(part, rollouts) for part in self.parts]
        return [self._combine([column[row] for column in columns]) for row in range(len(rollouts))]

    def _column(self, part: WeightedReward, rollouts: Sequence[Rollout]) -> list[Score]:
        try:
            scores = list(part.reward(list(rollouts)))  # its own list, which it may sort
        except TetherError as error:
            raise type(error)(f"part {part.name!r}: {error}") from error
        except BaseException as error:
            if not is_its_own(error):
                raise
            raise DataError(f"part {part.name!r} raised {explain(error)}") from error
        if len(scores) != len(rollouts):
            raise DataError(f"part {part.name!r} returned {len(scores)} scores for {len(rollouts)} rollouts")
        return scores

    def _combine(self, scores: Sequence[Score]) -> Score:
        total, values, errors, valid, applies = 0.0, dict[str, float](), list[str](), True, False
        for part, score in zip(self.parts, scores, strict=True):
            if score.valid and not math.isfinite(score.value):
                score = failed("not_finite")
            if f"{FAILED}/{NOT_APPLICABLE}" in score.parts:
                values[f"{part.name}/{NOT_APPLICABLE}"] = 1.0
                continue
            applies = True
            values |= {f"{part.name}/{name}": value for name, value in score.parts.items()}
            if score.valid:
                values[part.name] = score.value
                total += part.weight * score.value
            elif not any(name.startswith(f"{FAILED}/") for name in score.parts):
                values[f"{part.name}/{FAILED}/invalid"] = 1.0
            if score.error:
                errors.append(f"{part.name}: {score.error}")
            valid = valid and score.valid
        if not applies:
            values[f"{FAILED}/{NOT_APPLICABLE}"] = 1.0
            valid = False
        return Score(total if valid else math.nan, values, valid, "; ".join(errors))


def check_reward(reward: RewardFn, prompts: Sequence[Prompt]) -> None:
    """Raise where a reward knows in advance that it cannot score the answers to these prompts."""
    check = getattr(reward, "check", None)
    if callable(check):
        check(prompts)


def part_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """`reward/NAME`, the mean over the rollouts that the part scored; `reward/NAME/failed`, the number it did not.

    Failures are also counted by reason, as `reward/NAME/failed/REASON`; `reward/NAME/not_applicable` is the number of
    rollouts that the part does not apply to.
    """
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for score in scores:
        for name, value in score.parts.items():
            if FAILED in name.split("/"):
                failures[name] += 1
            elif name.endswith(f"/{NOT_APPLICABLE}"):
                skipped[name] += 1
            elif math.isfinite(value):
                sums[name] += value  # pyright: ignore[reportArgumentType] (a Counter of floats)
                counts[name] += 1
    metrics = {f"reward/{name}": sums[name] / counts[name] for name in counts}
    metrics |= {f"reward/{name}/{FAILED}": 0.0 for name in counts if "/" not in name}
    metrics |= {f"reward/{name}": float(number) for name, number in skipped.items()}
    for name, number in failures.items():
        part, _, _ = f"/{name}".rpartition(f"/{FAILED}")
        metrics[f"reward/{name}"] = float(number)
        metrics[f"reward{part}/{FAILED}"] = metrics.get(f"reward{part}/{FAILED}", 0.0) + number
    return dict(sorted(metrics.items()))


def failure_reasons(scores: Sequence[Score]) -> str:
    """A summary for an error message: "remote: 12 timeout"; empty where no reason is known."""
    reasons: Counter[str] = Counter()
    for score in scores:
        for name in score.parts:
            if FAILED in (steps := name.split("/")):
                part = "/".join(steps[: steps.index(FAILED)])
                reasons[f"{part}: {steps[-1]}" if part else steps[-1]] += 1
    return ", ".join(f"{reason} ({number})" for reason, number in reasons.most_common(5))


def failure_errors(scores: Sequence[Score], most: int = 3) -> list[str]:
    """The rewards' error messages with their counts, the most frequent first."""
    errors = Counter(score.error for score in scores if not score.usable and score.error)
    return [f"{error} ({number} of {len(scores)})" for error, number in errors.most_common(most)]
