"""What the update saw of each token when it looked at it for the last time: kept for people, at no extra pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tether.algorithms.algorithm import TokenObjective
from tether.algorithms.objectives import Clip, PolicyObjective
from tether.device_transfer import brought
from tether.learner.ranks import ONE, Codec, Ranks
from tether.ops.kl import log_ratio
from tether.ops.logprobs import places_of
from tether.ops.losses import clip_cases
from tether.types import Experience, Loss, TokenOutputs, extend


@dataclass(frozen=True, kw_only=True)
class NumberedExperience(Experience):
    """Experience whose rows know their place, so that a part of it can be traced back to the whole."""

    places: Tensor  # (B,) int64


SEEN = Codec[tuple[Tensor, Tensor]](
    lambda seen: (None, {"rows": seen[0], "logprobs": seen[1]}),
    lambda _, columns: (columns["rows"], columns["logprobs"]),
)


class TokenStats:
    """The log-probs that the update's last pass over each token found; where it never came by, the old ones.

    A pass is made before the step that it leads to, so this is how the token stood when it was last learned from, not
    after the very last step: to know that would cost one more pass over everything.
    """

    def __init__(self, experience: Experience, ranks: Ranks = ONE) -> None:
        self.ranks = ranks
        self.passes = 0  # over a batch, on whichever ranks
        places = torch.arange(len(experience))
        self.experience = extend(experience, NumberedExperience, places=places)
        # Pass, rows, masks and log-probs, where the passes left them.
        self._seen: list[tuple[int, Tensor, Tensor, Tensor]] = []
        self._logprobs = experience.old_logprobs.clone()  # (B, T) without those

    def watching(self, objective: TokenObjective) -> TokenObjective:
        """The objective, watched."""
        return _Watched(objective, self)

    def take(self, outputs: TokenOutputs, batch: NumberedExperience) -> None:
        """Note what a micro-batch's pass found; it stays on its device until someone asks."""
        self._seen.append((self.passes, batch.places, batch.response_mask, outputs.logprobs.detach()))

    @property
    def logprobs(self) -> Tensor:
        """(B, T) what the last passes found."""

        def seen_here() -> list[tuple[int, tuple[Tensor, Tensor]]]:
            rows = brought([places for _, places, _, _ in self._seen])
            answers = brought([found.flatten().index_select(0, places_of(mask)) for _, _, mask, found in self._seen])
            return list(zip((each[0] for each in self._seen), zip(rows, answers, strict=True), strict=True))

        for rows, found in self.ranks.merged(seen_here, SEEN):
            seen = self._logprobs[rows]  # wider than the micro-batch, which is trimmed; the masks pick the same tokens
            seen[self.experience.response_mask[rows]] = found.to(seen.dtype)
            self._logprobs[rows] = seen
        self._seen.clear()
        return self._logprobs

    def ratios(self) -> Tensor:
        """(B, T) new / old, bounded as in the loss; 1 off the answers."""
        difference = log_ratio(self.logprobs, self.experience.old_logprobs)
        return difference.masked_fill(~self.experience.response_mask, 0.0).exp()

    def clipped(self, objective: TokenObjective) -> Tensor | None:
        """(B, T) bool, whether the clip had removed the token's gradient; None where the objective has no clip."""
        surrogate = objective.surrogate if isinstance(objective, PolicyObjective) else None
        if not isinstance(surrogate, Clip):
            return None
        cases = clip_cases(
            self.logprobs,
            self.experience.old_logprobs,
            self.experience.advantages,
            clip_low=surrogate.low,
            clip_high=surrogate.high,
            dual_clip=surrogate.dual,
        )
        return cases.clipped & self.experience.response_mask


@dataclass(frozen=True)
class _Watched:
    objective: TokenObjective
    look: TokenStats

    def size(self, batch: Experience) -> float:
        """The objective's own; the learner asks it once for each pass over a batch."""
        self.look.passes += 1
        return self.objective.size(batch)

    def __call__(self, outputs: TokenOutputs, batch: Experience) -> Loss:
        """The objective's own loss."""
        if isinstance(batch, NumberedExperience):
            self.look.take(outputs, batch)
        return self.objective(outputs, batch)
