"""Low-rank adapters (Hu et al. 2021) through peft, injected into a module tree and saved in peft's own layout."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tether.errors import ConfigError
from tether.files import read_plain
from tether.hub.folder_check import MAX_CONFIG, check_folder

PREFIX = "base_model.model."  # how peft names what it wraps
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# State-space models hand these layers' weights to a fused scan, past the adapters: peft refuses them.
SCANS = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
SCANNED = frozenset({"conv1d", "out_proj"})


def lora_config(
    rank: int, alpha: float, targets: list[str], base: str | None = None, *, transposed: bool = False
) -> LoraConfig:
    """Adapters of one rank on the layers named; no dropout, for ratios and KL would be noise with it.

    `transposed` says that the layers hold their weights as (in, out), as GPT-2's do.
    """
    return LoraConfig(
        r=rank,
        lora_alpha=cast(int, alpha),
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        base_model_name_or_path=base,
        fan_in_fan_out=transposed,
    )


def linear_layers(backbone: nn.Module) -> dict[str, nn.Module]:
    """Every layer that is one matrix product, by its path in the backbone; GPT-2 calls them Conv1D."""
    return {name: layer for name, layer in backbone.named_modules() if isinstance(layer, nn.Linear | Conv1D)}


def target_names(backbone: nn.Module, targets: str) -> list[str]:
    """The layers that get adapters: those named with commas between, or every linear layer of the backbone that can."""
    if targets != "all-linear":
        return [name.strip() for name in targets.split(",")]
    left_out = SCANNED if getattr(getattr(backbone, "config", None), "model_type", None) in SCANS else frozenset[str]()
    return sorted({name.rpartition(".")[2] for name in linear_layers(backbone)} - left_out)


def are_transposed(backbone: nn.Module, names: list[str]) -> bool:
    """Whether the layers of these names hold (in, out) weights."""
    return any(
        isinstance(layer, Conv1D) for path, layer in linear_layers(backbone).items() if path.rpartition(".")[2] in names
    )


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


def load_lora(tree: nn.Module, source: Path, *, inside: str = "", whole: bool = False) -> dict[str, Tensor]:
    """Fill the tree's adapters from a folder that `save_lora` wrote; returns what was saved beside them.

    With `whole` every adapter of the tree must have been saved; without, one that was not stays as it is.
    """
    check_folder(source, "adapters in")
    try:
        saved = load_file(source / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{source / WEIGHTS} cannot be read ({str(error).partition(chr(10))[0]})") from error
    start = f"{PREFIX}{inside}"
    own = {name.removeprefix(start): value for name, value in saved.items() if "lora_" in name}
    expected = get_peft_model_state_dict(cast(Any, tree), state_dict=tree.state_dict())
    apart = sorted(own.keys() ^ expected.keys() if whole or not own else own.keys() - expected.keys())
    apart += [name for name in own.keys() & expected.keys() if own[name].shape != expected[name].shape]
    if apart:
        there, here = (tuple(x[apart[0]].shape) if apart[0] in x else "missing" for x in (own, expected))
        raise ConfigError(
            f"{source} holds adapters of another model, rank or layers than this run's: {apart[0]} is {there} there "
            f"and {here} here"
        )
    set_peft_model_state_dict(cast(Any, tree), own)
    return {name.removeprefix(PREFIX): value for name, value in saved.items() if "lora_" not in name}


def saved_config(source: Path) -> dict[str, Any]:
    """The contents of `adapter_config.json`."""
    try:
        saved = json.loads(read_plain(source / CONFIG, MAX_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source / CONFIG} cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not isinstance(saved, dict):
        raise ConfigError(f"{source / CONFIG} must hold an object with named values")
    return saved


def load_config(source: Path) -> LoraConfig:
    """The saved adapters' shape, to be injected again."""
    saved = saved_config(source)
    return LoraConfig(
        r=saved["r"],
        lora_alpha=saved["lora_alpha"],
        target_modules=saved["target_modules"],
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=bool(saved.get("fan_in_fan_out")),
    )


def merge_lora(tree: nn.Module) -> None:
    """Add the adapters into the weights they adapt, and take them out of the tree."""
    for name, module in list(tree.named_modules()):
        if isinstance(module, LoraLayer):
            layer = cast(Any, module)
            layer.merge()
            tree.set_submodule(name, layer.get_base_layer())
