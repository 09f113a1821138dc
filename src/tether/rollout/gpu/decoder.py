"""Decode steps over the slots of a GPU: computed directly, or captured once and replayed as a graph.

Everything a step reads and writes stays at one address: the model's parameters, the cache, the slots' state, the work
space. So a captured step stays right while the parameters are updated in place, and one step is one launch.
"""

from __future__ import annotations

from typing import Any

import torch

from tether.protocols import Sampling
from tether.rollout.gpu import reference
from tether.rollout.gpu.layers import Trunk, storages
from tether.rollout.gpu.prefill import read_prompts
from tether.rollout.gpu.state import Cache, SlotState, Workspace

STEPS_ASIDE = 2  # run before a capture, so that kernels are compiled and libraries have their work space
FREE_SHARE = 0.8  # of the free memory, for the cache; the rest is for reading prompts
Mode = tuple[float, int, float]


def kernels_for(device: torch.device, dtype: torch.dtype) -> Any:
    """The one place where kernels are chosen: Triton's on a CUDA device that has it, else plain torch."""
    if device.type != "cuda" or dtype == torch.float64:
        return reference
    try:
        from tether.rollout.gpu import fused
    except ImportError:  # torch for this platform comes without Triton
        return reference
    return fused


def slots_that_fit(model: Any, slots: int, length: int, free: int) -> int:
    """How many of `slots` slots of `length` tokens have their cache within a share of `free` bytes; at least 1."""
    config = model.config
    heads = config.num_key_value_heads * model.model.layers[0].self_attn.head_dim
    each = 2 * config.num_hidden_layers * heads * length * model.lm_head.weight.element_size()
    return max(1, min(slots, int(FREE_SHARE * free) // each))


def free_memory(device: torch.device) -> int:
    """Bytes of the device that nobody holds, and those that torch holds and does not use."""
    if device.type != "cuda":
        return 1 << 62
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + idle


class GpuDecoder:
    """A model's decode steps over fixed slots; `supported.py` says which models it is right for."""

    def __init__(
        self, model: Any, slots: int, length: int, room: int, *, kernels: Any = None, at_limit: bool = False
    ) -> None:
        """Room for `slots` sequences of `length` tokens, of which at most `room` are drawn.

        `at_limit` says that more slots do not fit the device's memory.
        """
        self.model = model
        self.at_limit = at_limit
        self.slots, self.length, self.room = slots, length, room
        self.trunk = Trunk(model, length)
        self.device = self.trunk.device
        self.kernels = kernels or kernels_for(self.device, self.trunk.dtype)
        self.cache = Cache(self.trunk, slots, length)
        self.state = SlotState(slots, room, self.trunk.vocabulary, self.device)
        self.work = Workspace(self.trunk, slots)
        self.storages = storages(model)
        self.graphs: dict[tuple[int, Mode], torch.cuda.CUDAGraph] = {}
        self.captures = 0

    def serves(self, slots: int, length: int, room: int) -> bool:
        """Whether this decoder, as it was made, is right for such a request to the same model now."""
        fits = (slots <= self.slots or self.at_limit) and length <= self.length and room <= self.room
        return fits and self.storages == storages(self.model)

    def prefill(self, prompts: list[list[int]], slots: list[int]) -> None:
        """Read `prompts[i]` into slot `slots[i]`."""
        read_prompts(self.trunk, self.cache, prompts, slots)

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
        kernels, work, state, trunk = self.kernels, self.work, self.state, self.trunk
        work.hidden[:n].copy_(trunk.embedding(state.tokens[:n]))
        parts = None
        for index, layer in enumerate(trunk.layers):
            kernels.add_norm(work, n, parts, layer.before_attention, layer.epsilon)
            kernels.project(work, n, layer, trunk, state, self.cache, index)
            kernels.attend(work, n, trunk, state, self.cache, index)
            parts = kernels.linear(work, n, layer.output, work.mixed)
            kernels.add_norm(work, n, parts, layer.before_mlp, layer.epsilon)
            kernels.gated(work, n, layer)
            parts = kernels.linear(work, n, layer.down, work.inner)
        kernels.add_norm(work, n, parts, trunk.norm, trunk.epsilon)
        kernels.logits(work, n, trunk)

    def _graph(self, n: int, sampling: Sampling) -> torch.cuda.CUDAGraph:
        """The captured step for n slots; temperature is read from the state, unless the distribution is truncated."""
        whole = sampling.temperature > 0.0 and not sampling.top_k and sampling.top_p >= 1.0
        mode = (1.0, 0, 1.0) if whole else (sampling.temperature, sampling.top_k, sampling.top_p)
        if (n, mode) not in self.graphs:
            self.graphs[n, mode] = self._capture(n, sampling)
        return self.graphs[n, mode]

    def _capture(self, n: int, sampling: Sampling) -> torch.cuda.CUDAGraph:
        """Slots are idle meanwhile, so the steps aside change no sequence: they write what will be written again."""
        live = self.state.live.clone()
        self.state.live.zero_()
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            for _ in range(STEPS_ASIDE):
                self.step(n, sampling)
            side.synchronize()
            graph.capture_begin()
            try:
                self.step(n, sampling)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.state.live.copy_(live)
        self.captures += 1
        return graph
