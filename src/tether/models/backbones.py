"""Backbones, which turn tokens into hidden states, and the heads that turn those into log-probabilities or scalars.

A backbone runs whole, or is cut into layers that roles share and layers that each role owns. Roles share memory by
sharing *tensors*: each role has its own module tree, and the trees hold the same parameters where roles have them in
common. No role is switched on or off, so results do not depend on which role ran last. `CpuOffload` keeps a frozen
module in host memory between its passes.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.errors import ConfigError
from tether.mask_cache import true_positions
from tether.models import acceleration
from tether.models.acceleration import (
    MISSING,
    SLOWER,
    Backend,
    backend_for,
    cuda_graphs,
    exact_states,
    exact_unsupported,
    packed_states,
    training_unsupported,
)
from tether.ops.logprobs import (
    StateLogprobs,
    chunked_logprobs,
    log_distributions,
    scatter_to_mask,
    states_before,
    token_logprobs,
)
from tether.ops.masks import last_index, position_ids
from tether.types import Sequences


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its output layer; its parameters are the model's own."""
    return model.base_model  # pyright: ignore[reportReturnType]


def causal_lm_of(model: Any) -> Any:
    """The causal language model inside a model with adapters, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def hidden_states(
    backbone: PreTrainedModel, batch: Sequences, embeddings: Tensor | None = None, *, recompute: bool = False
) -> Tensor:
    """(B, T, H) the backbone's last hidden states, after its final norm; positions start at the first real token.

    `embeddings` (B, T, H), where given, stand in place of those of the batch's tokens. With `recompute` each layer is
    run again in the backward pass and keeps only its inputs until then, where the architecture knows how.
    """
    arguments: dict[str, Any] = {"attention_mask": batch.attention_mask.long()}
    arguments |= {"input_ids": batch.tokens} if embeddings is None else {"inputs_embeds": embeddings}
    if "position_ids" in inspect.signature(backbone.forward).parameters:
        arguments["position_ids"] = position_ids(batch.attention_mask)
    with _recomputing(backbone) if recompute and backbone.supports_gradient_checkpointing else nullcontext():
        states: Tensor = backbone(**arguments, use_cache=False).last_hidden_state
    # Some backbones (Mamba) add up their residual stream in float32 whatever their weights are; output layers do not.
    return states.to(backbone.dtype) if states.dtype == torch.float32 and backbone.dtype.itemsize < 4 else states


@contextmanager
def _recomputing(backbone: PreTrainedModel) -> Iterator[None]:
    """Layers checkpoint themselves in training mode only, which is safe because dropout is removed."""
    backbone.gradient_checkpointing_enable({"use_reentrant": False})
    backbone.train()
    try:
        yield
    finally:
        backbone.eval()
        backbone.gradient_checkpointing_disable()


@dataclass(frozen=True)
class OutputLayer:
    """How hidden states become logits: softcap * tanh(scale * (h W^T + b) / softcap), no tanh where no softcap."""

    linear: nn.Linear  # whose tensors are read when they are used: gathering them makes new ones
    scale: float
    softcap: float | None
    exact: bool = False  # log-probabilities by the exact pass (`model.numerics`)

    @property
    def weight(self) -> Tensor:
        """(V, H)."""
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        """(V,), where there is one."""
        return self.linear.bias

    @classmethod
    def of(cls, model: PreTrainedModel) -> OutputLayer:
        """Read off a model, and checked against the model's own logits; others raise a ConfigError."""
        linear = model.get_output_embeddings()
        if not isinstance(linear, torch.nn.Linear):
            raise ConfigError(f"model.path: {type(model).__name__} has no linear output layer, which training needs")
        if not linear.weight.is_floating_point():
            raise ConfigError(
                f"model.quantize: the output layer of {type(model).__name__} was quantised too, and training needs it "
                "whole: set model.quantize none"
            )
        config = model.config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        layer = cls(linear, scale, getattr(config, "final_logit_softcapping", None))
        layer.check(model)
        return layer

    def check(self, model: PreTrainedModel) -> None:
        """Raise unless these log-probs are the model's own, on a few tokens."""
        count = min(8, self.weight.shape[0])
        tokens = torch.arange(count, device=self.weight.device)[None]
        everything = torch.ones_like(tokens, dtype=torch.bool)
        probe = Sequences(tokens=tokens, attention_mask=everything, response_mask=everything)
        with torch.no_grad():
            hidden = self._hidden_states(model, probe)
            targets = tokens[0].flip(0)
            ours, _ = (self.kernels(hidden) or chunked_logprobs)(hidden[0], self.weight, targets, **self.options(1.0))
            logits = model(input_ids=tokens, use_cache=False).logits[0].float()
            theirs = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]
        tolerance = 1e-3 if self.weight.dtype == torch.float32 else 0.1
        if not torch.allclose(ours.float(), theirs, atol=tolerance, rtol=tolerance):
            raise ConfigError(
                f"model.path: the output layer of {type(model).__name__} does more than a product, a scale and a "
                "softcap, so its log-probabilities cannot be taken in chunks; use another architecture"
            )

    @staticmethod
    def _hidden_states(model: PreTrainedModel, probe: Sequences) -> Tensor:
        try:
            return hidden_states(backbone_of(model), probe)
        except RuntimeError as error:
            if not getattr(model, "is_quantized", False):
                raise
            raise ConfigError(
                f"model.quantize: {type(model).__name__} cannot run on quantised weights ({error}): set model.quantize "
                "none"
            ) from error

    def options(self, temperature: float) -> dict[str, Any]:
        """The arguments of `tether.ops.logprobs` for this layer at a temperature."""
        return {"temperature": temperature, "bias": self.bias, "scale": self.scale, "softcap": self.softcap}

    def kernels(self, hidden: Tensor) -> StateLogprobs | None:
        """The kernels that find log-probabilities, where they are made for such states."""
        if self.exact:
            return acceleration.exact_logprobs
        return acceleration.logprobs if acceleration.logprobs_supported(hidden, self.weight) else None

    def logprobs(self, hidden: Tensor, batch: Sequences) -> tuple[Tensor, Tensor]:
        """`(logprobs, entropy)` (B, T) at the batch's temperature, on its response mask."""
        given = (hidden, self.weight, batch.tokens, batch.response_mask)
        positions = true_positions(batch.response_mask)
        return token_logprobs(*given, **self.options(batch.temperature), by=self.kernels(hidden), positions=positions)

    def distributions(self, hidden: Tensor, batch: Sequences) -> Tensor:
        """(N, V) whole log-distributions at the batch's response tokens."""
        mask = batch.response_mask
        options = self.options(batch.temperature)
        return log_distributions(hidden, self.weight, mask, **options, positions=true_positions(mask))


