"""A whole backbone's pass over packed tokens on a CUDA device, as one node of autograd's graph.

One node, so that the host has little to do and stays ahead of the device. Where layers are so small that it would not,
the pass is captured as CUDA graphs, one forward and one backward, and replayed (`cuda_graphs.py`): same kernels, same
numbers, no host. The node has no second derivative, and can be gone back through once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tether.accel.fused_pass.fused_layer import (
    BackwardContext,
    FusedLayer,
    FusedNorm,
    Kept,
    LayerPlace,
    layer_backward,
    layer_forward,
    norm_backward,
)
from tether.accel.fused_pass.fused_ops import add_norm
from tether.accel.fused_pass.side_stream import Aside
from tether.accel.gradient_accumulation import Gradients
from tether.ops.masks import Packing, Rows


@dataclass(frozen=True)
class Layers:
    """A backbone's layers and its last norm, in which order they are run."""

    layers: tuple[FusedLayer, ...]
    final: FusedNorm | None  # None in a backbone that is cut off below its norm

    @classmethod
    def of(cls, backbone: Any) -> Layers | None:
        """None where one of its layers may do more than is known here."""
        found = [FusedLayer.of(layer) for layer in backbone.layers]
        if not found or any(layer is None for layer in found):
            return None
        final = None if isinstance(backbone.norm, nn.Identity) else FusedNorm.of(backbone.norm)
        return cls(cast("tuple[FusedLayer, ...]", tuple(found)), final)

    def trained(self) -> list[Tensor]:
        """The tensors that a gradient goes to."""
        own = [] if self.final is None or not self.final.weight.requires_grad else [self.final.weight]
        return own + [tensor for layer in self.layers for tensor in layer.trained()]


@dataclass
class Trace:
    """What a pass leaves for its way back: of each layer what it kept, or with `recompute` only what entered it."""

    inputs: list[Tensor]  # (N, H) each
    kept: list[Kept]
    added: Tensor | None = None  # what entered the last norm
    inverse: Tensor | None = None


@dataclass(frozen=True)
class PassInputs:
    """What a pass is run on."""

    hidden: Tensor  # (N, H) what enters the first layer
    cos: Tensor  # (N, D)
    sin: Tensor
    packing: Packing
    rows: Rows | None  # the tokens whose states are wanted; None for all

    def places(self, count: int) -> list[LayerPlace]:
        """Where each of `count` layers finds its tokens: the last one goes on with the wanted ones alone."""
        angles = self.cos, self.sin
        every = LayerPlace(self.packing, None, angles, angles)
        if self.rows is None:
            return [every] * count
        tokens = self.rows.tokens
        asked = self.cos.index_select(0, tokens), self.sin.index_select(0, tokens)
        return [*[every] * (count - 1), LayerPlace(self.packing, self.rows, angles, asked)]


def forward(layers: Layers, inputs: PassInputs, *, keep: bool, recompute: bool) -> tuple[Tensor, Trace]:
    """`(states (n, H), trace)`; the trace is empty unless `keep`."""
    trace = Trace([], [])
    hidden, change = inputs.hidden, None
    for layer, place in zip(layers.layers, inputs.places(len(layers.layers)), strict=True):
        change, kept = layer_forward(layer, place, hidden, change)
        hidden = kept.again
        if keep and recompute:
            trace.inputs.append(kept.added)  # rounded as it was normed, so that the layer gives the same bits again
        elif keep:
            trace.kept.append(kept)
        del kept
    assert change is not None
    if layers.final is None:
        return hidden + change, trace
    added, states, inverse = add_norm(hidden, change, layers.final.weight, layers.final.epsilon)
    if keep:
        trace.added, trace.inverse = added, inverse
    return states, trace


def backward(
    layers: Layers,
    inputs: PassInputs,
    trace: Trace,
    grad: Tensor,
    gradients: Gradients,
    *,
    wants_input: bool,
    aside: Aside | None = None,
) -> Tensor | None:
    """(N, H) the gradient of what entered the first layer; the trace is used up on the way."""
    grad, way = grad.contiguous(), BackwardContext(gradients, aside or Aside())
    if layers.final is not None:
        assert trace.added is not None and trace.inverse is not None
        grad = norm_backward(layers.final, grad, None, trace.added, trace.inverse, way)
        trace.added = None
    places = inputs.places(len(layers.layers))
    below: Tensor | None = grad
    for index in reversed(range(len(layers.layers))):
        layer, place = layers.layers[index], places[index]
        kept = layer_forward(layer, place, trace.inputs.pop(), None)[1] if trace.inputs else trace.kept.pop()
        below = layer_backward(layer, place, kept, grad, grad, way, wants_input=index > 0 or wants_input)
        del kept
        way.aside.next_layer()
        if below is None:
            break
        grad = below
    way.aside.join()
    return below


def run(layers: Layers, inputs: PassInputs, *, recompute: bool, captured: Any = None) -> Tensor:
    """(n, H) the states of the tokens that are wanted, after all layers and the last norm.

    `captured`, a `CudaGraphs`, replays what it holds of such a pass.
    """
    trained = layers.trained()
    keeps = torch.is_grad_enabled() and (bool(trained) or inputs.hidden.requires_grad)
    if captured is not None and not recompute and captured.ready(layers, inputs, trained):
        if not keeps:
            return captured.forward(inputs).clone()
        return _apply(_Replayed, inputs.hidden, captured, inputs, trained, *trained)
    if not keeps:
        return forward(layers, inputs, keep=False, recompute=False)[0]
    return _apply(_Pass, inputs.hidden, layers, inputs, recompute, trained, *trained)


def _apply(function: Any, *arguments: Any) -> Tensor:
    return cast("Callable[..., Tensor]", function.apply)(*arguments)


class _Pass(torch.autograd.Function):
    """The pass as it is."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        layers: Layers,
        inputs: PassInputs,
        recompute: bool,
        trained: Sequence[Tensor],
        *_: Tensor,
    ) -> Tensor:
        del hidden  # it is the inputs' own, given apart so that autograd sees it
        states, ctx.trace = forward(layers, inputs, keep=True, recompute=recompute)
        ctx.layers, ctx.inputs, ctx.trained = layers, inputs, trained
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        trace, ctx.trace = ctx.trace, None
        if trace is None:
            raise RuntimeError("a packed pass keeps nothing after its way back: run it again")
        gradients = Gradients(ctx.trained)
        found = backward(ctx.layers, ctx.inputs, trace, grad, gradients, wants_input=ctx.needs_input_grad[0])
        return found if ctx.needs_input_grad[0] else None, None, None, None, None, *gradients.returned()


class _Replayed(torch.autograd.Function):
    """The pass by captured graphs."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, captured: Any, inputs: PassInputs, trained: Sequence[Tensor], *_: Tensor
    ) -> Tensor:
        del hidden
        states = captured.forward(inputs).clone()
        ctx.captured, ctx.inputs, ctx.turn, ctx.count = captured, inputs, captured.turn, len(trained)
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        wants_input = ctx.needs_input_grad[0]
        if ctx.captured.turn != ctx.turn:  # another batch went through since: what it kept is made again
            ctx.captured.forward(ctx.inputs)
        found = ctx.captured.backward(grad, wants_input=wants_input)
        return found.clone() if wants_input and found is not None else None, *[None] * (3 + ctx.count)
