"""A reward model's score of each rollout, read at its last real token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tether.config.rewards import ModelPart
from tether.data.collate import attention_mask, pad_right
from tether.errors import ConfigError
from tether.learner.batching import micro_batches
from tether.models.heads import ScalarModel
from tether.models.load import NO_LIMIT, LoadedModel, check_same_vocabulary, choose_pad_id, embedding_count
from tether.rewards.combine import failed
from tether.types import Rollout, Score, Sequences


@dataclass(frozen=True)
class RewardModelReward:
    """Scores the very tokens that the policy sampled, without gradients, in micro-batches of so many tokens.

    A rollout that is longer than the model's context is not scored, rather than scored in part.
    """

    model: ScalarModel
    pad_id: int
    context_length: int
    micro_tokens: int

    @classmethod
    def load(cls, part: ModelPart, policy: LoadedModel) -> RewardModelReward:
        """The saved model of a recipe's part; it must share the policy's vocabulary, for it reads the same ids."""
        device = policy.model.device if part.device == "auto" else part.device
        model, vocabulary = load_reward_model(part.path, part.dtype, device)
        check_same_vocabulary(policy, vocabulary, f"reward model {part.path}")
        return cls(model, vocabulary.pad_id, vocabulary.context_length, part.micro_tokens)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score for each rollout."""
        fitting = [rollout for rollout in rollouts if 0 < len(rollout.token_ids) <= self.context_length]
        values = iter(self.values([rollout.token_ids for rollout in fitting]))
        return [
            Score(next(values))
            if 0 < len(rollout.token_ids) <= self.context_length
            else failed("too_long" if len(rollout.token_ids) else "no_tokens")
            for rollout in rollouts
        ]

    @torch.no_grad()
    def values(self, rows: Sequence[Tensor]) -> list[float]:
        """The score of each row of token ids."""
        if not rows:
            return []
        mask = attention_mask(rows)
        batch = Sequences(tokens=pad_right(rows, self.pad_id), attention_mask=mask, response_mask=mask)
        scores = torch.zeros(len(rows))
        device = self.model.head.weight.device
        for places in micro_batches(batch, self.micro_tokens):
            micro = batch.select(places).trimmed().to(device)
            scores[places] = self.model(micro).scores.float().cpu()
        return scores.tolist()


def load_reward_model(path: str, dtype: str, device: torch.device | str) -> tuple[ScalarModel, LoadedModel]:
    """A saved reward model, frozen; and its trunk, tokenizer and special ids, as a model of its own would have them."""
    model = ScalarModel.load(path, dtype, device)
    model.requires_grad_(False)
    try:
        loaded: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"{path} has no tokenizer beside the reward model: save the one it was trained with"
        ) from error
    tokenizer = cast(PreTrainedTokenizerBase, loaded)
    end_id = tokenizer.eos_token_id
    if not isinstance(end_id, int):
        raise ConfigError(f"{path}: the tokenizer has no end token; set `eos_token` in its tokenizer_config.json")
    pad_id, _ = choose_pad_id(tokenizer, end_id, embedding_count(model.trunk))
    context = getattr(model.trunk.config.get_text_config(), "max_position_embeddings", None) or NO_LIMIT
    return model, LoadedModel(model.trunk, tokenizer, end_id, pad_id, int(context))
