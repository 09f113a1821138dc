"""Rank 0 leads: it runs the command, writes everything, and tells the other ranks which step comes next."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tether.algorithms.algorithm import MinibatchEpochs
from tether.config.allowed_code import is_code
from tether.config.recipes import Recipe, RewardRecipe, RLRecipe
from tether.config.rewards import ModelPart
from tether.distributed.copies import copies_of
from tether.distributed.fsdp import ShardedModels, Tree
from tether.distributed.group import ProcessGroup
from tether.distributed.launch import LAUNCHER
from tether.distributed.shares import Shares
from tether.distributed.sums import exact_sums, fast_sums
from tether.errors import ConfigError, StorageError
from tether.learner.learner import Learner
from tether.learner.learner_state import LearnerState
from tether.learner.ranks import Codec, Ranks
from tether.models.backbones import Backbone, ScalarHead, backbone_notices
from tether.models.roles import ActorCritic, ReferencePolicy
from tether.models.scalar_models import ScalarModel
from tether.rewards import consent
from tether.rollout.chunks import ChunkedEngine, chunked
from tether.store import checkpoints
from tether.store.checkpoints import Checkpoint
from tether.store.folder import recipe_record
from tether.train.provenance import code_digests
from tether.train.training import FromRecords, FromRollouts, Training
from tether.types import Prompt

T = TypeVar("T")

UNLIKE = (
    "its weights are no longer those of rank 0: ranks need the same kind of processor or GPU, the same versions and "
    "the same number of threads"
)


class GroupRanks(Ranks):
    """Several ranks, as any of them sees them."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.index, self.count = group.index, group.count
        self.reduction = "exact"
        self.learner: Learner | None = None
        self.shares: Shares | None = None  # unless distributed.shard is none
        self.trained: nn.Module | None = None  # the model that is sampled from and saved
        self._restored: LearnerState | None = None  # rank 0: what the run goes on from, until the others have it
        self.in_step = False  # whether the others may be in the middle of a step, and not wait for a word

    def runs(self, number: int) -> bool:
        """Pieces are dealt in turn."""
        return number % self.count == self.index

    def merged(self, work: Callable[[], Sequence[tuple[int, T]]], codec: Codec[T]) -> list[T]:
        """All results, gathered as bytes."""
        return self.group.merged(work, codec)

    def first(self, work: Callable[[], T], codec: Codec[T]) -> T:
        """Rank 0's result."""
        return self.merged(lambda: [(0, work())] if self.index == 0 else [], codec)[0]

    def summed(
        self, parameters: Sequence[nn.Parameter], pieces: Callable[[], int]
    ) -> AbstractContextManager[Callable[[], None]]:
        """In the order of micro-batches, or by an all-reduce, as the recipe says."""
        if self.shares is not None:
            return self.shares.summed(len(range(self.index, pieces(), self.count)))
        sums = exact_sums if self.reduction == "exact" else fast_sums
        return sums(self.group, parameters, pieces)

    def deal(self, training: Training, recipe: Recipe) -> None:
        """Have this training's work dealt over all ranks."""
        self.reduction = recipe.distributed.reduction
        training.learner.ranks = self
        self.group.heartbeat.start(recipe.distributed.timeout)
        assert hasattr(training, "parts")
        parts: Any = training.parts  # pyright: ignore[reportAttributeAccessIssue]
        if parts.shared is not None:
            # Which rows were run together decides the bits of their states, so every rank runs every row.
            training.learner.elsewhere = parts.shared.states
        if isinstance(training, FromRollouts):
            chunk = recipe.distributed.rollout_chunk
            if self.reduction == "fast" and not chunk:
                chunk = -(-recipe.rollout.prompts_per_step // self.count) if isinstance(recipe, RLRecipe) else 0
            if isinstance(recipe, RLRecipe) and recipe.rollout.samples_elsewhere:
                chunk = 0  # rank 0 asks the workers, which are dealt the chunks, and tells the others
            inner = parts.engine.engine if isinstance(parts.engine, ChunkedEngine) else parts.engine
            engine = chunked(inner, chunk, self, everywhere=parts.shared is not None)
            training.parts = dataclasses.replace(parts, engine=engine)
        if recipe.distributed.shard != "none" and self.count > 1:
            self._shard(training, recipe)

    # -- weights that ranks share -------------------------------------------------------------------------------------

    def _shard(self, training: Training, recipe: Recipe) -> None:
        learner, model = training.learner, training.learner.model
        copies, notice = copies_of(recipe.distributed, self.group)
        assert isinstance(model, ActorCritic | ScalarModel)
        assert isinstance(training, FromRollouts | FromRecords)
        reference = training.parts.roles.reference if isinstance(training, FromRollouts) else training.parts.reference
        whole = dict(learner.named)
        exact = self.reduction == "exact"
        models = ShardedModels(trees_of(model, reference), learner.groups, copies, exact=exact)
        self.shares = Shares(self.group, copies, models, whole, exact=exact)
        shares = self.shares.by_name
        learner.hold(
            {name: share.held for name, share in shares.items()},
            {name: (share.first, share.shape.numel()) for name, share in shares.items()},
        )
        self.sharded, self.group.interleaved = True, True
        self.trained = training.model
        for module in model.modules():
            if isinstance(module, Backbone):
                module.fast.look_again(module.model)
        training.notices = tuple(dict.fromkeys((*training.notices, *backbone_notices(model), *notice)))

    def fills(self, pieces: int) -> bool:
        """Whether this rank has no piece in the last round."""
        return self.sharded and 0 < pieces % self.count <= self.index

    def norms(self, groups: Mapping[str, Sequence[nn.Parameter]], device: torch.device) -> dict[str, Tensor]:
        """Of gradients that are put together, or with `fast` from every rank's squares."""
        if self.shares is None:
            return super().norms(groups, device)
        norm = self.shares.exact_norm if self.reduction == "exact" else self.shares.fast_norm
        return {name: norm(parameters, device) for name, parameters in groups.items()}

    def stored(self, state: LearnerState) -> LearnerState:
        """This rank's share."""
        return state if self.shares is None else self.shares.stored(state)

    def held(self, state: LearnerState) -> LearnerState:
        """This rank's share of whole tensors."""
        if self.shares is None:
            return state
        self._restored = state if self.learner is None else None
        return self.shares.held(state)

    def stepped(self) -> None:
        """Let FSDP see the step."""
        if self.shares is not None:
            self.shares.stepped()

    def all_agree(self, here: bool) -> bool:
        """Asked of all ranks."""
        return here if self.shares is None else all(self.group.all_numbers(int(here))[0])

    def gathered(self) -> AbstractContextManager[None]:
        """Hold the trained model whole on every rank."""
        if self.shares is None or self.trained is None:
            return nullcontext()
        return self.shares.models.gathered(self.trained)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have the other ranks hold it as well, and wait."""
        if self.shares is None:
            yield
            return
        if self.learner is None:  # the other ranks have not been told of the state yet
            raise StorageError(
                "the best model has to be saved again, which ranks that share weights do only after a step: resume the "
                "run in one process for a step"
            )
        self.group.tell({"what": "whole"})
        with self.gathered():
            yield
        self.group.tell({"what": "done"})

    def write_shares(self, folder: Path, checkpoint: Any) -> Any:
        """Have every rank write its share into the folder that becomes the checkpoint."""
        if self.shares is None:
            return checkpoint
        if self.learner is None:  # a fork's first checkpoint is the one that it starts from
            assert self._restored is not None
            return dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, "learner": self._restored.tensors})
        place = checkpoints.begin(folder, checkpoint.step)
        self.group.tell({"what": "write", "folder": str(place)})
        return self.write_share(place, checkpoint)

    def write_share(self, place: Path, checkpoint: Checkpoint) -> Checkpoint:
        """Write this rank's share, and learn from the others what they wrote."""
        tensors = dict(checkpoint.tensors)
        own = {f"learner{checkpoints.OF_RANK}{self.index:05d}": tensors.pop("learner")}
        written = self.merged(lambda: [(self.index, checkpoints.write_part(place, own))], WRITTEN)
        files = {name: about for each in written for name, about in each.items()}
        return dataclasses.replace(checkpoint, tensors=tensors, written=files)

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    def join(self, training: T, recipe: Any) -> T:
        """Tell the others the recipe and the prompts: of the code that it names they run the algorithm alone."""
        check_recipe(recipe)
        prompts: dict[str, Any] = {}
        if isinstance(training, FromRollouts):
            check_update(training, recipe)
            for name, asked in (("training", training.parts.prompts.items), ("evaluation", training.parts.held_out)):
                prompts[name] = [_prompt_record(prompt) for prompt in asked]
        self.group.tell(
            {"what": "build", "recipe": recipe_record(recipe), "prompts": prompts, "code": code_record(recipe)}
        )
        self.deal(training, recipe)  # pyright: ignore[reportArgumentType]
        return training

    def begin(self, training: Any, start: int) -> None:
        """Tell the others the whole state, so that all ranks hold the same bits."""
        self.learner = training.learner
        captured = training.capture(start, {})
        if self.sharded:
            # Without a checkpoint each rank has the weights that it built, which are the same.
            whole = self._restored.tensors if self._restored is not None else {}
            captured = dataclasses.replace(captured, tensors=captured.tensors | {"learner": whole})
            self._restored = None
        tell_checkpoint(self.group, captured)

    def asking(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """Tell the others to take the step, unless the run ends here."""
        launcher = int(os.environ.get(LAUNCHER, "0"))

        def asked() -> bool:
            self.in_step = False
            if stop() or (launcher and os.getppid() != launcher):  # a launcher that was killed asks nobody to stop
                return True
            assert self.learner is not None
            weights = None if self.sharded else checksum(self.learner)
            self.group.tell({"what": "step", "weights": weights})
            self.in_step = True
            return False

        return asked

    def end(self) -> None:
        """Have the others leave."""
        self.group.tell({"what": "end"})


def check_recipe(recipe: Recipe) -> None:
    """Refuse what several ranks cannot do."""
    if recipe.distributed.shard != "none":
        _check_shard(recipe)
    engine = recipe.rollout.engine if isinstance(recipe, RLRecipe) else "auto"
    named = {"model.loader": recipe.model.loader, "rollout.engine": engine if is_code(engine) else None}
    for key, reference in named.items():
        if reference is not None:  # only rank 0 runs the user's code
            raise ConfigError(f"{key} names {reference}, which several ranks cannot use yet: train in one process")
    if ":" in recipe.model.device:
        raise ConfigError(
            f"model.device is {recipe.model.device}, which all ranks would share: use auto or cuda, and each rank "
            "takes its own device"
        )
    if isinstance(recipe, RLRecipe) and recipe.evaluation.suite:
        raise ConfigError(
            "evaluation.suite is not available with several ranks: leave it out, and measure the saved model against "
            "its start with `tether eval RUN --against MODEL --suite`"
        )
    if recipe.roles.mode == "shared_backbone":
        _check_shared_backbone(recipe)


def check_update(training: FromRollouts, recipe: RLRecipe) -> None:
    """Refuse an algorithm of the user's whose update may need whole weights."""
    update = training.parts.algorithm.update
    if recipe.distributed.shard != "none" and not isinstance(update, MinibatchEpochs):
        raise ConfigError(
            f"algorithm {training.parts.algorithm.name} updates by {type(update).__name__}, which may need whole "
            "weights: use MinibatchEpochs, or set distributed.shard to none"
        )


def _check_shard(recipe: Recipe) -> None:
    """Refuse what needs whole weights."""
    lora_reward = (
        isinstance(recipe, RLRecipe)
        and recipe.roles.mode == "lora"
        and any(isinstance(part, ModelPart) and part.shared for part in recipe.reward.parts)
    )
    reasons = {
        "roles.mode is shared_backbone": recipe.roles.mode == "shared_backbone",
        "roles.offload_reference is set": recipe.roles.offload_reference,
        f"model.quantize is {recipe.model.quantize}": recipe.model.quantize != "none",
        "optimizer.name is adamw_8bit, whose blocks of numbers would be cut": recipe.optimizer.name == "adamw_8bit",
        "reward.parts has a reward model on the policy's base": lora_reward,
        "the algorithm is trpo": recipe.method == "trpo",
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"{reason}, which needs whole weights: change it, or set distributed.shard to none")


def _check_shared_backbone(recipe: Recipe) -> None:
    """Refuse what would leave rows in rank 0's shared backbone that the other ranks do not have."""
    advice = "train in one process, or use roles.mode separate or lora"
    if recipe.roles.backbone_cache is not None:
        raise ConfigError(f"roles.backbone_cache is not available with several ranks: leave it out, or {advice}")
    if isinstance(recipe, RLRecipe) and any(isinstance(part, ModelPart) for part in recipe.reward.parts):
        raise ConfigError(
            "reward.parts has a reward model, which roles.mode shared_backbone runs on the shared layers, and with "
            f"several ranks only rank 0 scores: {advice}"
        )
    if isinstance(recipe, RewardRecipe) and recipe.reward.center_on and recipe.evaluation.keep_best:
        raise ConfigError(
            "evaluation.keep_best with reward.center_on runs the shared layers on rank 0 alone: set "
            f"evaluation.keep_best to false, or {advice}"
        )


def code_record(recipe: Recipe) -> dict[str, Any]:
    """Which code the user agreed to on rank 0."""
    now = consent.current()
    return {"folder": str(now.root), "allowed": list(now.allowed), "digests": code_digests(recipe)}


def _prompt_record(prompt: Prompt) -> dict[str, Any]:
    """What sampling needs of a prompt; its answer and its record's other columns are for the reward, on rank 0."""
    kept = ("id", "messages", "as_messages", "tools", "template_kwargs")
    return {name: getattr(prompt, name) for name in kept}


def prompt_of(record: dict[str, Any]) -> Prompt:
    """The prompt of a record."""
    given: dict[str, Any] = {**record, "messages": tuple(record["messages"]), "tools": tuple(record["tools"])}
    return Prompt(**given)


WRITTEN = Codec[dict[str, Any]](lambda files: (files, {}), lambda files, _: files)  # of one rank's share

WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def checksum(learner: Learner) -> int:
    """A sum over the bits of all trained weights: ranks that hold other weights have another one, almost surely."""
    weights = (parameter.detach().contiguous() for parameter in learner.named.values())
    return int(torch.stack([each.view(WHOLE[each.element_size()]).sum(dtype=torch.int64) for each in weights]).sum())


def trees_of(model: ActorCritic | ScalarModel, reference: ReferencePolicy | None) -> list[Tree]:
    """The models of a run's roles."""
    if isinstance(model, ScalarModel):
        return [Tree(model, model.backbone.model, model.head)]
    found = [Tree(model.policy, model.backbone.model)]
    if isinstance(model.critic, ScalarHead):
        found.append(Tree(model.critic, None, model.critic))
    elif model.critic is not None:
        found.append(Tree(model.critic, model.critic.backbone.model, model.critic.head))
    if reference is not None:
        backbone = reference.backbone.model
        found.append(Tree(nn.ModuleList([backbone, reference.output.linear]), backbone))
    return found


# -- state ------------------------------------------------------------------------------------------------------------


def tell_checkpoint(group: ProcessGroup, checkpoint: Checkpoint) -> None:
    """From rank 0: what the tensors are, then one after the other."""
    names = [(kind, name, tensor) for kind, named in checkpoint.tensors.items() for name, tensor in named.items()]
    shapes = {f"{place}": tensor[..., :0] if tensor.dim() else tensor for place, (_, _, tensor) in enumerate(names)}
    about = [[kind, name, list(tensor.shape)] for kind, name, tensor in names]
    value = {"what": "state", "step": checkpoint.step, "values": checkpoint.values, "tensors": about}
    group.tell(value | {"kinds": list(checkpoint.tensors)}, shapes)
    group.tell_tensors([tensor for _, _, tensor in names])


def hear_checkpoint(group: ProcessGroup) -> Checkpoint | None:
    """The state that rank 0 tells; None where it tells the end."""
    value, shapes = group.hear()
    if value["what"] != "state":
        return None
    tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in value["kinds"]}
    for place, (kind, name, shape) in enumerate(value["tensors"]):
        tensors[kind][name] = shapes[f"{place}"].new_empty(shape)
    group.hear_tensors([tensors[kind][name] for kind, name, _ in value["tensors"]])
    return Checkpoint(value["step"], tensors, value["values"])
