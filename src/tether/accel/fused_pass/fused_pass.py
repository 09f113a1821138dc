"""A whole backbone's pass over packed tokens on a CUDA device, as one node of autograd's graph.

One node, so that the host has little to do and stays ahead of the device. It has no second derivative, and its backward
pass runs once.

Where layers are so small that launching their kernels takes as long as running them, the pass is captured as CUDA
graphs, one forward and one backward, and replayed: same kernels, same numbers, no host. A graph replays kernels on the
very memory it was captured with. So inputs are copied in, what the forward graph keeps stays where the backward graph
reads it, and gradients are summed in buffers that become the parameters' `.grad`. Graphs of one shape of batch are held
at a time: the one that comes again and again. Others run without a graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tether.accel.fused_pass.fused_layer import (
    Kept,
    LayerPlace,
    layer_backward,
    layer_forward,
    norm_backward,
    normed_sum,
)
from tether.accel.fused_pass.gradient_accumulation import (
    BackwardContext,
    Gradients,
    SideStream,
    capture_streams,
    no_garbage_collection,
    watched,
)
from tether.accel.spec import DecoderSpec, Tables
from tether.accel.supported import MAX_WORK
from tether.ops.masks import Packing, Rows

PATIENCE = 4  # passes of another shape in a row until it takes the held one's place


@dataclass
class Trace:
    """What a pass leaves for its backward pass: what each layer kept, or with `recompute` only what entered it."""

    inputs: list[Tensor]  # (N, H) each
    kept: list[Kept]
    added: Tensor | None = None  # what entered the last norm
    inverse: Tensor | None = None


@dataclass(frozen=True)
class PassInputs:
    """What a pass is run on."""

    hidden: Tensor  # (N, H) what enters the first layer
    tables: Tables  # cos and sin, (N, D) each, by rotary table
    packing: Packing
    rows: Rows | None  # the tokens whose states are wanted; None for all

    def places(self, spec: DecoderSpec) -> list[LayerPlace]:
        """Where each layer finds its tokens: the last one goes on with the wanted ones alone."""
        every = {name: LayerPlace(self.packing, None, angles, angles) for name, angles in self.tables.items()}
        places = [every[layer.rotary] for layer in spec.layers]
        if self.rows is not None:
            angles = cos, sin = places[-1].angles
            asked = cos.index_select(0, self.rows.tokens), sin.index_select(0, self.rows.tokens)
            places[-1] = LayerPlace(self.packing, self.rows, angles, asked)
        return places


def forward(spec: DecoderSpec, inputs: PassInputs, *, keep: bool, recompute: bool) -> tuple[Tensor, Trace]:
    """`(states (n, H), trace)`; the trace is empty unless `keep`."""
    trace = Trace([], [])
    hidden, change = inputs.hidden, None
    for layer, place in zip(spec.layers, inputs.places(spec), strict=True):
        change, kept = layer_forward(layer, place, hidden, change)
        hidden = kept.again
        if keep and recompute:
            trace.inputs.append(kept.added)  # rounded as it was normed, so that the layer gives the same bits again
        elif keep:
            trace.kept.append(kept)
        del kept
    assert change is not None
    added, states, inverse = normed_sum(hidden, change, spec.final_norm)
    if keep and spec.final_norm is not None:
        trace.added, trace.inverse = added, inverse
    return states, trace


def backward(
    spec: DecoderSpec,
    inputs: PassInputs,
    trace: Trace,
    grad: Tensor,
    gradients: Gradients,
    *,
    wants_input: bool,
    side: SideStream | None = None,
) -> Tensor | None:
    """(N, H) the gradient of what entered the first layer; the trace is used up."""
    grad, context = grad.contiguous(), BackwardContext(gradients, side or SideStream())
    if spec.final_norm is not None:
        assert trace.added is not None
        grad = norm_backward(spec.final_norm, grad, None, trace.added, trace.inverse, context)
        trace.added = None
    places = inputs.places(spec)
    below: Tensor | None = grad
    for index in reversed(range(len(spec.layers))):
        layer, place = spec.layers[index], places[index]
        kept = layer_forward(layer, place, trace.inputs.pop(), None)[1] if trace.inputs else trace.kept.pop()
        below = layer_backward(layer, place, kept, grad, grad, context, wants_input=index > 0 or wants_input)
        del kept
        context.side.next_layer()
        if below is None:
            break
        grad = below
    context.side.join()
    return below


def run(spec: DecoderSpec, inputs: PassInputs, *, recompute: bool, captured: Any = None) -> Tensor:
    """(n, H) the states of the tokens that are wanted, after all layers and the last norm.

    `captured`, a `CudaGraphs`, replays what it holds of such a pass.
    """
    trained = spec.trained()
    keeps = torch.is_grad_enabled() and (bool(trained) or inputs.hidden.requires_grad)
    if captured is not None and not recompute and captured.ready(spec, inputs, trained):
        if not keeps:
            return captured.forward(inputs).clone()
        return _apply(_Replayed, inputs.hidden, captured, inputs, trained, *trained)
    if not keeps:
        return forward(spec, inputs, keep=False, recompute=False)[0]
    return _apply(_Pass, inputs.hidden, spec, inputs, recompute, trained, *trained)


def _apply(function: Any, *arguments: Any) -> Tensor:
    return cast("Callable[..., Tensor]", function.apply)(*arguments)


class _Pass(torch.autograd.Function):
    """The pass as it is."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        spec: DecoderSpec,
        inputs: PassInputs,
        recompute: bool,
        trained: Sequence[Tensor],
        *_: Tensor,
    ) -> Tensor:
        del hidden  # it is the inputs' own, an argument so that autograd sees it
        states, ctx.trace = forward(spec, inputs, keep=True, recompute=recompute)
        ctx.spec, ctx.inputs, ctx.trained = spec, inputs, trained
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        trace, ctx.trace = ctx.trace, None
        if trace is None:
            raise RuntimeError("a packed pass keeps nothing after its backward pass: run it again")
        gradients = Gradients(ctx.trained)
        found = backward(ctx.spec, ctx.inputs, trace, grad, gradients, wants_input=ctx.needs_input_grad[0])
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


