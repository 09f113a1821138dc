"""Build one reward from a recipe's `reward.parts`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from tether.config.rewards import FunctionPart, MathVerifyPart, ModelPart, ObjectPart, Part, RemotePart, TaskPart
from tether.errors import ConfigError
from tether.models.load import LoadedModel
from tether.protocols import RewardFn
from tether.rewards.combine import CombinedReward, WeightedReward, failed
from tether.rewards.function import CALL_SECONDS, CodeReward, FunctionReward, in_limits
from tether.rewards.model import LoadShared, RewardModelReward
from tether.rewards.remote import RemoteReward, token_from
from tether.rewards.rules import rule_reward
from tether.seeds import derive_seed
from tether.types import Rollout, Score

Functions = Mapping[str, Callable[..., Any]]
"""The functions that a Python program passes, keyed by part name."""


def build_reward(
    parts: Sequence[Part],
    *,
    own: RewardFn | None,
    policy: LoadedModel | None,
    seed: int,
    load_shared: LoadShared | None = None,
    timeout: float = CALL_SECONDS,
    functions: Functions | None = None,
) -> RewardFn:
    """The parts combined; without parts, the task's own reward.

    `load_shared` loads a reward model onto the backbone that the run's roles share. Without a policy, as in a reward
    server, a reward model reads text with its own tokenizer. `timeout` is the maximum number of seconds for a call of
    Python code in this process; 0 means no limit. `functions` has the functions of the parts of kind object.
    """
    own, functions = in_limits(own, "the task's reward", timeout), functions or {}
    if not parts:
        return _present(own, "reward.parts is empty and there is no task: name at least one part")
    return CombinedReward(
        tuple(
            WeightedReward(part.label, part.weight, _part(part, own, policy, seed, load_shared, timeout, functions))
            for part in parts
        )
    )


def _part(
    part: Any,
    own: RewardFn | None,
    policy: LoadedModel | None,
    seed: int,
    load_shared: LoadShared | None,
    timeout: float,
    functions: Functions,
) -> RewardFn:
    match part:
        case TaskPart():
            return _present(own, "reward.parts: kind task needs a task, and there is none here")
        case ModelPart():
            return RewardModelReward.load(part, policy, load_shared)
        case FunctionPart():
            seed = derive_seed(seed, "reward", part.label)
            return FunctionReward(part, field="reward.parts: function", seed=seed, limit=timeout)
        case ObjectPart():
            return object_reward(part, functions, seed=derive_seed(seed, "reward", part.label), limit=timeout)
        case MathVerifyPart():
            return math_verify_reward(part, seed=derive_seed(seed, "reward", part.label))
        case RemotePart():
            return RemoteReward(part, token=token_from(part.token_env), seed=derive_seed(seed, "reward", part.label))
        case _:
            return CodeReward(rule_reward(part), f"kind {part.kind}", timeout, own=True)


def object_reward(part: ObjectPart, functions: Functions, *, seed: int, limit: float) -> FunctionReward:
    """The function that a Python program passed under the part's name."""
    if part.label not in functions:
        raise ConfigError(
            f"reward.parts: {part.label} is a function that was passed from Python, and a recipe cannot store it: pass "
            f"it again (reward={part.label}), or put it into a file and use {{kind: function, function: "
            f"my_file.py:{part.label}}}"
        )
    named = FunctionPart(kind="function", name=part.label, function=f"object:{part.label}")
    return FunctionReward(named, field="reward", seed=seed, limit=limit, function=functions[part.label])


def math_verify_reward(part: MathVerifyPart, *, seed: int) -> RewardFn:
    """1 or 0 from worker processes; an answer that takes too long, or a prompt without an answer, gets no score."""
    if find_spec("math_verify") is None:
        raise ConfigError(
            "reward.parts: kind math_verify needs the package math-verify, which is not installed: "
            "pip install 'tether-rl[math]'"
        )
    compare = FunctionReward(
        FunctionPart(
            kind="function",
            function="tether.rewards.math_verified:compare_by_math_verify",
            takes="text",
            timeout_seconds=part.timeout_seconds,
            workers=part.workers,
        ),
        field="reward.parts: math_verify",
        seed=seed,
    )

    def reward(rollouts: Sequence[Rollout]) -> list[Score]:
        answered = [rollout for rollout in rollouts if rollout.prompt.answer is not None]
        scores = iter(compare(answered))
        return [failed("no_answer") if rollout.prompt.answer is None else next(scores) for rollout in rollouts]

    return reward


def _present(thing: Any, otherwise: str) -> Any:
    if thing is None:
        raise ConfigError(otherwise)
    return thing
