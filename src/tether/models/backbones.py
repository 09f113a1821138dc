"""Backbones: what turns tokens into hidden states, and how one is cut into layers that roles share.

Frozen weights that wait in host memory and come to the device for their pass.

Backbones: what turns tokens into hidden states, and how one is cut into layers that roles share and layers they own.

Roles share memory by sharing *tensors*: each role has a module tree of its own, and trees hold the same parameters
where the roles have them in common. No role is switched on or off, so nothing depends on who ran last.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.errors import ConfigError
from tether.models.acceleration import (
    MISSING,
    SLOWER,
    Backend,
    backend_for,
    cuda_graphs,
    packed_states,
    unsupported_reason,
)
from tether.models.forward import hidden_states
from tether.types import Sequences


class Waiting:
    """A frozen module's tensors: between visits they lie in host memory, pinned where that makes the way short.

    The host's copy stays the one that counts, so leaving the device costs nothing. Tensors that other modules share
    would leave with it, so it is only for modules that stand alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        assert not any(tensor.requires_grad for tensor in self.tensors), "what is trained cannot wait elsewhere"
        self.device = next((tensor.device for tensor in self.tensors), torch.device("cpu"))
        self.homes = [_home(tensor) for tensor in self.tensors]
        self._visits = 0
        self._leave()

    @contextmanager
    def visit(self) -> Iterator[None]:
        """The module on its device, for a while; a visit within a visit is the same one."""
        if self._visits == 0:
            for tensor, home in zip(self.tensors, self.homes, strict=True):
                tensor.data = self._brought(home)
        self._visits += 1
        try:
            yield
        finally:
            self._visits -= 1
            if self._visits == 0:
                self._leave()

    def _brought(self, home: Tensor) -> Tensor:
        return home.to(self.device, non_blocking=True)

    def _leave(self) -> None:
        for tensor, home in zip(self.tensors, self.homes, strict=True):
            tensor.data = home


def _home(tensor: Tensor) -> Tensor:
    host = tensor.detach().to("cpu")
    return host.pin_memory() if tensor.device.type == "cuda" else host


Model = TypeVar("Model", bound=nn.Module)
PROBE_LENGTH = 6
QUANTISED_BY = ("state", "quant_state")  # where layers of bitsandbytes hold scales and codes
FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f")
# What two ways through a layer may differ by, by token: a share of what it changed, and one of what leaves it
ALIKE = 1e-3, 1e-5
ALIKE_IN_HALF = 0.1, 2**-7  # with numbers of 16 bits


def shared_tree(model: Model) -> Model:
    """A second module tree over the very same tensors: what is replaced in one tree stays as it was in the other.

    A quantised layer of bitsandbytes keeps scales, and in 8 bits the codes too, beside its weight: they belong to both
    trees as well. The first pass takes them off the weight, so a second tree without them would read codes as numbers.
    """
    kept: list[Any] = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        if type(module).__module__.startswith("bitsandbytes."):
            kept += [vars(module)[name] for name in QUANTISED_BY if vars(module).get(name) is not None]
    return copy.deepcopy(model, memo={id(each): each for each in kept})


class Backbone(nn.Module):
    """A whole backbone. `model` is its tree, for saving and for looking at its parameters."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.fast = PackedBackend(model)

    def recompute(self) -> None:
        """From now on run each layer again in the backward pass, and keep only what enters it until then."""
        self.fast.recompute = True

    def forward(self, batch: Sequences, wanted: Tensor | None = None) -> Tensor:
        """(B, T, H) hidden states after the final norm; only those of `wanted` (B, T) have to be right."""
        return self.fast.states(self.model, batch, None, wanted)

    def plain(self, batch: Sequences) -> Tensor:
        """(B, T, H) the same by the model's own modules, differentiable twice."""
        return hidden_states(self.model, batch)


def recompute_layers(model: Model) -> Model:
    """The model, each of whose backbones keeps only what enters its layers and runs them again in the backward pass."""
    for module in model.modules():
        if isinstance(module, Backbone):
            module.recompute()
    return model