class CudaGraphs:
    """The graphs of one backbone, for one shape of batch."""

    def __init__(self) -> None:
        self.turn = 0  # counts forward passes: what is kept belongs to the last
        self.captures = 0
        self._key: Any = None
        self._next: tuple[Any, int] = (None, 0)  # another shape that was asked for, and how often in a row
        self._held: _Held | None = None

    def ready(self, spec: DecoderSpec, inputs: PassInputs, trained: Sequence[Tensor]) -> bool:
        """Whether this pass can be replayed; a shape that keeps coming is captured first."""
        first = spec.layers[0]
        weights = [part.weight for part in (first.query, first.output, first.gate, first.up)]
        size = 2 * sum(weight.numel() for weight in weights if weight is not None)
        if inputs.hidden.device.type != "cuda" or size * len(inputs.hidden) > MAX_WORK or any(map(watched, trained)):
            return False
        addresses = tuple(tensor.data_ptr() for tensor in _tensors(spec))
        key = (_shape(inputs), addresses, len(trained), _keeps(inputs, trained))
        if self._held is not None and key == self._key:
            self._next = (None, 0)
            return True
        seen = self._next[1] + 1 if self._next[0] == key else 1
        self._next = (key, seen)
        if seen <= (PATIENCE if self._held is not None else 1):
            return False
        self.release()
        self._held = _Held(spec, inputs, trained)
        self._key, self._next = key, (None, 0)
        self.captures += 1
        return True

    def release(self) -> None:
        """Let the graphs and all they hold go."""
        self._held, self._key = None, None

    def forward(self, inputs: PassInputs) -> Tensor:
        """(n, H) states, in memory that the next pass overwrites."""
        assert self._held is not None
        self.turn += 1
        return self._held.forward(inputs)

    def backward(self, grad: Tensor, *, wants_input: bool) -> Tensor | None:
        """The gradient of what entered, likewise; the trained tensors' own are added to their `.grad`."""
        assert self._held is not None
        return self._held.backward(grad, wants_input)


