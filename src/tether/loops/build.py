"""From a recipe to the parts of a run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tether.algorithms.algorithm import ExtraGradient
from tether.algorithms.build import build_algorithm
from tether.algorithms.objectives import DPOObjective, RewardModelObjective, SFTObjective
from tether.config.methods import DPOSettings
from tether.config.parts import DataSettings, OptimizerSettings
from tether.config.recipes import DPORecipe, PPORecipe, Recipe, RewardRecipe, RLRecipe, SFTRecipe
from tether.data.cursor import DataOrder
from tether.data.examples import (
    Ranking,
    RowEncoder,
    collate_pairs,
    collate_rankings,
    collate_rows,
    read_demonstrations,
    read_rankings,
)
from tether.data.texts import read_texts
from tether.errors import ConfigError
from tether.learner.batching import micro_batches
from tether.learner.learner import Learner, LearnerSettings
from tether.learner.memory import within_memory
from tether.loops.reward_model import finish_reward_model
from tether.loops.rl import RLParts
from tether.loops.supervised import SupervisedParts
from tether.models.heads import ScalarHead, ScalarModel
from tether.models.load import LoadedModel, load_causal_lm, resolve_device
from tether.models.roles import ActorCritic, ReferencePolicy, Roles
from tether.models.sharing import Sharing, build_sharing
from tether.models.trunks import recompute_layers
from tether.protocols import Sampling
from tether.rewards.build import build_reward
from tether.rewards.tasks import build_task
from tether.rollout.native import NativeEngine
from tether.runs.find import find_model
from tether.runs.keep import KeepRollouts
from tether.seeds import derive_seed
from tether.types import Measures, PairBatch


def load_policy(recipe: Recipe) -> LoadedModel:
    """The recipe's model on its device."""
    settings = recipe.model
    if settings.quantize != "none" and recipe.roles.mode != "adapters":
        raise ConfigError(
            f"model.quantize is {settings.quantize}, whose weights cannot be trained: use roles.mode adapters, or set "
            "model.quantize none"
        )
    return load_causal_lm(
        find_model(settings.path),
        dtype=settings.dtype,
        device=resolve_device(settings.device),
        seed=derive_seed(recipe.run.seed, "model"),
        attention=settings.attention,
        quantize=settings.quantize,
    )


def learner_settings(optimizer: OptimizerSettings) -> LearnerSettings:
    """The recipe's optimiser; a reward model learns at the critic's rate."""
    return LearnerSettings(
        rates={
            "policy": optimizer.policy_rate,
            "critic": optimizer.critic_rate,
            "reward": optimizer.critic_rate,
        },
        micro_tokens=optimizer.micro_tokens,
        max_grad_norm=optimizer.max_grad_norm,
        schedule=optimizer.schedule,
        warmup=optimizer.warmup,
        betas=optimizer.betas,
        epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        masters=optimizer.masters,
        state=optimizer.state,
    )


def make_learner(recipe: Recipe, model: ActorCritic | ScalarModel, policy: LoadedModel) -> Learner:
    """The learner of this recipe for a model on the policy's device."""
    if recipe.model.gradient_checkpointing:
        recompute_layers(model)
    return Learner(model, learner_settings(recipe.optimizer), policy.model.device)


def sharing_of(recipe: Recipe, policy: LoadedModel) -> Sharing:
    """How this recipe's roles share memory."""
    return build_sharing(policy.model, recipe.roles, derive_seed(recipe.run.seed, "adapters"))


def build_rl(recipe: RLRecipe, policy: LoadedModel) -> RLParts:
    """The parts of a run that learns from rollouts."""
    algorithm = build_algorithm(recipe)
    task = build_task(recipe.task)
    sharing = sharing_of(recipe, policy)
    policy = dataclasses.replace(policy, model=sharing.policy)
    start = recipe.roles.critic_from
    roles = Roles.build(
        sharing,
        critic=recipe.roles.critic if algorithm.needs_critic else None,
        with_reference=algorithm.needs_reference,
        seed=derive_seed(recipe.run.seed, "critic"),
        start_critic_from=sharing.load_scalar(Path(start), "critic") if start else None,
        offload_frozen=recipe.roles.offload_frozen,
    )
    rollout, kept = recipe.rollout, KeepRollouts(recipe.store.rollouts_every)
    return RLParts(
        algorithm=algorithm,
        roles=roles,
        learner=make_learner(recipe, roles.actor, policy),
        engine=NativeEngine(
            policy,
            max_batch=rollout.max_batch,
            states_for=sharing.shared,
            general=rollout.engine == "general",
        ),
        reward=build_reward(
            recipe.reward.parts,
            own=task.reward(),
            policy=policy,
            seed=recipe.run.seed,
            load_shared=sharing.load_scalar,
        ),
        prompts=DataOrder(task.prompts(), derive_seed(recipe.run.seed, "prompts")),
        sampling=Sampling(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=rollout.stop_token_ids,
        ),
        prompts_per_step=rollout.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        max_failure_rate=recipe.reward.max_failure_rate,
        max_skipped=recipe.run.max_skipped,
        pad_id=policy.pad_id,
        seed=recipe.run.seed,
        steps=recipe.run.steps,
        mix_in=mixed_in(recipe, policy) if isinstance(recipe, PPORecipe) and recipe.ptx.data else None,
        held_out=list(task.held_out())[: recipe.evaluation.prompts],
        evaluate_every=recipe.evaluation.every,
        shared=sharing.shared,
        likeliest_at=lambda step: recipe.store.alternatives if kept.wants(step) else 0,
    )