class ScalarHead(nn.Module):
    """A linear map from a hidden state to one number, computed in fp32 or better."""

    def __init__(self, width: int, *, deviation: float, seed: int, like: Tensor) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, width, generator=generator) * deviation
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.weight = nn.Parameter(weight.to(device=like.device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, device=like.device, dtype=dtype))

    @classmethod
    def like_output(cls, model: PreTrainedModel, *, deviation: float, seed: int) -> ScalarHead:
        """A head for the model's hidden states, its weights drawn with the given deviation."""
        like = OutputLayer.of(model).weight
        return cls(like.shape[1], deviation=deviation, seed=seed, like=like)

    def forward(self, states: Tensor) -> Tensor:
        """(..., H) -> (...,)."""
        return nn.functional.linear(states.to(self.weight.dtype), self.weight, self.bias)[..., 0]

    def values(self, hidden: Tensor, batch: Sequences) -> Tensor:
        """(B, T) V(tokens before t) on the response mask, 0 elsewhere."""
        mask, positions = batch.response_mask, true_positions(batch.response_mask)
        return scatter_to_mask(self(states_before(hidden, mask, positions)), mask, positions)

    def at_end(self, hidden: Tensor, batch: Sequences) -> Tensor:
        """(B,) read at each row's last real token: the value of all tokens, or the score of an answer."""
        ends = last_index(batch.attention_mask)
        return self(hidden[torch.arange(len(batch), device=hidden.device), ends])


