"""From a recipe to the parts of a run."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tether.algorithms.algorithm import Algorithm, ExtraGradient
from tether.algorithms.objectives import DPOObjective, RewardModelObjective, SFTObjective
from tether.config.methods import DPOSettings
from tether.config.recipes import (
    DPORecipe,
    PPORecipe,
    Recipe,
    RecordsRecipe,
    RewardRecipe,
    RLRecipe,
    SFTRecipe,
)
from tether.config.sections import DataSettings, OptimizerSettings, RolloutSettings
from tether.data.examples import (
    DataOrder,
    Example,
    Ranking,
    collate_pairs,
    collate_rankings,
    collate_rows,
    encode_demonstrations,
    encode_rankings,
    read_texts,
    split_by_prompt,
)
from tether.data.rows import RowEncoder
from tether.errors import ConfigError, TetherError
from tether.files import check_saved
from tether.learner.batching import micro_batches, within_memory
from tether.learner.learner import Learner, LearnerSettings
from tether.learner.ranks import Codec, current_ranks
from tether.models.backbones import ScalarHead, recompute_layers
from tether.models.load import LoadedModel, check_same_vocabulary, load_causal_lm, resolve_device
from tether.models.lora import CONFIG
from tether.models.own_loader import OwnLoader
from tether.models.roles import ActorCritic, ReferencePolicy, Roles
from tether.models.scalar_models import ScalarModel
from tether.models.sharing import Sharing, build_sharing
from tether.models.tokenizer import TextModel
from tether.protocols import Sampling
from tether.rewards.model import load_vocabulary
from tether.rewards.parts import build_reward
from tether.rewards.scoring import check_reward
from tether.rollout.ahead import RolloutQueue
from tether.seeds import derive_seed
from tether.store.find import find_model
from tether.train.engines import build_engine
from tether.train.inputs import Inputs, checked, read_inputs
from tether.train.objects import Objects, check_loader, loader_named, with_named_code
from tether.train.reference import OtherReference, check_reference, other_reference
from tether.train.rl import RLParts
from tether.train.supervised import SupervisedParts, centred, finish_reward_model
from tether.types import Metrics, PairBatch


def load_policy(recipe: Recipe, *, verify: bool = True, loader: OwnLoader | None = None) -> LoadedModel:
    """The recipe's model on its device; without `verify` the caller compares digests itself."""
    settings = recipe.model
    loader = loader or loader_named(recipe)
    check_critic_start(recipe)
    check_reference(recipe)
    check_loader(recipe, loader)
    if settings.quantize != "none" and recipe.roles.mode != "lora":
        raise ConfigError(
            f"model.quantize is {settings.quantize}, whose weights cannot be trained: use roles.mode lora, or set "
            "model.quantize none"
        )
    return load_causal_lm(
        settings.path if loader is not None else find_model(settings.path),
        dtype=settings.dtype,
        device=resolve_device(settings.device),
        seed=derive_seed(recipe.run.seed, "model"),
        attention=settings.attention,
        quantize=settings.quantize,
        verify=verify,
        loader=loader,
    )


def learner_settings(optimizer: OptimizerSettings, seed: int = 0) -> LearnerSettings:
    """The recipe's optimiser; a reward model learns at the critic's rate. `seed` is the run's."""
    return LearnerSettings(
        rates={
            "policy": optimizer.policy_lr,
            "critic": optimizer.critic_lr,
            "reward": optimizer.critic_lr,
        },
        micro_batch_tokens=optimizer.micro_batch_tokens,
        max_grad_norm=optimizer.max_grad_norm,
        schedule=optimizer.schedule,
        warmup=optimizer.warmup,
        betas=optimizer.betas,
        epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        master_weights=optimizer.master_weights,
        optimizer=optimizer.name,
        seed=derive_seed(seed, "optimizer"),
    )


def make_learner(recipe: Recipe, model: ActorCritic | ScalarModel, policy: LoadedModel) -> Learner:
    """The learner of this recipe for a model on the policy's device."""
    if recipe.model.gradient_checkpointing:
        recompute_layers(model)
    return Learner(model, learner_settings(recipe.optimizer, recipe.run.seed), policy.model.device)


def sharing_of(recipe: Recipe, policy: LoadedModel) -> Sharing:
    """How this recipe's roles share memory."""
    return build_sharing(policy.model, recipe.roles, derive_seed(recipe.run.seed, "adapters"))