def mixed_in(recipe: PPORecipe, policy: LoadedModel) -> Callable[[int], ExtraGradient]:
    """PPO-ptx: every optimiser step also follows the log-likelihood of pretraining or SFT data."""
    settings, seed = recipe.ptx, derive_seed(recipe.run.seed, "ptx")
    assert settings.data is not None
    encode = RowEncoder(policy.tokenizer, policy.end_id, min(settings.max_length, policy.context_length))
    rows = read_texts(settings.data, encode)
    objective = SFTObjective(settings.coef)

    def for_iteration(step: int) -> ExtraGradient:
        order, taken = DataOrder(rows, derive_seed(seed, step)), itertools.count()

        def add(learner: Learner) -> Measures:
            batch = order.take(next(taken) * settings.batch_size, settings.batch_size)
            seen = learner.backward(collate_rows(batch, policy.pad_id), objective)
            measures = Measures()
            measures.add("ptx_loss", seen.mean("loss"))
            return measures

        return add

    return for_iteration


def build_supervised(recipe: Recipe, policy: LoadedModel) -> SupervisedParts[Any]:
    """The parts of a run that learns from records."""
    match recipe:
        case SFTRecipe():
            return _sft(recipe, policy)
        case RewardRecipe():
            return _reward_model(recipe, policy)
        case DPORecipe():
            return _dpo(recipe, policy)
        case _:
            raise ValueError(f"{recipe.method} does not learn from records")


def _sft(recipe: SFTRecipe, policy: LoadedModel) -> SupervisedParts[Any]:
    encode = _encoder(recipe.data, policy)
    sharing = sharing_of(recipe, policy)
    roles = Roles.build(sharing, critic=None, with_reference=False, seed=0)
    return SupervisedParts(
        learner=make_learner(recipe, roles.actor, policy),
        objective=SFTObjective(),
        examples=DataOrder(read_demonstrations(recipe.data.train, encode), derive_seed(recipe.run.seed, "data")),
        held_out=read_demonstrations(recipe.data.held_out, encode) if recipe.data.held_out else [],
        collate=lambda rows: collate_rows(rows, policy.pad_id),
        batch_size=recipe.sft.batch_size,
        steps=recipe.run.steps,
        max_skipped=recipe.run.max_skipped,
        shared=sharing.shared,
    )


def _reward_model(recipe: RewardRecipe, policy: LoadedModel) -> SupervisedParts[Any]:
    width = policy.model.config.get_text_config().hidden_size
    # A fresh head drawn with deviation 1 / sqrt(width + 1), as in Stiennon et al. (2020).
    seed = derive_seed(recipe.run.seed, "reward head")
    head = ScalarHead.like_output(policy.model, deviation=(width + 1) ** -0.5, seed=seed)
    sharing = sharing_of(recipe, policy)
    model = ScalarModel(sharing.scalar_trunk(seed), head, "reward")
    train, held_out = _rankings(recipe.data, policy)
    centre_on = recipe.reward.centre_on
    centre = read_demonstrations(centre_on, _encoder(recipe.data, policy)) if centre_on else []
    return SupervisedParts(
        learner=make_learner(recipe, model, policy),
        objective=RewardModelObjective(),
        examples=DataOrder(train, derive_seed(recipe.run.seed, "data")),
        held_out=held_out,
        collate=lambda rankings: collate_rankings(rankings, policy.pad_id),
        batch_size=recipe.reward.batch_size,
        steps=recipe.run.steps,
        max_skipped=recipe.run.max_skipped,
        report=lambda parts: finish_reward_model(parts, centre),
        shared=sharing.shared,
    )


def _dpo(recipe: DPORecipe, policy: LoadedModel) -> SupervisedParts[Any]:
    sharing = sharing_of(recipe, policy)
    offload = recipe.roles.offload_frozen
    roles = Roles.build(sharing, critic=None, with_reference=True, seed=0, offload_frozen=offload)
    assert roles.reference is not None
    reference, settings = roles.reference, recipe.dpo
    learner = make_learner(recipe, roles.actor, policy)
    train, held_out = _rankings(recipe.data, policy)

    def collate(rankings: Sequence[Ranking]) -> PairBatch:
        return with_reference(collate_pairs(rankings, policy.pad_id), reference, learner)

    return SupervisedParts(
        learner=learner,
        objective=_dpo_objective(settings),
        examples=DataOrder(train, derive_seed(recipe.run.seed, "data")),
        held_out=held_out,
        collate=collate,
        batch_size=settings.batch_size,
        steps=recipe.run.steps,
        max_skipped=recipe.run.max_skipped,
        shared=sharing.shared,
    )


def _dpo_objective(settings: DPOSettings) -> DPOObjective:
    return DPOObjective(settings.beta, settings.label_smoothing)


@torch.no_grad()
def with_reference(batch: PairBatch, reference: ReferencePolicy, learner: Learner) -> PairBatch:
    """The batch with the reference's log-probs filled in, in the micro-batches that will be trained on."""

    def attempt() -> PairBatch:
        column = torch.zeros(batch.tokens.shape)
        for rows in micro_batches(batch, learner.micro_tokens):
            micro = batch.select(rows)
            first, last = micro.span()
            column[rows, first:last] = reference.logprobs(micro.trimmed().to(learner.device)).float().cpu()
        return dataclasses.replace(batch, ref_logprobs=column)

    return within_memory(attempt, lambda: learner.halve([batch]))


def _encoder(data: DataSettings, policy: LoadedModel) -> RowEncoder:
    longest = min(data.max_length, policy.context_length)
    return RowEncoder(policy.tokenizer, policy.end_id, longest, truncate=data.truncate)


def _rankings(data: DataSettings, policy: LoadedModel) -> tuple[list[Ranking], list[Ranking]]:
    encode = _encoder(data, policy)
    return read_rankings(data.train, encode), read_rankings(data.held_out, encode) if data.held_out else []
