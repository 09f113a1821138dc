"""What one iteration of a recipe does: rows, tokens, optimiser steps, and who runs over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tether.config.recipes import (
    DPORecipe,
    GRPORecipe,
    PPORecipe,
    Recipe,
    ReinforceRecipe,
    RewardRecipe,
    RLOORecipe,
    RLRecipe,
    SFTRecipe,
    TRPORecipe,
)
from tether.data.chat import Encoder, prompt_token_ids
from tether.types import Prompt

ASSUMED_PROMPT = 64  # tokens, where nobody can say
PROMPTS_LOOKED_AT = 256

Critic = Literal["head", "separate"]


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompts (or of whole records), and where that is known from."""

    mean: float
    longest: int
    source: str

    @classmethod
    def of(cls, prompts: Sequence[Prompt], tokenizer: Encoder) -> Lengths:
        """Of some of the prompts."""
        some = [len(prompt_token_ids(tokenizer, prompt)) for prompt in prompts[:PROMPTS_LOOKED_AT]]
        return cls(sum(some) / len(some), max(some), f"the recipe's prompts, {len(some)} of them")

    @classmethod
    def of_records(cls, recipe: Recipe) -> Lengths:
        """Of records that nobody has read yet."""
        longest = recipe.data.max_length  # pyright: ignore[reportAttributeAccessIssue]
        return cls.assumed(longest, "data.max_length: every record as long as it may be")

    @classmethod
    def of_rows(cls, lengths: Sequence[int]) -> Lengths:
        """Of records that were read, each as a row of so many tokens."""
        return cls(sum(lengths) / len(lengths), max(lengths), f"the recipe's records, {len(lengths)} rows")

    @classmethod
    def assumed(cls, tokens: int, why: str) -> Lengths:
        """As nobody can say."""
        return cls(tokens, tokens, why)


@dataclass(frozen=True)
class Work:
    """One iteration. Every answer is taken to be as long as it may be."""

    rows: int  # sequences that are learned from
    row_tokens: float  # of a row: prompt and answer
    longest_row: int
    answer_tokens: int  # of a row, those that are learned from
    prompts: int  # read before sampling; 0 where nothing is sampled
    prompt_tokens: float
    epochs: int
    minibatch: int  # rows in one optimiser step
    steps: int
    why: str  # the steps, in words
    critic: Critic | None
    critic_alone: int  # further epochs, of the critic by itself
    reference: bool
    rewards: int  # reward models
    policy: bool  # whether a policy is trained; a reward model's training has none

    @property
    def tokens(self) -> int:
        """Tokens that an iteration learns from, with their prompts."""
        return round(self.rows * self.row_tokens)

    @property
    def sampled(self) -> int:
        """Tokens that are sampled, at the most."""
        return self.rows * self.answer_tokens if self.prompts else 0


def work_of(recipe: Recipe, lengths: Lengths) -> Work:
    """What an iteration of this recipe does."""
    return _from_rollouts(recipe, lengths) if isinstance(recipe, RLRecipe) else _from_records(recipe, lengths)


def _from_rollouts(recipe: RLRecipe, lengths: Lengths) -> Work:
    rollout = recipe.rollout
    rows = rollout.prompts_per_step * rollout.samples_per_prompt
    epochs, minibatch, critic_alone = _updates(recipe)
    each = math.ceil(rows / minibatch)
    if isinstance(recipe, TRPORecipe):
        steps = 1 + critic_alone * each
        why = f"{rows} rollouts: 1 trust-region step of the policy, then {_epochs(critic_alone, minibatch, each)}"
    else:
        steps = epochs * each
        why = f"{rows} rollouts, {_epochs(epochs, minibatch, each)}"
    models = [part for part in recipe.reward.parts if part.kind == "model"]
    return Work(
        rows=rows,
        row_tokens=lengths.mean + rollout.max_new_tokens,
        longest_row=lengths.longest + rollout.max_new_tokens,
        answer_tokens=rollout.max_new_tokens,
        prompts=rollout.prompts_per_step,
        prompt_tokens=lengths.mean,
        epochs=epochs,
        minibatch=min(minibatch, rows),
        steps=steps,
        why=why,
        critic=recipe.roles.critic if recipe.needs_critic else None,
        critic_alone=critic_alone,
        reference=recipe.kl.apply_to != "none",
        rewards=len(models),
        policy=True,
    )


def _epochs(epochs: int, minibatch: int, each: int) -> str:
    plural = "s" if epochs > 1 else ""
    return f"{epochs} epoch{plural}, minibatches of {minibatch}: {epochs * each} step{'s' if epochs * each > 1 else ''}"


def _updates(recipe: RLRecipe) -> tuple[int, int, int]:
    """(epochs, rows of a minibatch, epochs of the critic alone)."""
    match recipe:
        case PPORecipe():
            return recipe.ppo.epochs, recipe.ppo.minibatch_size, 0
        case RLOORecipe():
            return recipe.rloo.epochs, recipe.rloo.minibatch_size, 0
        case GRPORecipe():
            return recipe.grpo.epochs, recipe.grpo.minibatch_size, 0
        case ReinforceRecipe():
            return 1, recipe.reinforce.minibatch_size, 0
        case TRPORecipe():
            return 1, recipe.trpo.minibatch_size, recipe.trpo.critic_epochs
        case _:
            raise ValueError(f"{recipe.method} does not learn from rollouts")


def _from_records(recipe: Recipe, lengths: Lengths) -> Work:
    match recipe:
        case SFTRecipe():
            batch, each, what = recipe.sft.batch_size, 1, "demonstrations"
        case RewardRecipe():
            batch, each, what = recipe.reward.batch_size, 2, "ranked prompts of two answers"
        case DPORecipe():
            batch, each, what = recipe.dpo.batch_size, 2, "pairs"
        case _:
            raise ValueError(f"{recipe.method} does not learn from records")
    scores = isinstance(recipe, RewardRecipe)
    return Work(
        rows=batch * each,
        row_tokens=lengths.mean,
        longest_row=lengths.longest,
        answer_tokens=1 if scores else lengths.longest,
        prompts=0,
        prompt_tokens=0.0,
        epochs=1,
        minibatch=batch * each,
        steps=1,
        why=f"{batch} {what}: 1 step",
        critic="separate" if scores else None,  # a reward model costs what a critic does
        critic_alone=0,
        reference=isinstance(recipe, DPORecipe),
        rewards=0,
        policy=not scores,
    )
