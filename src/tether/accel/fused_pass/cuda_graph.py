"""A backbone's pass as CUDA graphs, for layers so small that launching their kernels takes as long as running them.

A graph replays kernels on the very memory it was captured with. So inputs are copied in, what the forward graph keeps
stays where the backward graph reads it, and gradients are summed in buffers that become the parameters' `.grad`. One
shape of batch is held at a time: the one that comes again and again. Others run without a graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tether.accel.fused_pass import fused_pass
from tether.accel.fused_pass.fused_pass import Layers, PassInputs, Trace
from tether.accel.fused_pass.packed import MAX_WORK
from tether.accel.fused_pass.side_stream import Aside, capture_streams
from tether.accel.gradient_accumulation import Gradients, watched

PATIENCE = 4  # passes of another shape in a row until it takes the held one's place


class CudaGraphs:
    """The graphs of one backbone, for one shape of batch."""

    def __init__(self) -> None:
        self.turn = 0  # counts forward passes: what is kept belongs to the last
        self.captures = 0
        self._key: Any = None
        self._next: tuple[Any, int] = (None, 0)  # another shape that was asked for, and how often in a row
        self._held: _Held | None = None

    def ready(self, layers: Layers, inputs: PassInputs, trained: Sequence[Tensor]) -> bool:
        """Whether this pass can be replayed; a shape that keeps coming is captured on the way."""
        weights = layers.layers[0]
        size = sum(part.weight.numel() for part in (weights.query, weights.output, weights.gate, weights.up)) * 2
        if inputs.hidden.device.type != "cuda" or size * len(inputs.hidden) > MAX_WORK or any(map(watched, trained)):
            return False
        addresses = tuple(tensor.data_ptr() for tensor in _tensors(layers))
        key = (_shape(inputs), addresses, len(trained), _keeps(inputs, trained))
        if self._held is not None and key == self._key:
            self._next = (None, 0)
            return True
        seen = self._next[1] + 1 if self._next[0] == key else 1
        self._next = (key, seen)
        if seen <= (PATIENCE if self._held is not None else 1):
            return False
        self.release()
        self._held = _Held(layers, inputs, trained)
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

    def __init__(self, layers: Layers, inputs: PassInputs, trained: Sequence[Tensor]) -> None:
        self.layers, self.trained = layers, list(trained)
        self.inputs = _map(inputs, torch.clone)
        self.pool = torch.cuda.graph_pool_handle()
        self.buffers = [torch.zeros_like(tensor) for tensor in trained]
        self.states, self.trace, self.grad_states, self.grad_input = None, None, None, None
        self.there = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.there, pool=self.pool, capture_error_mode="thread_local"):
            keep = _keeps(inputs, trained)
            self.states, self.trace = fused_pass.forward(layers, self.inputs, keep=keep, recompute=False)
        self.back: torch.cuda.CUDAGraph | None = None
        self.with_input = False

    def forward(self, inputs: PassInputs) -> Tensor:
        for ours, theirs in zip(_columns(self.inputs), _columns(inputs), strict=True):
            ours.copy_(theirs.detach())
        self.there.replay()
        assert self.states is not None
        return self.states

    def backward(self, grad: Tensor, wants_input: bool) -> Tensor | None:
        self._take_buffers()
        if self.back is None or (wants_input and not self.with_input):
            self._capture_back(grad, wants_input)
        assert self.grad_states is not None and self.back is not None
        self.grad_states.copy_(grad)
        self.back.replay()
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

    def _capture_back(self, grad: Tensor, wants_input: bool) -> None:
        assert self.trace is not None
        self.grad_states = grad.clone()
        back = torch.cuda.CUDAGraph()
        trace = Trace([], list(self.trace.kept), self.trace.added, self.trace.inverse)
        chain, side = capture_streams(grad.device)
        captured = torch.cuda.graph(back, pool=self.pool, stream=chain, capture_error_mode="thread_local")
        with torch.no_grad(), captured:
            self.grad_input = fused_pass.backward(
                self.layers,
                self.inputs,
                trace,
                self.grad_states,
                Gradients(self.trained),
                wants_input=wants_input,
                aside=Aside(side),
            )
        self.back, self.with_input = back, wants_input  # now that all of it is captured


def _keeps(inputs: PassInputs, trained: Sequence[Tensor]) -> bool:
    """Whether a graph leaves what its way back needs; one that does serves passes without a gradient too."""
    return bool(trained) or inputs.hidden.requires_grad


def _shape(inputs: PassInputs) -> tuple[Any, ...]:
    """All of a batch that a captured kernel was launched with."""
    packing, rows = inputs.packing, inputs.rows
    asked = None if rows is None else (len(rows.tokens), rows.most, rows.starts is None)
    return len(inputs.hidden), len(packing.starts), packing.longest, asked


def _tensors(layers: Layers) -> list[Tensor]:
    found = [tensor for layer in layers.layers for part in _parts(layer) for tensor in part.tensors()]
    norms = [norm for layer in layers.layers for norm in _norms(layer)] + [layers.final]
    return found + [norm.weight for norm in norms if norm is not None]


def _parts(layer: Any) -> tuple[Any, ...]:
    return layer.query, layer.key, layer.value, layer.output, layer.gate, layer.up, layer.down


def _norms(layer: Any) -> tuple[Any, ...]:
    return layer.before_attention, layer.before_mlp, layer.query_norm, layer.key_norm


def _columns(inputs: PassInputs) -> list[Tensor]:
    """The tensors of a pass's inputs that its kernels read."""
    rows = inputs.rows
    asked = [] if rows is None else [rows.tokens, *([] if rows.starts is None else [rows.starts])]
    return [inputs.hidden, inputs.cos, inputs.sin, inputs.packing.starts, *asked]


def _map(inputs: PassInputs, change: Any) -> PassInputs:
    """Inputs whose columns are changed."""
    rows = inputs.rows
    if rows is not None:
        starts = None if rows.starts is None else change(rows.starts)
        rows = dataclasses.replace(rows, tokens=change(rows.tokens), starts=starts)
    packing = dataclasses.replace(inputs.packing, starts=change(inputs.packing.starts))
    hidden = change(inputs.hidden.detach())
    return PassInputs(hidden, change(inputs.cos), change(inputs.sin), packing, rows)