class _Held:
    """Graphs, and the memory they work on."""

    def __init__(self, spec: DecoderSpec, inputs: PassInputs, trained: Sequence[Tensor]) -> None:
        self.spec, self.trained = spec, list(trained)
        self.inputs = _map(inputs, torch.clone)
        self.pool = torch.cuda.graph_pool_handle()
        self.buffers = [torch.zeros_like(tensor) for tensor in trained]
        self.states, self.trace, self.grad_states, self.grad_input = None, None, None, None
        self.forward_graph = torch.cuda.CUDAGraph()
        captured = torch.cuda.graph(self.forward_graph, pool=self.pool, capture_error_mode="thread_local")
        with torch.no_grad(), no_garbage_collection(), captured:
            keep = _keeps(inputs, trained)
            self.states, self.trace = forward(spec, self.inputs, keep=keep, recompute=False)
        self.backward_graph: torch.cuda.CUDAGraph | None = None
        self.with_input = False

    def forward(self, inputs: PassInputs) -> Tensor:
        for ours, theirs in zip(_columns(self.inputs), _columns(inputs), strict=True):
            ours.copy_(theirs.detach())
        self.forward_graph.replay()
        assert self.states is not None
        return self.states

    def backward(self, grad: Tensor, wants_input: bool) -> Tensor | None:
        self._take_buffers()
        if self.backward_graph is None or (wants_input and not self.with_input):
            self._capture_backward(grad, wants_input)
        assert self.grad_states is not None and self.backward_graph is not None
        self.grad_states.copy_(grad)
        self.backward_graph.replay()
        return self.grad_input

    def _take_buffers(self) -> None:
        """Make the buffers the tensors' `.grad`, with what was gathered there so far."""
        fresh: list[Tensor] = []
        for tensor, buffer in zip(self.trained, self.buffers, strict=True):
            if tensor.grad is None:
                fresh.append(buffer)
            elif tensor.grad is not buffer:
                buffer.copy_(tensor.grad)
            tensor.grad = buffer
        if fresh:
            zero_all: Any = torch._foreach_zero_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            zero_all(fresh)

    def _capture_backward(self, grad: Tensor, wants_input: bool) -> None:
        assert self.trace is not None
        self.grad_states = grad.clone()
        graph = torch.cuda.CUDAGraph()
        trace = Trace([], list(self.trace.kept), self.trace.added, self.trace.inverse)
        chain, side = capture_streams(grad.device)
        captured = torch.cuda.graph(graph, pool=self.pool, stream=chain, capture_error_mode="thread_local")
        with torch.no_grad(), no_garbage_collection(), captured:
            self.grad_input = backward(
                self.spec,
                self.inputs,
                trace,
                self.grad_states,
                Gradients(self.trained),
                wants_input=wants_input,
                side=SideStream(side),
            )
        self.backward_graph, self.with_input = graph, wants_input  # now that all of it is captured


def _keeps(inputs: PassInputs, trained: Sequence[Tensor]) -> bool:
    """Whether a graph keeps what its backward pass needs; one that does serves passes without a gradient too."""
    return bool(trained) or inputs.hidden.requires_grad


def _shape(inputs: PassInputs) -> tuple[Any, ...]:
    """All of a batch that a captured kernel was launched with."""
    packing, rows = inputs.packing, inputs.rows
    asked = None if rows is None else (len(rows.tokens), rows.most, rows.starts is None)
    return len(inputs.hidden), len(packing.starts), packing.longest, asked


def _tensors(spec: DecoderSpec) -> list[Tensor]:
    own = [] if spec.final_norm is None else [spec.final_norm.weight]
    return own + [tensor for layer in spec.layers for tensor in layer.tensors()]


def _columns(inputs: PassInputs) -> list[Tensor]:
    """The tensors of a pass's inputs that its kernels read."""
    rows = inputs.rows
    asked = [] if rows is None else [rows.tokens, *([] if rows.starts is None else [rows.starts])]
    angles = [table for pair in inputs.tables.values() for table in pair]
    return [inputs.hidden, *angles, inputs.packing.starts, *asked]


def _map(inputs: PassInputs, change: Any) -> PassInputs:
    """Inputs whose columns are changed."""
    rows = inputs.rows
    if rows is not None:
        starts = None if rows.starts is None else change(rows.starts)
        rows = dataclasses.replace(rows, tokens=change(rows.tokens), starts=starts)
    packing = dataclasses.replace(inputs.packing, starts=change(inputs.packing.starts))
    hidden = change(inputs.hidden.detach())
    tables = {name: (change(cos), change(sin)) for name, (cos, sin) in inputs.tables.items()}
    return PassInputs(hidden, tables, packing, rows)
