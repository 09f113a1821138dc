"""How roles share weights: separate models, LoRA adapters on one base, or top layers on a shared backbone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from tether.config.sections import RolesSettings
from tether.errors import ConfigError
from tether.models.backbones import (
    Backbone,
    OutputLayer,
    ScalarHead,
    backbone_of,
    own_top,
    shared_tree,
    top_parameters,
)
from tether.models.lora import CONFIG, are_transposed, inject_lora, load_lora, lora_config, saved_config, target_names
from tether.models.scalar_models import ScalarModel
from tether.models.shared_backbone import BackboneCache, SharedBackbone, TopBackbone, check_split


class Sharing(Protocol):
    """What the roles are made from."""

    @property
    def policy(self) -> PreTrainedModel:
        """The tree that is trained, sampled from and saved."""
        ...

    @property
    def shared(self) -> SharedBackbone | None:
        """The layers that every role shares, whose states sampling may store."""
        ...

    def policy_backbone(self) -> Backbone:
        """The policy's backbone."""
        ...

    def reference(self) -> tuple[Backbone, OutputLayer]:
        """The policy as it was loaded, frozen."""
        ...

    def scalar_backbone(self, seed: int) -> Backbone:
        """A trainable backbone for a critic or reward model, which computes what the loaded policy's does."""
        ...

    def load_scalar(self, folder: Path, group: str) -> ScalarModel:
        """A saved reward model, sharing memory in this mode."""
        ...


@dataclass(frozen=True)
class Separate:
    """Every role is a whole model of its own."""

    policy: PreTrainedModel
    shared: None = None

    def policy_backbone(self) -> Backbone:
        """The policy's backbone."""
        return Backbone(backbone_of(self.policy))

    def reference(self) -> tuple[Backbone, OutputLayer]:
        """A frozen copy."""
        model = copy.deepcopy(self.policy).requires_grad_(False)
        return Backbone(backbone_of(model)), OutputLayer.of(model)

    def scalar_backbone(self, seed: int) -> Backbone:
        """A copy of the policy's backbone."""
        del seed
        return Backbone(copy.deepcopy(backbone_of(self.policy)).requires_grad_(True))

    def load_scalar(self, folder: Path, group: str) -> ScalarModel:
        """As it was saved: a model of its own, of whatever size."""
        loaded = ScalarModel.load(folder, self.policy.dtype, self.policy.device)
        return ScalarModel(loaded.backbone, loaded.head, group)


class Adapters:
    """One frozen base; policy, critic and reward are low-rank adapters on it; the reference is the base itself."""

    shared: None = None

    def __init__(self, base: PreTrainedModel, rank: int, alpha: float, targets: str, seed: int) -> None:
        self.base = base.requires_grad_(False)
        names = target_names(backbone_of(base), targets)
        path, transposed = getattr(base.config, "name_or_path", None), are_transposed(backbone_of(base), names)
        self.config = lora_config(rank, alpha, names, path, transposed=transposed)
        self.policy = shared_tree(base)
        inject_lora(self.policy, self.config, seed)

    def policy_backbone(self) -> Backbone:
        """The base with the policy's adapters."""
        return Backbone(backbone_of(self.policy))

    def reference(self) -> tuple[Backbone, OutputLayer]:
        """The base without any."""
        return Backbone(backbone_of(self.base)), OutputLayer.of(self.base)

    def scalar_backbone(self, seed: int) -> Backbone:
        """The base with fresh adapters."""
        tree = shared_tree(backbone_of(self.base))
        inject_lora(tree, self.config, seed)
        return Backbone(tree)

    def load_scalar(self, folder: Path, group: str) -> ScalarModel:
        """The base with the adapters and head that were saved."""
        if not (folder / CONFIG).is_file():
            raise ConfigError(f"{folder} holds no adapters: train the reward model with roles.mode lora")
        self._check_scale(folder)
        backbone = self.scalar_backbone(0)
        beside = load_lora(backbone.model, folder, inside=f"{self.base.base_model_prefix}.", whole=True)
        head, saved = ScalarHead.like_output(self.base, deviation=0.0, seed=0), beside.get("score.weight")
        if saved is None:
            raise ConfigError(f"{folder} is not a reward model: its adapters have no `score` layer beside them")
        if saved.shape != head.weight.shape:
            raise ConfigError(
                f"{folder} holds adapters of another model: their `score` layer reads {saved.shape[-1]} numbers, but "
                f"this model has a width of {head.weight.shape[-1]}"
            )
        with torch.no_grad():
            head.weight.copy_(saved)
            head.bias.fill_(ScalarModel.saved_bias(folder))
        return ScalarModel(backbone, head, group)

    def _check_scale(self, folder: Path) -> None:
        """Refuse adapters of another rank or alpha: their weights would not fit, or count for more or less."""
        saved = saved_config(folder)
        for setting, ours, theirs in (
            ("roles.lora_rank", self.config.r, saved.get("r")),
            ("roles.lora_alpha", self.config.lora_alpha, saved.get("lora_alpha")),
        ):
            if ours != theirs:
                raise ConfigError(
                    f"{folder} was trained with {setting} {theirs}, but this run has {ours}: use {theirs}"
                )


