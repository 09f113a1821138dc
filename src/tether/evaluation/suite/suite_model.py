"""A model as the suite measures it: an engine that answers prompts, and a pass that gives log-probs of given tokens.

The model may be one that was loaded, or the policy of a run, in whatever way its roles share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tether.data.chat import opening_ids, prompt_token_ids
from tether.data.rows import attention_mask, pad_right
from tether.errors import ConfigError
from tether.gathering import with_weights
from tether.learner.batching import micro_batches
from tether.mask_cache import true_positions
from tether.models.load import LoadedModel
from tether.models.roles import ActorCritic, onto, states_read
from tether.ops.logprobs import log_distributions
from tether.protocols import RolloutEngine, Sampling
from tether.rollout.native import NativeEngine, check_rollouts
from tether.types import Prompt, Rollout, Sequences

BATCH_TOKENS = 4096  # of one forward pass
GREEDY_TOKENS = 128  # whose whole distributions are held at once
ANSWERS = 32  # prompts between two heartbeats

Heartbeat = Callable[[str], None]


@dataclass(frozen=True)
class SuiteModel:
    """What the suite asks of a model."""

    engine: RolloutEngine
    actor: ActorCritic
    tokenizer: Any
    pad_id: int
    end_id: int
    context_length: int
    heartbeat: Heartbeat = lambda words: None  # noqa: ARG005

    @classmethod
    def of_loaded(cls, loaded: LoadedModel, max_num_seqs: int | Literal["auto"] = "auto") -> SuiteModel:
        """A model from `load_causal_lm`."""
        engine = NativeEngine(loaded, max_num_seqs=max_num_seqs)
        return cls.of_policy(loaded, engine, ActorCritic(loaded.model))

    @classmethod
    def of_policy(cls, loaded: LoadedModel, engine: RolloutEngine, actor: ActorCritic) -> SuiteModel:
        """The policy of a run, with the engine that samples from it."""
        return cls(engine, actor, loaded.tokenizer, loaded.pad_id, loaded.end_id, loaded.context_length)

    def answers(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, what: str) -> list[Rollout]:
        """One answer to each prompt; a small context shortens the answers."""
        longest = max(len(prompt_token_ids(self.tokenizer, prompt)) for prompt in prompts)
        room = min(sampling.max_new_tokens, self.context_length - longest)
        if room < 1:
            raise ConfigError(
                f"suite: the longest prompt of {what} has {longest} tokens, and the model's context of "
                f"{self.context_length} leaves no room for an answer: name other parts of the suite"
            )
        fitting = Sampling(room, sampling.temperature)
        found: list[Rollout] = []
        for start in range(0, len(prompts), ANSWERS):
            self.heartbeat(f"suite: {what}")
            group = prompts[start : start + ANSWERS]
            rollouts = self.engine.generate(group, fitting, samples_per_prompt=1, seed=seed)
            check_rollouts(self.engine, rollouts, group, 1)
            found += rollouts
        self.engine.release()
        return found

    @property
    def opening(self) -> list[int]:
        """The token in front of a text: BOS where the tokenizer adds it, else the end token."""
        return opening_ids(self.tokenizer) or [self.end_id]

    def logprobs(self, rows: Sequence[Sequence[int]], firsts: Sequence[int], what: str) -> list[Tensor]:
        """For each row of token ids, the log-probs of its tokens from place `first` (at least 1) on."""
        found: list[Tensor | None] = [None] * len(rows)
        for places, micro in self._passes(rows, firsts, BATCH_TOKENS, what):
            columns = with_weights(self.actor.backbone.model, self._token_logprobs, micro).double().cpu()
            mask = micro.response_mask.cpu()
            for place, column, kept in zip(places, columns, mask, strict=True):
                found[place] = column[kept]
        return [column for column in found if column is not None]

    def are_greedy(self, rows: Sequence[Sequence[int]], firsts: Sequence[int], what: str) -> list[bool]:
        """Whether each row's tokens from place `first` on are what greedy decoding would choose."""
        found = [False] * len(rows)
        longest = max((len(row) - first for row, first in zip(rows, firsts, strict=True)), default=1)
        budget = max(1, GREEDY_TOKENS // longest) * max(map(len, rows), default=1)
        for places, micro in self._passes(rows, firsts, min(budget, BATCH_TOKENS), what):
            top_tokens = with_weights(self.actor.backbone.model, self._top_tokens, micro)
            same = torch.ones_like(micro.response_mask)
            same[micro.response_mask] = micro.tokens[micro.response_mask] == top_tokens
            for place, row in zip(places, same.cpu(), strict=True):
                found[place] = bool(row.all())
        return found

    def _passes(
        self, rows: Sequence[Sequence[int]], firsts: Sequence[int], budget: int, what: str
    ) -> Iterator[tuple[list[int], Sequences]]:
        if not rows:
            return
        tokens = [torch.tensor(list(row)) for row in rows]
        answered = [torch.arange(len(row)) >= first for row, first in zip(rows, firsts, strict=True)]
        batch = Sequences(
            tokens=pad_right(tokens, self.pad_id),
            attention_mask=attention_mask(tokens),
            response_mask=pad_right(answered, False).bool(),
        )
        for places in micro_batches(batch, budget):
            self.heartbeat(f"suite: {what}")
            yield places.tolist(), onto(batch.select(places).trimmed(), self.actor.policy.device)

    @torch.no_grad()
    def _token_logprobs(self, micro: Sequences) -> Tensor:
        return self.actor.output.logprobs(self.actor.backbone(micro, states_read(micro)), micro)[0]

    @torch.no_grad()
    def _top_tokens(self, micro: Sequences) -> Tensor:
        """(N,) the most likely token at each of the N tokens that count."""
        hidden, output, mask = self.actor.backbone(micro, states_read(micro)), self.actor.output, micro.response_mask
        options, positions = output.options(1.0), true_positions(mask)
        return log_distributions(hidden, output.weight, mask, **options, positions=positions).argmax(dim=-1)