def build_rl(
    recipe: RLRecipe, policy: LoadedModel, inputs: Inputs | None = None, objects: Objects | None = None
) -> RLParts:
    """The parts of a run that learns from rollouts; `objects` take the place of what the recipe names."""
    objects = with_named_code(recipe, objects or Objects())
    algorithm = objects.algorithm_for(recipe)
    task = (inputs or read_inputs(recipe, TextModel.of(recipe.model.path, policy), objects.task)).task
    assert task is not None
    sharing = sharing_of(recipe, policy)
    policy = dataclasses.replace(policy, model=sharing.policy)
    start = None
    if recipe.roles.critic_init is not None:
        start, longest = load_critic(recipe.roles.critic_init, sharing, policy)
        if longest < policy.context_length:  # prompts must fit the critic too
            policy = dataclasses.replace(policy, context_length=longest)
            task = checked(recipe, task, TextModel.of(recipe.model.path, policy))
    reference = other_reference(recipe, sharing, policy, objects.own_loader()) if algorithm.needs_reference else None
    if reference is not None and reference.context_length < policy.context_length:
        policy = dataclasses.replace(policy, context_length=reference.context_length)
        task = checked(recipe, task, TextModel.of(recipe.model.path, policy))
    roles = build_roles(recipe, algorithm, sharing, start, reference)
    exact = recipe.model.numerics == "exact"
    if exact:
        roles = made_exact(recipe, roles, objects)
    rollout = recipe.rollout
    reward = build_reward(
        recipe.reward.parts,
        own=task.reward(),
        policy=policy,
        seed=recipe.run.seed,
        load_shared=sharing.load_scalar,
        timeout=recipe.reward.timeout_seconds,
        functions=objects.rewards,
    )
    check_reward(reward, task.prompts())
    return RLParts(
        algorithm=algorithm,
        roles=roles,
        learner=make_learner(recipe, roles.actor, policy),
        engine=build_engine(recipe, policy, sharing, objects.engine_for(policy)),
        reward=reward,
        prompts=DataOrder(task.prompts(), derive_seed(recipe.run.seed, "prompts")),
        sampling=sampling_of(rollout),
        prompts_per_step=rollout.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        max_failure_rate=recipe.reward.max_failure_rate,
        max_skipped=recipe.run.max_skipped,
        pad_id=policy.pad_id,
        seed=recipe.run.seed,
        steps=recipe.run.steps,
        ptx=mixed_in(recipe, policy) if isinstance(recipe, PPORecipe) and recipe.ptx.data else None,
        held_out=list(task.held_out())[: recipe.evaluation.prompts],
        evaluate_every=recipe.evaluation.every,
        shared=sharing.shared,
        top_logprobs=recipe.store.top_logprobs,
        dynamic_sampling_rounds=rollout.dynamic_sampling_rounds,
        top_logprobs_every=recipe.store.rollouts_every,  # the store keeps no answers of other steps
        queue=RolloutQueue(rollout.lag),
        reference_digest=reference.digest if reference is not None else "",
        exact=exact,
    )


def build_roles(
    recipe: RLRecipe,
    algorithm: Algorithm,
    sharing: Sharing,
    start: ScalarModel | None,
    reference: OtherReference | None,
) -> Roles:
    """The roles that the algorithm needs; critic and reference start from what is given, if there is any."""
    return Roles.build(
        sharing,
        critic=recipe.roles.critic if algorithm.needs_critic else None,
        with_reference=algorithm.needs_reference,
        reference_from=reference.parts if reference is not None else None,
        seed=derive_seed(recipe.run.seed, "critic"),
        start_critic_from=start,
        offload_reference=recipe.roles.offload_reference,
    )


def sampling_of(rollout: RolloutSettings) -> Sampling:
    """How answers are drawn."""
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=rollout.stop_token_ids,
    )


def made_exact(recipe: RLRecipe, roles: Roles, objects: Objects) -> Roles:
    """The roles by the exact pass; a ConfigError where a run of this kind cannot have it."""
    refused = "model.numerics is exact, and {}; set model.numerics to fast"
    if objects.engine is not None:
        raise ConfigError(refused.format("an engine of your own samples, whose log-probs are its own"))
    if current_ranks().count > 1:
        raise ConfigError(refused.format("several ranks train, which was not tested: train in one process"))
    return roles.exact(known_logprobs=recipe.rollout.lag == 0)


def mixed_in(recipe: PPORecipe, policy: LoadedModel) -> Callable[[int], ExtraGradient]:
    """PPO-ptx: every optimiser step also follows the log-likelihood of pretraining or SFT data."""
    settings, seed = recipe.ptx, derive_seed(recipe.run.seed, "ptx")
    assert settings.data is not None
    encode = RowEncoder(policy.tokenizer, policy.end_id, min(settings.max_length, policy.context_length))
    rows = read_texts(settings.data, encode)
    objective = SFTObjective(settings.coef)

    def for_iteration(step: int) -> ExtraGradient:
        order, taken = DataOrder(rows, derive_seed(seed, step)), itertools.count()

        def add(learner: Learner) -> Metrics:
            batch = order.take(next(taken) * settings.batch_size, settings.batch_size)
            seen = learner.backward(collate_rows(batch, policy.pad_id), objective)
            metrics = Metrics()
            metrics.add("ptx_loss", seen.mean("loss"))
            return metrics

        return add

    return for_iteration