class CpuOffload:
    """Keeps a frozen module's tensors in host memory between its passes, pinned where the device is a GPU.

    The host's copy is never changed, so leaving the device copies nothing. Use it only for modules that share no
    tensors with others.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        assert not any(tensor.requires_grad for tensor in self.tensors), "tensors that are trained cannot be offloaded"
        self.device = next((tensor.device for tensor in self.tensors), torch.device("cpu"))
        self.homes = [_home(tensor) for tensor in self.tensors]
        self._uses = 0
        self._leave()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A context in which the module is on its device; nested contexts copy once."""
        if self._uses == 0:
            for tensor, home in zip(self.tensors, self.homes, strict=True):
                tensor.data = self._brought(home)
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            if self._uses == 0:
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
# What two computations of a layer may differ by, per token: a share of what it changed, and one of what leaves it
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

    def be_exact(self) -> None:
        """From now on run by the exact pass; a ConfigError where that does not compute this model."""
        self.fast.be_exact(self.model)

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
    """Whether a backbone may run by the packed pass: its architecture is supported, and a trial agrees."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.recompute = False
        self.exact = False
        self.captured: Any = None  # graphs of the pass, where it may hold some
        self.backend: Backend | None = None
        self.reason = training_unsupported(model)  # why the model's own modules are run; None where they are not
        if self.reason is not None:
            return
        self.backend = backend_for(model)
        self.reason = self._disagreement(model)
        self.captured = cuda_graphs() if self.backend == "fused" else None

    def be_exact(self, model: PreTrainedModel) -> None:
        """From now on take the exact pass, which has no other way to fall back on."""
        check_exact(model)
        self.exact, self.reason, self.captured = True, None, None

    def look_again(self, model: PreTrainedModel) -> None:
        """After the model's modules were changed: whether the pass still knows them."""
        if self.reason is None:
            self.reason = training_unsupported(model)

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
        """(B, T, H) by the packed pass where it supports this batch, else by the model's own modules.

        The model may have been given another dtype or device since the pass was chosen and tried. Graphs hold what a
        pass keeps from one to the next, which is what running layers again is to save.
        """
        recompute, captured = self.recompute and torch.is_grad_enabled(), None if self.recompute else self.captured
        if self.exact:
            check_exact(model)
            return exact_states(model, batch, lower, wanted, recompute=recompute)
        found = None
        if (
            self.reason is None
            and self.backend is not None
            and self.backend == backend_for(model)
            and training_unsupported(model) is None
        ):
            found = packed_states(
                model, batch, lower, wanted, backend=self.backend, recompute=recompute, captured=captured
            )
        return found if found is not None else hidden_states(model, batch, lower, recompute=recompute)


def check_exact(model: nn.Module) -> None:
    """Raise a ConfigError unless the exact pass computes this model as it is now."""
    reason = exact_unsupported(model)
    if reason is not None:
        raise ConfigError(f"model.numerics is exact, and this model cannot be computed so: {reason}; set it to fast")


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
    raise ConfigError(f"roles.mode: the layers of {type(backbone).__name__} cannot be identified; use separate or lora")


def final_norm_name(backbone: PreTrainedModel) -> str:
    """The attribute that holds the norm after the last layer."""
    for name in FINAL_NORMS:
        if isinstance(getattr(backbone, name, None), nn.Module):
            return name
    raise ConfigError(f"roles.mode: {type(backbone).__name__} has no known final norm; use separate or lora")


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
    """Two short rows, one of them padded, to try the packed pass on."""
    count = 2 * PROBE_LENGTH
    tokens = torch.arange(count, device=backbone.device).reshape(2, -1) % backbone.config.get_text_config().vocab_size
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, 0] = False
    return Sequences(tokens=tokens, attention_mask=mask, response_mask=mask)
