"""Build one reward from a recipe's `reward.parts`, and the rules that it names: length, patterns, answers."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from tether.config.rewards import (
    EndedPart,
    ExactPart,
    FunctionPart,
    JSONPart,
    LengthPart,
    MathPart,
    MathVerifyPart,
    ModelPart,
    NumericPart,
    ObjectPart,
    Part,
    RegexPart,
    RemotePart,
    TaskPart,
)
from tether.errors import ConfigError
from tether.models.load import LoadedModel
from tether.protocols import RewardFn
from tether.rewards.function import FunctionReward, in_limits
from tether.rewards.math_answer import extract, math_correct
from tether.rewards.math_terms import close, last_number, number, plain_numeral
from tether.rewards.model import LoadShared, RewardModelReward
from tether.rewards.remote import RemoteReward, token_from
from tether.rewards.scoring import CALL_SECONDS, CodeReward, CombinedReward, WeightedReward, failed
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


# -- rules --------------------------------------------------------------------------------------------------------


RulePart = LengthPart | RegexPart | JSONPart | ExactPart | NumericPart | MathPart | EndedPart
_FENCE = re.compile(r"```[A-Za-z]*[ \t]*\n(.*?)\n?```", re.DOTALL)


def rule_reward(part: RulePart) -> RewardFn:
    """The reward that the part describes."""
    match part:
        case LengthPart():
            return _each(lambda rollout: length_value(rollout.completion, part))
        case RegexPart():
            return _each(_regex(part))
        case JSONPart():
            return _each(lambda rollout: float(json_is_valid(rollout.completion, part.keys, fenced=part.fenced)))
        case EndedPart():
            return _each(lambda rollout: float(rollout.finish == "stop"))
        case ExactPart():
            return _answered(lambda completion, answer: exact_match(completion, answer, part))
        case NumericPart():
            return _answered(lambda completion, answer: numeric_match(completion, answer, part.tolerance))
        case MathPart():
            return _answered(lambda completion, answer: math_correct(completion, answer, part.tolerance))


def length_value(completion: str, part: LengthPart) -> float:
    """1 within the limits; outside, 1 - (units outside the limits) / falloff, at least 0."""
    length = len(completion.split()) if part.unit == "words" else len(completion)
    least = part.target if part.target is not None else part.min or 0
    most = part.target if part.target is not None else part.max
    outside = max(least - length, 0) if most is None else max(least - length, length - most, 0)
    return max(0.0, 1.0 - outside / part.falloff)


def json_is_valid(completion: str, keys: Sequence[str], *, fenced: bool) -> bool:
    """Whether the completion, or its ``` fenced block, is strict JSON (no NaN) with these top-level keys."""
    text = completion.strip()
    if fenced and (fence := _FENCE.search(text)):
        text = fence[1]
    try:
        # Integers are kept as text: Python rejects those of more than 4,300 digits, and JSON allows them.
        value = json.loads(text, parse_constant=_refuse, parse_int=len, parse_float=len)
    except (ValueError, RecursionError):
        return False
    return not keys or (isinstance(value, dict) and all(key in value for key in keys))


def exact_match(completion: str, answer: str, part: ExactPart) -> bool:
    """Whether both texts are equal after normalization; an empty text equals nothing."""
    found = normalise(extract(completion, part.extract, answer) or "", ignore_case=part.ignore_case)
    return bool(found) and found == normalise(answer, ignore_case=part.ignore_case)


def normalise(text: str, *, ignore_case: bool) -> str:
    """NFKC, single spaces, no quotes or punctuation around the text; `$6,250` becomes `6250`."""
    text = " ".join(unicodedata.normalize("NFKC", text).split()).strip(" .,;:!?\"'`*“”‘’")
    text = plain_numeral(text) or text
    return text.casefold() if ignore_case else text


def numeric_match(completion: str, answer: str, tolerance: float) -> bool | None:
    """Whether the completion's last number is the answer; None where the prompt's answer is not a number."""
    wanted = number(answer)
    if wanted is None:
        return None
    found = last_number(completion)
    return found is not None and close(found, wanted, tolerance)


def _regex(part: RegexPart) -> Callable[[Rollout], float]:
    pattern = re.compile(part.pattern, re.IGNORECASE if part.ignore_case else 0)
    if part.match == "full":
        return lambda rollout: float(pattern.fullmatch(rollout.completion.strip()) is not None)
    return lambda rollout: float(pattern.search(rollout.completion) is not None)


def _each(rule: Callable[[Rollout], float]) -> RewardFn:
    return lambda rollouts: [Score(rule(rollout)) for rollout in rollouts]


def _answered(check: Callable[[str, str], bool | None]) -> RewardFn:
    """A rule that needs the prompt's answer; a prompt without a usable one cannot be scored."""

    def score(rollout: Rollout) -> Score:
        if rollout.prompt.answer is None:
            return failed("no_answer")
        right = check(rollout.completion, rollout.prompt.answer)
        return failed("answer_is_no_number") if right is None else Score(float(right))

    return lambda rollouts: [score(rollout) for rollout in rollouts]


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
