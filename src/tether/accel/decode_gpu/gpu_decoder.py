"""Decode steps over the slots of a GPU: computed directly, or captured once and replayed as a graph.

Everything a step reads and writes stays at one address: the model's parameters, the cache, the slots' state, the work
space. So a captured step stays right while the parameters are updated in place, and one step is one launch.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch

from tether.accel.backend import kernel_kind
from tether.accel.decode_gpu.prefill import read_prompts
from tether.accel.decode_gpu.slot_state import Cache, SlotState, StepWorkspace, on_device
from tether.accel.decode_gpu.step_layers import StepBackbone, fingerprint
from tether.accel.fused_pass.side_stream import capture_streams
from tether.protocols import Sampling

KERNELS = {"triton": "tether.accel.decode_gpu.fused_step", "torch": "tether.accel.decode_gpu.reference_step"}
STEPS_ASIDE = 2  # run before a capture, so that kernels are compiled and libraries have their work space


class GpuDecoder:
    """A model's decode steps over fixed slots; `supported.py` says which models it is right for."""

    def __init__(self, model: Any, slots: int, length: int, room: int, *, kernels: Any = None) -> None:
        """Room for `slots` sequences of `length` tokens, of which at most `room` are drawn."""
        self.model = model
        self.slots, self.length, self.room = slots, length, room
        self.backbone = StepBackbone(model, length)
        self.device = self.backbone.device
        self.kernels = kernels or importlib.import_module(KERNELS[kernel_kind(self.device, self.backbone.dtype)])
        self.cache = Cache(self.backbone, slots, length)
        self.state = SlotState(slots, room, self.backbone.vocabulary, self.device)
        self.work = StepWorkspace(self.backbone, slots)
        self.made_for = fingerprint(model)
        self.graphs: dict[tuple[int, str], torch.cuda.CUDAGraph] = {}
        self.capture_seconds = 0.0
        # One for all decoders of a device: libraries keep work space for every stream that they were called on.
        self.side = capture_streams(self.device)[1] if self.device.type == "cuda" else None
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    @property
    def captures(self) -> int:
        """How many steps have been captured."""
        return len(self.graphs)

    def serves(self, length: int, room: int) -> bool:
        """Whether this decoder, as it was made, is right for such sequences of the same model now."""
        return length <= self.length and room <= self.room and self.made_for == fingerprint(self.model)

    def sample_by(self, sampling: Sampling, stops: set[int]) -> None:
        """Draw by these settings from now on; every slot is idle."""
        state = self.state
        known = [id for id in stops if 0 <= id < len(state.stops)]
        state.stops.zero_()
        state.stops[on_device(known, self.device)] = True
        state.temperature.fill_(sampling.temperature or 1.0)
        state.top_k.fill_(sampling.top_k or self.backbone.vocabulary)
        state.top_p.fill_(sampling.top_p)
        state.live.zero_()

    def prefill(self, prompts: list[list[int]], slots: list[int]) -> None:
        """Read `prompts[i]` into slot `slots[i]`."""
        read_prompts(self.kernels, self.backbone, self.cache, prompts, slots)

    def advance(self, n: int, sampling: Sampling, steps: int) -> None:
        """Step the slots 0 to n - 1 this many times: each live one draws a token a step. Nothing is waited for."""
        if self.device.type != "cuda":
            for _ in range(steps):
                self.step(n, sampling)
            return
        graph = self._graph(n, sampling)
        for _ in range(steps):
            graph.replay()

    def step(self, n: int, sampling: Sampling) -> None:
        """One token in each of the slots 0 to n - 1, its logits, and the draw from them."""
        self.logits(n)
        self.kernels.draw(self.work, n, self.state, sampling)

    def logits(self, n: int) -> None:
        """`work.logits[:n]` after one more token in each of the slots 0 to n - 1: `state.tokens` at `state.columns`."""
        kernels, work, state, backbone = self.kernels, self.work, self.state, self.backbone
        following = [layer.before_attention for layer in backbone.layers[1:]] + [backbone.norm]
        kernels.embed(work, n, backbone, state, backbone.layers[0].before_attention)
        for index, (layer, norm) in enumerate(zip(backbone.layers, following, strict=True)):
            kernels.project(work, n, layer, backbone, state, self.cache, index)
            kernels.attend(work, n, layer, backbone, state, self.cache, index)
            parts = kernels.linear(work, n, layer.output, work.mixed)
            kernels.add_norm(work, n, parts, layer.after_attention, layer.before_mlp)
            kernels.gated(work, n, layer)
            parts = kernels.linear(work, n, layer.down, work.inner)
            kernels.add_norm(work, n, parts, layer.after_mlp, norm)
        kernels.logits(work, n, backbone)

    def _graph(self, n: int, sampling: Sampling) -> torch.cuda.CUDAGraph:
        """The captured step for n slots; what a kind of sampling is told beyond its kind is read from the state."""
        truncated = bool(sampling.top_k) or sampling.top_p < 1.0
        kind = "greedy" if sampling.temperature == 0.0 else "truncated" if truncated else "whole"
        if (n, kind) not in self.graphs:
            began = time.perf_counter()
            self.graphs[n, kind] = self._capture(n, sampling)
            self.capture_seconds += time.perf_counter() - began
        return self.graphs[n, kind]

    def _capture(self, n: int, sampling: Sampling) -> torch.cuda.CUDAGraph:
        """Slots are idle meanwhile, so the steps aside change no sequence: they write what will be written again."""
        assert self.side is not None
        live = self.state.live.clone()
        self.state.live.zero_()
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.side):
            for _ in range(STEPS_ASIDE):
                self.step(n, sampling)
            self.side.synchronize()
            graph.capture_begin(pool=self.pool)
            try:
                self.step(n, sampling)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(self.side)
        self.state.live.copy_(live)
        return graph