class PackedBackend:
    """Whether a backbone may be run by the pass over packed tokens: its kind is known, and a trial agrees."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.recompute = False
        self.captured: Any = None  # graphs of the pass, where it may hold some
        self.backend: Backend | None = None
        self.reason = unsupported_reason(
            model, PROBE_LENGTH
        )  # why the model's own modules are run; None where they are not
        if self.reason is not None:
            return
        self.backend = backend_for(model)
        self.reason = self._disagreement(model)
        self.captured = cuda_graphs() if self.backend == "fused" else None

    @torch.no_grad()
    def _disagreement(self, model: PreTrainedModel) -> str | None:
        """Why the pass is not to be taken: each layer is tried by itself, so that rounding does not add up."""
        if self.backend is None:
            kind = str(model.dtype).removeprefix("torch.")
            return f"there is none for {kind} weights on this device ({model.device.type}) with what is installed here"
        layers, probe = len(model.layers), probe_batch(model)  # pyright: ignore[reportArgumentType]
        if layers != model.config.num_hidden_layers:
            return "its configuration has another number of layers"
        entering = model.get_input_embeddings()(probe.tokens)
        for index in range(layers):
            apart, leaving = self._apart(layers_between(model, index, index + 1), probe, entering)
            if index + 1 == layers and apart <= 1.0:  # once more with the norm behind it
                apart, _ = self._apart(layers_between(model, index, None), probe, entering, normed=True)
            if math.isinf(apart):
                return f"layer {index + 1} does what it does not know"
            if not apart <= 1.0:
                return f"in a trial it was off by {apart:.2g} times what rounding explains on layer {index + 1}"
            entering = leaving
        return None

    def _apart(
        self, part: PreTrainedModel, probe: Sequences, entering: Tensor, *, normed: bool = False
    ) -> tuple[float, Tensor]:
        """`(how far both ways through a part are apart, what leaves it)`: 1 is as far as rounding may take a token.

        A token whose states are hundreds of times as large as what a layer adds to them, as some are in trained models,
        is moved by more than that when they are rounded; so both what was added and what leaves count.
        """
        assert self.backend is not None
        ours, theirs = packed_states(part, probe, entering, backend=self.backend), hidden_states(part, probe, entering)
        if ours is None:
            return math.inf, theirs
        of_change, of_all = ALIKE if theirs.dtype in (torch.float32, torch.float64) else ALIKE_IN_HALF
        change = theirs if normed else theirs - entering
        gap, change, size = (x[probe.attention_mask].float().norm(dim=-1) for x in (ours - theirs, change, theirs))
        return float((gap / (of_change * change + of_all * size).clamp_min(1e-30)).max()), theirs

    def states(self, model: PreTrainedModel, batch: Sequences, lower: Tensor | None, wanted: Tensor | None) -> Tensor:
        """(B, T, H) by the faster way where it is right for this batch, else by the model's own modules.

        Graphs hold what a pass keeps from one to the next, which is what running layers again is to save.
        """
        recompute, captured = self.recompute and torch.is_grad_enabled(), None if self.recompute else self.captured
        found = None
        if (
            self.reason is None
            and self.backend is not None
            and unsupported_reason(model, batch.tokens.shape[1]) is None
        ):
            found = packed_states(
                model, batch, lower, wanted, backend=self.backend, recompute=recompute, captured=captured
            )
        return found if found is not None else hidden_states(model, batch, lower, recompute=recompute)


def backbone_notices(model: nn.Module) -> tuple[str, ...]:
    """A sentence for each reason for which backbones of the model are run by their own modules."""
    reasons = [module.fast.reason for module in model.modules() if isinstance(module, Backbone)]
    said = "Training runs the model's own modules, not the pass over packed tokens, which is faster: {}."
    return tuple(
        SLOWER if reason == MISSING else said.format(reason) for reason in dict.fromkeys(reasons) if reason is not None
    )


def layers_between(backbone: PreTrainedModel, start: int, stop: int | None) -> PreTrainedModel:
    """The backbone cut down to its layers [start, stop), sharing their modules; the final norm only with the last one.

    Run with the states that layer `start` would have been given in place of embeddings.
    """
    name, layers = layer_list(backbone)
    kept = list(layers)[start:stop]
    part = copy.copy(backbone)
    part._modules = dict(backbone._modules)
    part.config = copy.copy(backbone.config)
    part.config.num_hidden_layers = len(kept)
    worked_out = isinstance(getattr(type(part.config), "layer_types", None), property)  # from the number of layers
    if getattr(part.config, "layer_types", None) and not worked_out:
        part.config.layer_types = list(part.config.layer_types)[start:stop]
    setattr(part, name, nn.ModuleList(kept))
    if stop is not None:
        setattr(part, final_norm_name(backbone), nn.Identity())
    return part


def layer_list(backbone: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The backbone's layers, and the attribute that holds them."""
    for name, child in backbone.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == backbone.config.num_hidden_layers:
            return name, child
    raise ConfigError(f"roles.mode: the layers of {type(backbone).__name__} cannot be told apart; use separate or lora")


def final_norm_name(backbone: PreTrainedModel) -> str:
    """The attribute that holds the norm after the last layer."""
    for name in FINAL_NORMS:
        if isinstance(getattr(backbone, name, None), nn.Module):
            return name
    raise ConfigError(f"roles.mode: {type(backbone).__name__} has no final norm that is known; use separate or lora")


def own_top(backbone: PreTrainedModel, depth: int) -> PreTrainedModel:
    """A tree that shares the backbone's layers below `depth` and owns copies of the layers above and of the norm."""
    tree = shared_tree(backbone)
    name, layers = layer_list(tree)
    upper = [copy.deepcopy(layer) for layer in list(layer_list(backbone)[1])[depth:]]
    setattr(tree, name, nn.ModuleList([*list(layers)[:depth], *upper]))
    norm = final_norm_name(backbone)
    setattr(tree, norm, copy.deepcopy(getattr(backbone, norm)))
    return tree


def top_parameters(backbone: PreTrainedModel, depth: int) -> list[nn.Parameter]:
    """The parameters above `depth`: layers and final norm."""
    layers = list(layer_list(backbone)[1])[depth:]
    norm: nn.Module = getattr(backbone, final_norm_name(backbone))
    return [parameter for module in (*layers, norm) for parameter in module.parameters()]


def probe_batch(backbone: PreTrainedModel) -> Sequences:
    """Two short rows, one of them padded, to try a way of running the backbone on."""
    count = 2 * PROBE_LENGTH
    tokens = torch.arange(count, device=backbone.device).reshape(2, -1) % backbone.config.get_text_config().vocab_size
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, 0] = False
    return Sequences(tokens=tokens, attention_mask=mask, response_mask=mask)
