"""Low-rank adapters (Hu et al. 2021) through peft, injected into a module tree and saved in peft's own layout."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tether.errors import ConfigError

PREFIX = "base_model.model."  # how peft names what it wraps
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def lora_config(rank: int, alpha: float, targets: list[str], base: str | None = None) -> LoraConfig:
    """Adapters of one rank on the layers named; no dropout, for ratios and KL would be noise with it."""
    return LoraConfig(
        r=rank,
        lora_alpha=cast(int, alpha),
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        base_model_name_or_path=base,
    )


def target_names(trunk: nn.Module, targets: str) -> list[str]:
    """The layers that get adapters: those named with commas between, or every linear layer of the trunk."""
    if targets != "all-linear":
        return [name.strip() for name in targets.split(",")]
    return sorted({name.rpartition(".")[2] for name, layer in trunk.named_modules() if isinstance(layer, nn.Linear)})


def inject_lora(tree: nn.Module, config: LoraConfig, seed: int) -> list[nn.Parameter]:
    """Put fresh adapters into the tree, which computes what it did before; everything else in it is frozen."""
    tree.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(copy.deepcopy(config), tree)  # peft writes into the config it is given
        except ValueError as error:
            raise ConfigError(f"roles.lora_targets: {error}") from error
    parameters = [parameter for name, parameter in tree.named_parameters() if "lora_" in name]
    for parameter in parameters:
        parameter.requires_grad_(True)
    return parameters


def has_lora(tree: nn.Module) -> bool:
    """Whether adapters were injected."""
    return any("lora_" in name for name, _ in tree.named_parameters())


def save_lora(
    tree: nn.Module,
    target: Path,
    *,
    inside: str = "",
    extra: dict[str, Tensor] | None = None,
    kind: Literal["CAUSAL_LM", "SEQ_CLS"] = "CAUSAL_LM",
) -> None:
    """The tree's adapters as peft saves them.

    `inside` is where the tree stands in the model that peft will wrap; `extra` are whole tensors of that model.
    """
    peft_config: dict[str, Any] = getattr(tree, "peft_config")  # noqa: B009 (set by peft, unknown to the type)
    config: LoraConfig = copy.copy(peft_config["default"])
    config.task_type = cast(Any, kind)
    target.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(cast(Any, tree), state_dict=tree.state_dict())
    named = {f"{PREFIX}{inside}{name}": value.detach().cpu().contiguous() for name, value in state.items()}
    save_file(named | {f"{PREFIX}{name}": value for name, value in (extra or {}).items()}, target / WEIGHTS)
    config.save_pretrained(str(target))


def load_lora(tree: nn.Module, source: Path, *, inside: str = "") -> dict[str, Tensor]:
    """Fill the tree's adapters from a folder that `save_lora` wrote; returns what was saved beside them."""
    saved = load_file(source / WEIGHTS)
    start = f"{PREFIX}{inside}"
    own = {name.removeprefix(start): value for name, value in saved.items() if "lora_" in name}
    result = set_peft_model_state_dict(cast(Any, tree), own)
    if result.unexpected_keys or not own:
        raise ConfigError(f"{source} holds adapters of another model or rank than this run's")
    return {name.removeprefix(PREFIX): value for name, value in saved.items() if "lora_" not in name}


def saved_config(source: Path) -> dict[str, Any]:
    """What `adapter_config.json` says."""
    return json.loads((source / CONFIG).read_text())


def load_config(source: Path) -> LoraConfig:
    """The saved adapters' shape, to be injected anew."""
    saved = saved_config(source)
    return LoraConfig(
        r=saved["r"],
        lora_alpha=saved["lora_alpha"],
        target_modules=saved["target_modules"],
        lora_dropout=0.0,
        bias="none",
    )


def merge_lora(tree: nn.Module) -> None:
    """Add the adapters into the weights they adapt, and take them out of the tree."""
    for name, module in list(tree.named_modules()):
        if isinstance(module, LoraLayer):
            layer = cast(Any, module)
            layer.merge()
            tree.set_submodule(name, layer.get_base_layer())
