"""A reward model's score of each rollout, read at its last real token.

A reward model with the policy's tokenizer reads the sampled tokens. One with another tokenizer reads text: the
conversation is rendered again with its own chat template and tokenizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.config.rewards import ModelPart
from tether.data.chat import prompt_token_ids, render
from tether.data.rows import attention_mask, pad_right
from tether.device_transfer import brought
from tether.errors import ConfigError, DataError
from tether.files import check_saved
from tether.learner.batching import micro_batches
from tether.models.ends import Ends, find_ends
from tether.models.load import NO_LIMIT, LoadedModel, choose_pad_id, embedding_count
from tether.models.lora import CONFIG
from tether.models.roles import onto
from tether.models.scalar_models import (
    BIAS_FILE,
    ClassifierModel,
    RewardModel,
    ScalarModel,
    load_reward_model,
    reward_model_folder,
)
from tether.models.tokenizer import load_tokenizer, tokenizer_difference
from tether.protocols import RewardFn
from tether.rewards.scoring import CombinedReward, failed
from tether.store.find import find_model
from tether.types import Message, Prompt, Rollout, Score, Sequences

LoadShared = Callable[[Path, str], ScalarModel]


@dataclass(frozen=True)
class RewardModelReward:
    """Scores answers without gradients, in micro-batches with a token budget.

    A rollout that is longer than the model's context gets no score, rather than a score of its beginning.
    """

    model: RewardModel
    vocabulary: LoadedModel  # its backbone and its tokenizer
    micro_batch_tokens: int
    reads: Literal["tokens", "text"] = "tokens"
    trained_here: bool = True  # by `tether train reward`, which puts only the end token after an answer
    notices: tuple[str, ...] = ()

    @classmethod
    def load(
        cls, part: ModelPart, policy: LoadedModel | None, load_shared: LoadShared | None = None
    ) -> RewardModelReward:
        """The reward model of a recipe part. Without a policy, as in a reward server, it reads text."""
        folder = reward_model_folder(find_model(part.path))
        if part.shared:
            model: RewardModel = _load_shared(part, folder, policy, load_shared)
        elif (folder / CONFIG).is_file():
            raise ConfigError(f"{part.path} holds adapters: set shared: true, in a run with roles.mode lora")
        else:
            device = policy.model.device if policy is not None and part.device == "auto" else part.device
            model = load_reward_model(folder, part.dtype, device)
        inner = model.backbone.model if isinstance(model, ScalarModel) else model.model
        vocabulary = load_vocabulary(folder, inner)
        check_saved(folder)
        model.requires_grad_(False)
        reward = cls(model, vocabulary, part.micro_batch_tokens, "text", (folder / BIAS_FILE).is_file())
        if policy is None:
            return reward
        difference = tokenizer_difference(policy.tokenizer, vocabulary.tokenizer)
        if difference is None and isinstance(model, ScalarModel):
            notice = f"Reward model {part.path} has the policy's tokenizer: it reads the sampled tokens."
            return dataclasses.replace(reward, reads="tokens", notices=(notice,))
        why = difference or "its head is not at the last token"
        notice = (
            f"Reward model {part.path} has another tokenizer than the policy ({why}): it reads the answers as text, in "
            "its own chat template."
        )
        return dataclasses.replace(reward, notices=(notice,))

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout."""
        rows = [self._row(rollout) for rollout in rollouts]
        values = iter(self.values([row for row in rows if isinstance(row, Tensor)]))
        return [Score(next(values)) if isinstance(row, Tensor) else row for row in rows]

    def _row(self, rollout: Rollout) -> Tensor | Score:
        """The tokens to score, or a failed score."""
        row = rollout.token_ids
        if self.reads == "text":
            try:
                row = torch.tensor(self.encode(rollout.prompt, rollout.completion, ended=rollout.finish == "stop"))
            except DataError as error:
                return failed("not_rendered", str(error))
            if int(row.max()) >= embedding_count(self.vocabulary.model):
                return failed("unknown_token", "the reward model has no embedding for a token of this answer")
        return row if len(row) <= self.vocabulary.context_length else failed("too_long")

    def encode(self, prompt: Prompt, completion: str, *, ended: bool) -> list[int]:
        """A prompt and its answer in the model's own tokens; an answer that was cut off gets no end token.

        A reward model that Tether did not train expects a whole conversation in its chat template, including whatever
        the template puts after the answer's end token.
        """
        tokenizer: Any = self.vocabulary.tokenizer
        template = getattr(tokenizer, "chat_template", None)
        try:
            if isinstance(self.model, ClassifierModel) and not template:
                question = "\n".join(message["content"] for message in prompt.messages)
                return list(tokenizer(question, completion)["input_ids"])
            if template and ended and not self.trained_here:
                turns = [*prompt.messages, Message(role="assistant", content=completion)]
                whole = render(tokenizer, [dict(turn) for turn in turns], tokenize=True)
                return list(whole)
            after = tokenizer.encode(completion, add_special_tokens=False)
            return prompt_token_ids(tokenizer, prompt) + after + ([self.vocabulary.end_id] if ended else [])
        except DataError:
            raise
        except Exception as error:  # templates raise their own exceptions for roles and orders of turns
            reason = " ".join(str(error).split())
            raise DataError(f"the reward model's chat template rejects prompt {prompt.id!r}: {reason}") from error

    @torch.no_grad()
    def values(self, rows: Sequence[Tensor]) -> list[float]:
        """The score of each row of token ids."""
        if not rows:
            return []
        mask = attention_mask(rows)
        batch = Sequences(tokens=pad_right(rows, self.vocabulary.pad_id), attention_mask=mask, response_mask=mask)
        scores = torch.zeros(len(rows))
        device = next(self.model.parameters()).device
        found: list[tuple[Tensor, Tensor]] = []
        for places in micro_batches(batch, self.micro_batch_tokens):
            found.append((places, self.model(onto(batch.select(places).trimmed(), device)).scores.float()))
        for (places, _), part in zip(found, brought([part for _, part in found]), strict=True):
            scores[places] = part
        return scores.tolist()


