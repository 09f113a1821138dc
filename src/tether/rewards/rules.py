"""Simple rule rewards: length, patterns, JSON, an exact or a numeric answer, whether the answer ended."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence

from tether.config.rewards import (
    EndedPart,
    ExactPart,
    JSONPart,
    LengthPart,
    MathPart,
    NumericPart,
    RegexPart,
)
from tether.protocols import RewardFn
from tether.rewards.combine import failed
from tether.rewards.math_answer import extract, math_correct
from tether.rewards.math_terms import close, last_number, number, plain_numeral
from tether.types import Rollout, Score

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
