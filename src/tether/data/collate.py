"""Putting rows of different length into one padded batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.errors import DataError
from tether.types import Rollout, Score, TokenBatch


def pad_right(rows: Sequence[Tensor], fill: float | bool) -> Tensor:
    """(B, longest) the rows side by side, `fill` after each one's end."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=float(fill))


def attention_mask(rows: Sequence[Tensor]) -> Tensor:
    """(B, longest) bool, True on each row's own tokens: from lengths, never from token ids."""
    lengths = torch.tensor([len(row) for row in rows])
    return torch.arange(int(lengths.max())) < lengths[:, None]


@dataclass(frozen=True)
class Collated:
    """What can be learned from: a batch whose row b is `rollouts[b]`, scored `scores[b]`; and counts of the rest."""

    batch: TokenBatch
    rollouts: list[Rollout]
    scores: list[Score]
    dropped: dict[str, float]


def collate(
    rollouts: Sequence[Rollout], scores: Sequence[Score], *, pad_id: int, temperature: float, need_groups: bool
) -> Collated:
    """One batch of what can be learned from, and counts of what was left out.

    Left out, never read as zero: an answer that the engine gave up on, one without a sampled token, and one whose score
    is missing or not finite.
    Where the algorithm compares the samples of a prompt, a sample that lost all its siblings is left out as well.
    """
    if len(rollouts) != len(scores):
        raise DataError(f"the reward gave {len(scores)} scores for {len(rollouts)} rollouts: it must give one for each")
    sampled = [(rollout, score) for rollout, score in zip(rollouts, scores, strict=True) if rollout.finish != "error"]
    kept = [(rollout, score) for rollout, score in sampled if rollout.response_length > 0]
    counts = {
        "dropped/error": float(len(rollouts) - len(sampled)),
        "dropped/empty": float(len(sampled) - len(kept)),
    }
    valid = [(rollout, score) for rollout, score in kept if score.usable]
    counts["dropped/unscored"] = float(len(kept) - len(valid))
    if need_groups:
        sizes = Counter(rollout.group_id for rollout, _ in valid)
        paired = [(rollout, score) for rollout, score in valid if sizes[rollout.group_id] > 1]
        counts["dropped/alone"] = float(len(valid) - len(paired))
        valid = paired
    if not valid:
        reasons = ", ".join(f"{int(number)} {name.removeprefix('dropped/')}" for name, number in counts.items())
        raise DataError(f"none of the {len(rollouts)} rollouts can be learned from ({reasons}): check the reward")
    kept_rollouts, kept_scores = [rollout for rollout, _ in valid], [score for _, score in valid]
    batch = _batch(kept_rollouts, kept_scores, pad_id, temperature)
    return Collated(batch, kept_rollouts, kept_scores, counts)


def _batch(rollouts: Sequence[Rollout], scores: Sequence[Score], pad_id: int, temperature: float) -> TokenBatch:
    assert not any(bool(rollout.response_mask[0]) for rollout in rollouts), "the first token has no state before it"
    tokens = [rollout.token_ids for rollout in rollouts]
    return TokenBatch(
        tokens=pad_right(tokens, pad_id),
        attention_mask=attention_mask(tokens),
        response_mask=pad_right([rollout.response_mask for rollout in rollouts], False),
        temperature=temperature,
        behavior_logprobs=pad_right([rollout.behavior_logprobs for rollout in rollouts], 0.0),
        untruncated_logprobs=pad_right([rollout.untruncated_logprobs for rollout in rollouts], 0.0),
        scores=torch.tensor([score.value for score in scores], dtype=torch.float32),
        group_ids=torch.tensor([rollout.group_id for rollout in rollouts]),
        truncated=torch.tensor([rollout.finish == "length" for rollout in rollouts]),
    )
