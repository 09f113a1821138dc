"""The tokens that sampler and trainer disagree about most, told by name when they are worse than any before them.

The mean, the largest gap and the KL of every iteration are metrics (`logprob_diff`, `logprob_diff_max`, `sampler_kl`),
and both log-probs of every token are in the rollouts that the store keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from tether.store.recorder import Pieces
from tether.types import Experience

TOKENS_TOLD = 5
SMALLEST_TOLD = 0.01  # nats: float32 gives 1e-6, and nobody wants to hear of that


@dataclass(frozen=True)
class ApartToken:
    """A sampled token and its two log-probs, before the first update."""

    row: int
    place: int  # among the row's own tokens, the prompt's included
    token: int
    sampler: float
    trainer: float

    @property
    def gap(self) -> float:
        """How far apart they are, in nats."""
        return abs(self.sampler - self.trainer)


def worst_tokens(experience: Experience, count: int = TOKENS_TOLD) -> list[ApartToken]:
    """The sampled tokens with the largest gaps, worst first."""
    gaps = (experience.old_logprobs - experience.untruncated_logprobs).abs()
    gaps = gaps.masked_fill(~experience.response_mask, -1.0)
    places = (experience.attention_mask.cumsum(dim=1) - 1).flatten()
    found: list[ApartToken] = []
    for flat in gaps.flatten().topk(min(count, int(experience.response_mask.sum()))).indices.tolist():
        row = flat // gaps.shape[1]
        numbers = (column.flatten()[flat] for column in (experience.untruncated_logprobs, experience.old_logprobs))
        found.append(ApartToken(row, int(places[flat]), int(experience.tokens.flatten()[flat]), *map(float, numbers)))
    return found


@dataclass
class Agreement:
    """Remembers the worst gap of a run."""

    worst: float = 0.0

    def see(self, step: int, experience: Experience, pieces: Pieces, event: Callable[..., None]) -> None:
        """Record an iteration's worst tokens where one is worse than all before it, and worth hearing of."""
        found = worst_tokens(experience)
        if not found or not found[0].gap > max(self.worst, SMALLEST_TOLD):
            return
        first, self.worst = found[0], found[0].gap
        texts = ["".join(pieces([token.token])) for token in found]
        event(
            "agreement",
            f"sampler and trainer are {first.gap:.3g} nats apart, further than before: sample {first.row}, token "
            f"{first.place} {texts[0]!r}, sampler {first.sampler:.4g}, trainer {first.trainer:.4g}",
            step=step,
            data={"tokens": [asdict(token) | {"text": text} for token, text in zip(found, texts, strict=True)]},
        )
