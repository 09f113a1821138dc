"""From a recipe's `reward.parts` to one reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tether.config.rewards import FunctionPart, ModelPart, Part, RemotePart, TaskPart
from tether.errors import ConfigError
from tether.models.load import LoadedModel
from tether.protocols import RewardFn
from tether.rewards.combine import CombinedReward, WeightedReward, failed
from tether.rewards.model import LoadShared, RewardModelReward
from tether.rewards.remote import RemoteReward, token_from
from tether.rewards.resolve import resolve
from tether.rewards.rules import rule_reward
from tether.seeds import derive_seed
from tether.types import Rollout, Score


def build_reward(
    parts: Sequence[Part],
    *,
    own: RewardFn | None,
    policy: LoadedModel | None,
    seed: int,
    load_shared: LoadShared | None = None,
) -> RewardFn:
    """The parts combined; where there are none, the task's own reward.

    `load_shared` loads a reward model onto the trunk that the run's roles share. Without a policy, as in a reward
    server, a reward model reads texts by its own tokenizer.
    """
    if not parts:
        return _present(own, "reward.parts is empty and there is no task: name at least one part")
    return CombinedReward(
        tuple(WeightedReward(part.label, part.weight, _part(part, own, policy, seed, load_shared)) for part in parts)
    )


def _part(
    part: Any, own: RewardFn | None, policy: LoadedModel | None, seed: int, load_shared: LoadShared | None
) -> RewardFn:
    match part:
        case TaskPart():
            return _present(own, "reward.parts: kind task needs a task, and there is none here")
        case ModelPart():
            return RewardModelReward.load(part, policy, load_shared)
        case FunctionPart():
            return function_reward(part)
        case RemotePart():
            return RemoteReward(part, token=token_from(part.token_env), seed=derive_seed(seed, "reward", part.label))
        case _:
            return rule_reward(part)


def function_reward(part: FunctionPart) -> RewardFn:
    """A user's function as a reward.

    One that takes text and raises, or gives no number, has failed for that rollout alone. One that takes rollouts may
    give numbers or Scores; where it raises, nothing is scored and the run ends.
    """
    function: Callable[..., Any] = resolve(part.function, "reward.parts: function")
    if part.takes == "rollouts":
        return lambda rollouts: [value if isinstance(value, Score) else _score(value) for value in function(rollouts)]

    def score(rollout: Rollout) -> Score:
        try:
            prompt = rollout.prompt
            return _score(function(prompt.messages[-1]["content"], rollout.completion, prompt.answer))
        except Exception as error:
            return failed(type(error).__name__)

    return lambda rollouts: [score(rollout) for rollout in rollouts]


def _score(value: Any) -> Score:
    """A number as a score; anything that is none, and None itself, is a failure."""
    if value is None:
        return failed("none")
    if isinstance(value, (str, bytes)):
        return failed("not_a_number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        return failed("not_a_number")
    return Score(number) if math.isfinite(number) else failed("not_finite")


def _present(thing: Any, otherwise: str) -> Any:
    if thing is None:
        raise ConfigError(otherwise)
    return thing
