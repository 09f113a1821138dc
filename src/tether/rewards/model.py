"""A reward model's score of each rollout, read at its last real token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tether.config.rewards import ModelPart
from tether.data.collate import attention_mask, pad_right
from tether.errors import ConfigError
from tether.learner.batching import micro_batches
from tether.models.heads import ScalarModel
from tether.models.load import NO_LIMIT, LoadedModel, check_same_vocabulary, choose_pad_id, embedding_count
from tether.models.lora import CONFIG
from tether.models.roles import onto
from tether.rewards.combine import failed
from tether.travel import brought
from tether.types import Rollout, Score, Sequences

LoadShared = Callable[[Path, str], ScalarModel]


@dataclass(frozen=True)
class RewardModelReward:
    """Scores the very tokens that the policy sampled, without gradients, in micro-batches of so many tokens.

    A rollout that is longer than the model's context is not scored, rather than scored in part.
    """

    model: ScalarModel
    vocabulary: LoadedModel  # its trunk and its tokenizer
    micro_tokens: int

    @classmethod
    def load(
        cls, part: ModelPart, policy: LoadedModel | None, load_shared: LoadShared | None = None
    ) -> RewardModelReward:
        """The saved model of a recipe's part; it must share the policy's vocabulary, for it reads the same ids."""
        folder = Path(part.path).expanduser()
        if part.shared:
            if load_shared is None:
                raise ConfigError(f"{part.path}: shared: true needs a run whose roles it can share a trunk with")
            model = load_shared(folder, "reward")
        elif (folder / CONFIG).is_file():
            raise ConfigError(f"{part.path} holds adapters: set shared: true, in a run with roles.mode adapters")
        else:
            device = policy.model.device if policy is not None and part.device == "auto" else part.device
            model = ScalarModel.load(folder, part.dtype, device)
        vocabulary = load_vocabulary(folder, model.requires_grad_(False).trunk.model)
        if policy is not None:
            check_same_vocabulary(policy, vocabulary, f"reward model {part.path}")
        return cls(model, vocabulary, part.micro_tokens)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score for each rollout."""
        most = self.vocabulary.context_length
        rows = [rollout.token_ids for rollout in rollouts]
        values = iter(self.values([row for row in rows if len(row) <= most]))
        return [Score(next(values)) if len(row) <= most else failed("too_long") for row in rows]

    @torch.no_grad()
    def values(self, rows: Sequence[Tensor]) -> list[float]:
        """The score of each row of token ids."""
        if not rows:
            return []
        mask = attention_mask(rows)
        batch = Sequences(tokens=pad_right(rows, self.vocabulary.pad_id), attention_mask=mask, response_mask=mask)
        scores = torch.zeros(len(rows))
        device = self.model.head.weight.device
        found: list[tuple[Tensor, Tensor]] = []
        for places in micro_batches(batch, self.micro_tokens):
            found.append((places, self.model(onto(batch.select(places).trimmed(), device)).scores.float()))
        for (places, _), part in zip(found, brought([part for _, part in found]), strict=True):
            scores[places] = part
        return scores.tolist()


def load_vocabulary(path: Path, trunk: PreTrainedModel) -> LoadedModel:
    """A reward model's trunk with the tokenizer that was saved beside it, as a model of its own would have them."""
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
    pad_id, _ = choose_pad_id(tokenizer, end_id, embedding_count(trunk))
    context = getattr(trunk.config.get_text_config(), "max_position_embeddings", None) or NO_LIMIT
    return LoadedModel(trunk, tokenizer, end_id, pad_id, int(context))