class Tops:
    """A shared frozen backbone, run once a row; policy, critic, reward and reference each own the top layers."""

    def __init__(self, model: PreTrainedModel, layers: int, states: str | None = None) -> None:
        """`layers` belong to each role; `states` is a folder in which rows of the backbone are kept between runs."""
        backbone = backbone_of(model)
        depth = backbone.config.num_hidden_layers - layers
        if depth < 1:
            raise ConfigError(
                f"roles.trainable_layers is {layers}, but the model has {backbone.config.num_hidden_layers}: leave at "
                "least one to share, or use roles.mode separate"
            )
        self.policy = model.requires_grad_(False)
        check_split(backbone, depth)
        kept = BackboneCache(Path(states), backbone, depth) if states else None
        self.shared = SharedBackbone(backbone, depth, kept=kept)
        self.start = own_top(backbone, depth)  # the policy as loaded: its own top is about to be trained
        for parameter in top_parameters(backbone, depth):
            parameter.requires_grad_(True)

    def policy_backbone(self) -> Backbone:
        """The policy's top on the shared backbone."""
        return TopBackbone(backbone_of(self.policy), self.shared)

    def reference(self) -> tuple[Backbone, OutputLayer]:
        """The top as it was loaded."""
        return TopBackbone(self.start.requires_grad_(False), self.shared), OutputLayer.of(self.policy)

    def scalar_backbone(self, seed: int) -> Backbone:
        """A copy of the loaded top."""
        del seed
        return self._trainable(own_top(self.start, self.shared.depth))

    def load_scalar(self, folder: Path, group: str) -> ScalarModel:
        """A reward model that was trained as a top on the same backbone."""
        loaded = ScalarModel.load(folder, self.policy.dtype, self.policy.device)
        theirs, ours = loaded.backbone.model.state_dict(), backbone_of(self.policy).state_dict()
        if {name: x.shape for name, x in theirs.items()} != {name: x.shape for name, x in ours.items()}:
            raise ConfigError(
                f"{folder} is another model ({size_in_words(loaded.backbone.model)}) than this run's "
                f"({size_in_words(self.policy)}), and in roles.mode shared_backbone both share one: train it from this "
                "run's model, or use roles.mode separate"
            )
        upper = {id(parameter) for parameter in top_parameters(loaded.backbone.model, self.shared.depth)}
        lower = [name for name, parameter in loaded.backbone.model.named_parameters() if id(parameter) not in upper]
        if theirs.keys() != ours.keys() or any(not torch.equal(theirs[name], ours[name]) for name in lower):
            raise ConfigError(
                f"{folder} was not trained on this model's backbone: train it with the same roles.trainable_layers"
            )
        tree = own_top(self.start, self.shared.depth)
        tree.load_state_dict(theirs)
        return ScalarModel(self._trainable(tree), loaded.head, group)

    def _trainable(self, tree: PreTrainedModel) -> Backbone:
        for parameter in top_parameters(tree, self.shared.depth):
            parameter.requires_grad_(True)
        return TopBackbone(tree, self.shared)


def build_sharing(model: PreTrainedModel, settings: RolesSettings, seed: int) -> Sharing:
    """The sharing mode that the recipe sets."""
    if settings.mode == "lora":
        return Adapters(model, settings.lora_rank, settings.lora_alpha, settings.lora_targets, seed)
    if settings.mode == "shared_backbone":
        return Tops(model, settings.trainable_layers, settings.backbone_cache)
    return Separate(model)


def size_in_words(model: PreTrainedModel) -> str:
    """Such as `LlamaModel, 30 layers of width 576, 49152 tokens`."""
    config = model.config.get_text_config()
    layers, tokens = config.num_hidden_layers, config.vocab_size
    return f"{type(backbone_of(model)).__name__}, {layers} layers of width {config.hidden_size}, {tokens} tokens"