def _load_shared(
    part: ModelPart, folder: Path, policy: LoadedModel | None, load_shared: LoadShared | None
) -> ScalarModel:
    if load_shared is None or policy is None:
        raise ConfigError(f"{part.path}: shared: true needs a run whose roles it can share a backbone with")
    difference = tokenizer_difference(policy.tokenizer, load_tokenizer(folder))
    if difference is not None:
        raise ConfigError(
            f"reward model {part.path} has another tokenizer than the policy ({difference}), and shared: true runs it "
            "on the policy's own backbone: set shared: false"
        )
    return load_shared(folder, "reward")


def reading_text(reward: RewardFn) -> RewardFn:
    """The reward with every reward model reading text, for answers of models with different tokenizers."""
    if isinstance(reward, RewardModelReward):
        return dataclasses.replace(reward, reads="text")
    if isinstance(reward, CombinedReward):
        return CombinedReward(tuple(part._replace(reward=reading_text(part.reward)) for part in reward.parts))
    return reward


def load_vocabulary(path: Path, backbone: PreTrainedModel) -> LoadedModel:
    """A reward model's backbone with the tokenizer that was saved beside it."""
    tokenizer = load_tokenizer(path)
    known = embedding_count(backbone)
    ends = find_ends(tokenizer, backbone.config, None, known)
    if ends is None and isinstance(tokenizer.sep_token_id, int):
        ends = Ends(tokenizer.sep_token_id)
    if ends is None:
        raise ConfigError(f"{path}: the tokenizer has no end token; set `eos_token` in its tokenizer_config.json")
    pad_id, _ = choose_pad_id(tokenizer, ends.appended, known, other_ends=ends.also)
    return LoadedModel(backbone, tokenizer, ends.appended, pad_id, _context(backbone), other_end_ids=ends.also)


def _context(backbone: PreTrainedModel) -> int:
    """The model's context length. RoBERTa models number positions from above their padding token's id."""
    context = int(getattr(backbone.config.get_text_config(), "max_position_embeddings", None) or NO_LIMIT)
    for name, module in backbone.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            padding = cast("int | None", module.padding_idx)
            context = min(context, module.num_embeddings - (0 if padding is None else padding + 1))
    return context
