"""Rank 0 leads: it runs the command, writes everything, and tells the other ranks which step comes next."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tether.config.allowed_code import is_code
from tether.config.recipes import Recipe, RewardRecipe, RLRecipe
from tether.config.rewards import ModelPart
from tether.distributed.group import ProcessGroup
from tether.distributed.launch import LAUNCHER
from tether.distributed.sums import exact_sums, fast_sums
from tether.errors import ConfigError
from tether.learner.learner import Learner
from tether.learner.ranks import Codec, Ranks
from tether.rollout.chunks import ChunkedEngine
from tether.store.checkpoints import Checkpoint
from tether.store.folder import recipe_record
from tether.train.training import FromRollouts, Training
from tether.types import Prompt

T = TypeVar("T")


class GroupRanks(Ranks):
    """Several ranks, as any of them sees them."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.index, self.count = group.index, group.count
        self.reduction = "exact"
        self.learner: Learner | None = None
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
            inner = parts.engine.engine if isinstance(parts.engine, ChunkedEngine) else parts.engine
            engine = ChunkedEngine(inner, chunk, self, everywhere=parts.shared is not None)
            training.parts = dataclasses.replace(parts, engine=engine)

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    def join(self, training: T, recipe: Any) -> T:
        """Tell the others the recipe and the prompts: they run no code that the recipe names."""
        check_recipe(recipe)
        prompts: dict[str, Any] = {}
        if isinstance(training, FromRollouts):
            for name, asked in (("training", training.parts.prompts.items), ("evaluation", training.parts.held_out)):
                prompts[name] = [_prompt_record(prompt) for prompt in asked]
        self.group.tell({"what": "build", "recipe": recipe_record(recipe), "prompts": prompts})
        self.deal(training, recipe)  # pyright: ignore[reportArgumentType]
        return training

    def begin(self, training: Any, start: int) -> None:
        """Tell the others the whole state, so that all ranks hold the same bits."""
        self.learner = training.learner
        tell_checkpoint(self.group, training.capture(start, {}))

    def asking(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """Tell the others to take the step, unless the run ends here."""
        launcher = int(os.environ.get(LAUNCHER, "0"))

        def asked() -> bool:
            self.in_step = False
            if stop() or (launcher and os.getppid() != launcher):  # a launcher that was killed asks nobody to stop
                return True
            assert self.learner is not None
            self.group.tell({"what": "step", "weights": checksum(self.learner)})
            self.in_step = True
            return False

        return asked

    def end(self) -> None:
        """Have the others leave."""
        self.group.tell({"what": "end"})


def check_recipe(recipe: Recipe) -> None:
    """Refuse what several ranks cannot do."""
    if recipe.distributed.shard != "none":
        raise ConfigError(
            f"distributed.shard is {recipe.distributed.shard}, which is not available yet: set it to none, and every "
            "rank holds all weights"
        )
    engine = recipe.rollout.engine if isinstance(recipe, RLRecipe) else "auto"
    named = {"model.loader": recipe.model.loader, "rollout.engine": engine if is_code(engine) else None}
    named["algorithm"] = recipe.algorithm if isinstance(recipe, RLRecipe) else None
    for key, reference in named.items():
        if reference is not None:  # only rank 0 runs the user's code
            raise ConfigError(f"{key} names {reference}, which several ranks cannot use yet: train in one process")
    if ":" in recipe.model.device:
        raise ConfigError(
            f"model.device is {recipe.model.device}, which all ranks would share: use auto or cuda, and each rank "
            "takes its own device"
        )

    if recipe.roles.mode == "shared_backbone":
        _check_shared_backbone(recipe)


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


def _prompt_record(prompt: Prompt) -> dict[str, Any]:
    """What sampling needs of a prompt; its answer and its record's other columns are for the reward, on rank 0."""
    kept = ("id", "messages", "as_messages", "tools", "template_kwargs")
    return {name: getattr(prompt, name) for name in kept}


def prompt_of(record: dict[str, Any]) -> Prompt:
    """The prompt of a record."""
    given: dict[str, Any] = {**record, "messages": tuple(record["messages"]), "tools": tuple(record["tools"])}
    return Prompt(**given)


WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def checksum(learner: Learner) -> int:
    """A sum over the bits of all trained weights: ranks that hold other weights have another one, almost surely."""
    weights = (parameter.detach().contiguous() for parameter in learner.named.values())
    return int(torch.stack([each.view(WHOLE[each.element_size()]).sum(dtype=torch.int64) for each in weights]).sum())


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
