"""A task small enough for a two-layer model from scratch: answer with characters of the kind that was asked for."""

from __future__ import annotations

import string
from collections.abc import Sequence

from tether.protocols import RewardFn
from tether.types import Prompt, Rollout, Score

KINDS = {"lower": string.ascii_lowercase, "UPPER": string.ascii_uppercase, "12345": string.digits}


class MatchCase:
    """Prompts `lower:`, `UPPER:` and `12345:`; the score is the fraction of `length` characters of that kind.

    The most is 1. An answer that ends early scores only what it has, so stopping is not a way out.
    """

    def __init__(self, length: int = 8) -> None:
        self.length = length

    def prompts(self) -> Sequence[Prompt]:
        """One prompt for each kind and each of 16 numbered variants."""
        return [
            Prompt.from_text(f"{kind}-{variant}", f"{variant:x} {kind}:", answer=kind)
            for kind in KINDS
            for variant in range(16)
        ]

    def held_out(self) -> Sequence[Prompt]:
        """The same three questions without a number."""
        return [Prompt.from_text(f"held-out-{kind}", f"{kind}:", answer=kind) for kind in KINDS]

    def reward(self) -> RewardFn:
        """The fraction of the wanted characters."""

        def score(rollouts: Sequence[Rollout]) -> list[Score]:
            return [Score(self.fraction(rollout)) for rollout in rollouts]

        return score

    def fraction(self, rollout: Rollout) -> float:
        """How much of the answer is of the kind that was asked for."""
        assert rollout.prompt.answer is not None
        wanted = KINDS[rollout.prompt.answer]
        return sum(character in wanted for character in rollout.completion[: self.length]) / self.length