def build_supervised(recipe: Recipe, policy: LoadedModel, inputs: Inputs | None = None) -> SupervisedParts[Any]:
    """The parts of a run that learns from records."""
    match recipe:
        case SFTRecipe():
            return _sft(recipe, policy, inputs or read_inputs(recipe))
        case RewardRecipe():
            return _reward_model(recipe, policy, inputs or read_inputs(recipe))
        case DPORecipe():
            return _dpo(recipe, policy, inputs or read_inputs(recipe))
        case _:
            raise ValueError(f"{recipe.method} does not learn from records")


def length_of(recipe: RecordsRecipe, records: int, batch_size: int) -> dict[str, Any]:
    """The length of the run: its steps, or the steps of its epochs."""
    held = {"evaluate_every": recipe.evaluation.every, "max_skipped": recipe.run.max_skipped}
    if recipe.run.epochs is None:
        return {"steps": recipe.run.steps, "records": None, **held}
    seen = max(1, round(recipe.run.epochs * records))
    return {"steps": math.ceil(seen / batch_size), "records": seen, **held}


def _in_order(
    recipe: RecordsRecipe, train: list[Example], held_out: list[Example]
) -> tuple[DataOrder[Example], list[Example]]:
    """The training records in their order, and the held-out ones."""
    fraction, seed = recipe.data.held_out_fraction, recipe.run.seed
    if fraction is not None:
        train, held_out = split_by_prompt(train, fraction, derive_seed(seed, "held-out"), str(recipe.data.train))
    return DataOrder(train, derive_seed(seed, "data")), held_out[: recipe.evaluation.records]


def _sft(recipe: SFTRecipe, policy: LoadedModel, inputs: Inputs) -> SupervisedParts[Any]:
    assert inputs.train is not None
    encode = _encoder(recipe.data, policy)
    held = encode_demonstrations(inputs.held_out, encode) if inputs.held_out else []
    examples, held_out = _in_order(recipe, encode_demonstrations(inputs.train, encode), held)
    sharing = sharing_of(recipe, policy)
    roles = Roles.build(sharing, critic=None, with_reference=False, seed=0)
    return SupervisedParts(
        learner=make_learner(recipe, roles.actor, policy),
        objective=SFTObjective(),
        examples=examples,
        held_out=held_out,
        collate=lambda rows: collate_rows(rows, policy.pad_id),
        batch_size=recipe.sft.batch_size,
        **length_of(recipe, len(examples.items), recipe.sft.batch_size),
        shared=sharing.shared,
    )


def _reward_model(recipe: RewardRecipe, policy: LoadedModel, inputs: Inputs) -> SupervisedParts[Any]:
    width = policy.model.config.get_text_config().hidden_size
    # A fresh head drawn with deviation 1 / sqrt(width + 1), as in Stiennon et al. (2020).
    seed = derive_seed(recipe.run.seed, "reward head")
    head = ScalarHead.like_output(policy.model, deviation=(width + 1) ** -0.5, seed=seed)
    sharing = sharing_of(recipe, policy)
    model = ScalarModel(sharing.scalar_backbone(seed), head, "reward")
    examples, held_out = _in_order(recipe, *_rankings(recipe.data, policy, inputs))
    centre = encode_demonstrations(inputs.centre, _encoder(recipe.data, policy)) if inputs.centre else []
    return SupervisedParts(
        learner=make_learner(recipe, model, policy),
        objective=RewardModelObjective(),
        examples=examples,
        held_out=held_out,
        collate=lambda rankings: collate_rankings(rankings, policy.pad_id),
        batch_size=recipe.reward.batch_size,
        **length_of(recipe, len(examples.items), recipe.reward.batch_size),
        report=lambda parts: finish_reward_model(parts, centre),
        as_saved=lambda parts: centred(parts, centre),
        shared=sharing.shared,
    )


def _dpo(recipe: DPORecipe, policy: LoadedModel, inputs: Inputs) -> SupervisedParts[Any]:
    sharing = sharing_of(recipe, policy)
    offload = recipe.roles.offload_reference
    roles = Roles.build(sharing, critic=None, with_reference=True, seed=0, offload_reference=offload)
    assert roles.reference is not None
    reference, settings = roles.reference, recipe.dpo
    learner = make_learner(recipe, roles.actor, policy)
    examples, held_out = _in_order(recipe, *_rankings(recipe.data, policy, inputs))

    def collate(rankings: Sequence[Ranking]) -> PairBatch:
        return with_reference(collate_pairs(rankings, policy.pad_id), reference, learner)

    return SupervisedParts(
        learner=learner,
        objective=_dpo_objective(settings),
        examples=examples,
        held_out=held_out,
        collate=collate,
        batch_size=settings.batch_size,
        **length_of(recipe, len(examples.items), settings.batch_size),
        shared=sharing.shared,
        reference=reference,
    )


