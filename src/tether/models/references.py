"""A reference other than the policy as it was loaded: another model, which shares what it can in each role mode."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from tether.errors import ConfigError
from tether.files import check_saved, same_place
from tether.models.backbones import Backbone, OutputLayer, backbone_of, own_top, shared_tree, top_parameters
from tether.models.load import check_not_reward_model
from tether.models.lora import CONFIG, inject_lora, load_config, load_lora, saved_config
from tether.models.shared_backbone import TopBackbone
from tether.models.sharing import Adapters, Sharing, Tops, size_in_words


def stands_on(folder: Path, base: str) -> bool:
    """Whether a folder holds adapters on the model `base`."""
    return (folder / CONFIG).is_file() and same_place(str(saved_config(folder).get("base_model_name_or_path")), base)


def adapted_reference(sharing: Adapters, folder: Path) -> tuple[Backbone, OutputLayer]:
    """The roles' frozen base with the adapters of a folder, of whatever rank."""
    check_not_reward_model(folder)
    check_saved(folder)
    tree = shared_tree(sharing.base)
    inject_lora(tree, load_config(folder), 0)
    load_lora(tree, folder)
    tree.requires_grad_(False)
    return Backbone(backbone_of(tree)), OutputLayer.of(sharing.base)


def whole_reference(sharing: Sharing, model: PreTrainedModel) -> tuple[Backbone, OutputLayer]:
    """A loaded model, frozen: on the shared backbone in that mode, else with weights of its own."""
    model.requires_grad_(False)
    if not isinstance(sharing, Tops):
        return Backbone(backbone_of(model)), OutputLayer.of(model)
    check_backbone(sharing, model)
    tree = own_top(sharing.start, sharing.shared.depth)
    tree.load_state_dict(backbone_of(model).state_dict())  # the shared layers receive the numbers that they hold
    return TopBackbone(tree.requires_grad_(False), sharing.shared), OutputLayer.of(sharing.policy)


def check_backbone(sharing: Tops, model: PreTrainedModel) -> None:
    """Raise ConfigError unless the model is the policy with another top: the frozen layers are run once for both."""
    ours, theirs = sharing.policy.state_dict(), model.state_dict()
    if {name: x.shape for name, x in ours.items()} != {name: x.shape for name, x in theirs.items()}:
        raise ConfigError(
            f"it is another model ({size_in_words(model)}) than this run's ({size_in_words(sharing.policy)}), and in "
            "roles.mode shared_backbone both share one: use roles.mode separate"
        )
    if not all(
        torch.equal(x, y) for x, y in zip(_frozen(sharing, sharing.policy), _frozen(sharing, model), strict=True)
    ):
        raise ConfigError(
            "it was not trained on this model's backbone: name a model trained with the same roles.trainable_layers "
            "from the same one, or use roles.mode separate"
        )


def _frozen(sharing: Tops, model: nn.Module) -> list[torch.Tensor]:
    """Everything below the top, and the output layer."""
    assert isinstance(model, PreTrainedModel)
    upper = {id(parameter) for parameter in top_parameters(backbone_of(model), sharing.shared.depth)}
    return [parameter for parameter in model.parameters() if id(parameter) not in upper]