def _dpo_objective(settings: DPOSettings) -> DPOObjective:
    return DPOObjective(settings.beta, settings.label_smoothing)


COLUMNS = Codec[tuple[torch.Tensor, int, torch.Tensor]](
    lambda found: (found[1], {"rows": found[0], "logprobs": found[2]}),
    lambda first, columns: (columns["rows"], first, columns["logprobs"]),
)


@torch.no_grad()
def with_reference(batch: PairBatch, reference: ReferencePolicy, learner: Learner) -> PairBatch:
    """The batch with the reference's log-probs filled in, in the micro-batches that will be trained on."""

    def attempt() -> PairBatch:
        def run_own() -> list[tuple[int, tuple[torch.Tensor, int, torch.Tensor]]]:
            found: list[tuple[int, tuple[torch.Tensor, int, torch.Tensor]]] = []
            parts = list(micro_batches(batch, learner.micro_batch_tokens))
            for number, rows in enumerate(parts):
                micro = batch.select(rows)
                on_device = micro.trimmed().to(learner.device)
                if learner.ranks.runs(number):
                    found.append((number, (rows, micro.span()[0], reference.logprobs(on_device).float().cpu())))
                elif learner.elsewhere is not None:
                    learner.elsewhere(on_device)
            if learner.ranks.fills(len(parts)):
                reference.logprobs(batch.select(parts[-1]).trimmed().to(learner.device))
            return found

        column = torch.zeros(batch.tokens.shape)
        for rows, first, logprobs in learner.ranks.merged(run_own, COLUMNS):
            column[rows, first : first + logprobs.shape[1]] = logprobs
        return dataclasses.replace(batch, ref_logprobs=column)

    return within_memory(attempt, lambda: learner.shrink_micro_batch([batch]))


def _encoder(data: DataSettings, policy: LoadedModel) -> RowEncoder:
    longest = min(data.max_length, policy.context_length)
    return RowEncoder(
        policy.tokenizer,
        policy.end_id,
        longest,
        truncate=data.truncate,
        overlong=data.overlong,
        turns=data.assistant_turns,
    )


def _rankings(data: DataSettings, policy: LoadedModel, inputs: Inputs) -> tuple[list[Ranking], list[Ranking]]:
    encode = _encoder(data.model_copy(update={"assistant_turns": "last"}), policy)
    assert inputs.train is not None
    return encode_rankings(inputs.train, encode), encode_rankings(inputs.held_out, encode) if inputs.held_out else []


FIELD = "roles.critic_init"


def check_critic_start(recipe: Recipe) -> None:
    """Raise ConfigError, before loading, where the folder holds no model, or one of another mode."""
    start, mode = recipe.roles.critic_init, recipe.roles.mode
    if start is None:
        return
    folder = critic_folder(start)
    adapters = (folder / CONFIG).is_file()
    if not adapters and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{FIELD}: {start} holds no saved reward model: name a run of `tether train reward`, or the folder with "
            "its config.json"
        )
    if adapters != (mode == "lora"):
        what, repair = ("adapters", "lora") if adapters else ("a whole model", "separate or shared_backbone")
        raise ConfigError(
            f"{FIELD}: {start} holds {what}, but roles.mode is {mode}: set roles.mode to {repair}, or train the reward "
            f"model with roles.mode {mode}"
        )


def critic_folder(start: str) -> Path:
    """The model folder that `roles.critic_init` names, by itself or by its run."""
    try:
        return Path(find_model(start)).expanduser()
    except TetherError as error:
        raise ConfigError(
            f"{FIELD}: {start} holds no saved reward model ({error}): name a run of `tether train reward`, or the "
            "folder with its config.json"
        ) from None


def load_critic(start: str, sharing: Sharing, policy: LoadedModel) -> tuple[ScalarModel, int]:
    """The critic, and the longest row that it can read.

    It reads the policy's token ids, so it must have the policy's vocabulary. In mode separate it may be a model of any
    size; in the other modes it stands on the policy's own base, and is refused where it was trained on another.
    """
    folder = critic_folder(start)
    try:
        critic = sharing.load_scalar(folder, "critic")
        vocabulary = load_vocabulary(folder, critic.backbone.model)
        check_same_vocabulary(policy, vocabulary, "critic")
    except ConfigError as error:
        raise ConfigError(f"{FIELD}: {error}") from error
    check_saved(folder)  # last: the errors above say more about a model that cannot be a critic
    return critic, vocabulary.context_length
