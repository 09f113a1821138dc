"""A decoder on a GPU: steps over its slots, computed directly or captured and replayed, and the batch that fills them.

Everything a step reads and writes stays at one address: the model's parameters, the cache, the slots' state, the work
space. So a captured step stays right while the parameters are updated in place, and one step is one launch.
"""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tether.accel.cached_attention import causal_attention
from tether.accel.decode_gpu.slots import (
    FREE_SHARE,
    Cache,
    SlotState,
    StepWorkspace,
    free_memory,
    on_device,
    slot_bytes,
    slots_that_fit,
)
from tether.accel.fused_pass.gradient_accumulation import capture_streams, no_garbage_collection
from tether.accel.spec import DecoderSpec, fingerprint
from tether.accel.supported import decode_kernels
from tether.ops.sampling import Draw
from tether.protocols import Sampling

KERNELS = {"triton": "tether.accel.decode_gpu.fused_step", "torch": "tether.accel.decode_gpu.plain_step"}
WARM_UP_STEPS = 2  # run before a capture, so that kernels are compiled and libraries have their work space
PREFILL_TOKENS = 16384  # read in one pass, padding counted, unless a single prompt is longer
MAX_SLOTS = 1024  # by default: a step over more is no cheaper by the token
LENGTH_UNIT = 128  # a cache's length is a multiple of this, so that calls of like length share one


class GpuDecoder:
    """A model's decode steps over fixed slots."""

    def __init__(self, model: Any, slots: int, length: int, room: int, *, kernels: Any = None) -> None:
        """Room for `slots` sequences of `length` tokens, of which at most `room` are drawn."""
        self.model = model
        self.slots, self.length, self.room = slots, length, room
        self.spec = spec = DecoderSpec.from_model(model).detached()
        self.device = spec.device
        self.kernels = kernels or importlib.import_module(KERNELS[decode_kernels(spec.device, spec.dtype)])
        self.cache = Cache(spec, slots, length)
        self.state = SlotState(slots, room, spec.vocabulary, spec.device)
        self.work = StepWorkspace(spec, slots)
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
        state.top_k.fill_(sampling.top_k or self.spec.vocabulary)
        state.top_p.fill_(sampling.top_p)
        state.live.zero_()

    def prefill(self, prompts: list[list[int]], slots: list[int]) -> None:
        """Read `prompts[i]` into slot `slots[i]`."""
        read_prompts(self.kernels, self.spec, self.cache, prompts, slots)

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
        kernels, work, state, spec = self.kernels, self.work, self.state, self.spec
        following = [layer.before_attention for layer in spec.layers[1:]] + [spec.final_norm]
        kernels.embed(work, n, spec, state, spec.layers[0].before_attention)
        for index, (layer, norm) in enumerate(zip(spec.layers, following, strict=True)):
            kernels.project(work, n, layer, spec, state, self.cache, index)
            kernels.attend(work, n, layer, spec, state, self.cache, index)
            parts = kernels.linear(work, n, layer.output, work.mixed)
            kernels.add_norm(work, n, parts, layer.after_attention, layer.before_mlp)
            kernels.gated(work, n, layer)
            parts = kernels.linear(work, n, layer.down, work.inner)
            kernels.add_norm(work, n, parts, layer.after_mlp, norm)
        kernels.logits(work, n, spec)

    def _graph(self, n: int, sampling: Sampling) -> torch.cuda.CUDAGraph:
        """The captured step for n slots and a kind of sampling, whose settings it reads from the state."""
        truncated = bool(sampling.top_k) or sampling.top_p < 1.0
        kind = "greedy" if sampling.temperature == 0.0 else "truncated" if truncated else "whole"
        if (n, kind) not in self.graphs:
            began = time.perf_counter()
            self.graphs[n, kind] = self._capture(n, sampling)
            self.capture_seconds += time.perf_counter() - began
        return self.graphs[n, kind]

    def _capture(self, n: int, sampling: Sampling) -> torch.cuda.CUDAGraph:
        """Slots are idle meanwhile, so warm-up steps change no sequence: they write what will be written again."""
        assert self.side is not None
        live = self.state.live.clone()
        self.state.live.zero_()
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.side):
            for _ in range(WARM_UP_STEPS):
                self.step(n, sampling)
            self.side.synchronize()
            with no_garbage_collection():
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    self.step(n, sampling)
                finally:
                    graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(self.side)
        self.state.live.copy_(live)
        return graph


def read_prompts(kernels: Any, spec: DecoderSpec, cache: Cache, prompts: list[list[int]], slots: list[int]) -> None:
    """Put keys and values of `prompts[i]` into slot `slots[i]`, in passes of bounded size, like lengths together."""
    order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
    while order:
        fit = max(1, PREFILL_TOKENS // len(prompts[order[0]]))
        batch, order = order[:fit], order[fit:]
        _read(kernels, spec, cache, [prompts[place] for place in batch], [slots[place] for place in batch])


def _read(kernels: Any, spec: DecoderSpec, cache: Cache, prompts: list[list[int]], slots: list[int]) -> None:
    """Read prompts padded on the right, in one pass that ends at the last layer's keys and values, without logits.

    What lies past a shorter prompt's end is overwritten before it is read, and causality hides it until then. What a
    part adds to the hidden states is handed on by itself, for the next norm to add it as it reads them.
    """
    longest, width = max(map(len, prompts)), spec.head_dim
    padded = on_device([ids + [0] * (longest - len(ids)) for ids in prompts], spec.device)
    places = on_device(slots, spec.device)
    tables = kernels.angles_pass(cache.angles, len(prompts), longest)
    hidden, change, after = spec.embedding(padded), None, None  # (prompts, longest, H)
    for index, layer in enumerate(spec.layers):
        angles = tables[layer.rotary]
        hidden, normed = kernels.add_norm_pass(hidden, change, after, layer.before_attention)
        key = kernels.heads_pass(layer.key, layer.key_norm, normed, width, angles)  # (prompts, longest, K, D)
        value = kernels.linear_pass(layer.value, normed).unflatten(-1, (-1, width))
        kernels.store_pass(cache, index, places, key, value)
        if index + 1 == len(spec.layers):
            return
        query = kernels.heads_pass(layer.query, layer.query_norm, normed, width, angles)
        mixed = causal_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), layer)
        change = kernels.linear_pass(layer.output, mixed.transpose(1, 2).flatten(2))
        hidden, normed = kernels.add_norm_pass(hidden, change, layer.after_attention, layer.before_mlp)
        change, after = kernels.linear_pass(layer.down, kernels.gated_pass(layer, normed)), layer.after_mlp


class DecoderCache:
    """Makes the decoder for a call, keeps its captured steps, and hands its cache's memory back in between.

    `made` is how often a decoder has been made, and `cache_bytes` the most that its cache has taken, which torch's
    counters do not see.
    """

    def __init__(self) -> None:
        self.decoder: GpuDecoder | None = None
        self.most = 0  # slots that the decoder was asked for; it has fewer where memory did not allow them
        self.made = 0
        self.cache_bytes = 0

    def ready(self, model: Any, slots: int, length: int, room: int) -> GpuDecoder:
        """A decoder for sequences of `length` tokens, `room` of them drawn, in `slots` slots or what memory allows."""
        kept = self.decoder
        if kept is not None and kept.serves(length, room) and slots <= self.most and self._resumed(kept):
            return kept
        if kept is not None and kept.made_for[0] == tuple(p.data_ptr() for p in model.parameters()):
            slots, length, room = max(slots, self.most), max(length, kept.length), max(room, kept.room)
        self.drop()
        length = -(-length // LENGTH_UNIT) * LENGTH_UNIT
        self.most = slots
        spec = DecoderSpec.from_model(model)
        fit = slots_that_fit(slots, slot_bytes(spec, length), free_memory(spec.device))
        while True:
            try:
                self.decoder = GpuDecoder(model, fit, length, room)
                self.made += 1
                self.cache_bytes = max(self.cache_bytes, self.decoder.cache.memory.size)
                return self.decoder
            except torch.cuda.OutOfMemoryError:
                if fit == 1:
                    raise
                fit //= 2

    def release(self) -> None:
        """Hand the cache's memory back; the captured steps stay, where the driver can keep their addresses."""
        if self.decoder is None:
            return
        self.decoder.cache.memory.hand_back()
        if self.decoder.cache.memory.mapped:  # it goes with the decoder only
            self.drop()

    def drop(self) -> None:
        """Forget the decoder and all that it holds."""
        self.decoder = None

    def _resumed(self, decoder: GpuDecoder) -> bool:
        """Whether the cache's memory is there, or could be taken again within its share of what is free now."""
        memory = decoder.cache.memory
        if memory.mapped:
            return True
        if memory.size > FREE_SHARE * free_memory(decoder.device) and decoder.slots > 1:
            return False
        try:
            memory.take()
        except torch.cuda.OutOfMemoryError:
            return False
        decoder.cache.clear()
        return True


# -- continuous batching ------------------------------------------------------------------------------------------
#
# Steps never wait for the host: the slots' state lives on the device. A sequence enters with its prompt but for the
# last token in the cache, and that token is the first one it is stepped on, so every draw comes out of the same kind of
# step and samples of one prompt enter by a copy. The host launches a few steps, asks which slots have ended by then,
# launches a few more, and only then reads the answer: the device is never idle, and a slot that ended stands idle for
# two such rounds at most.


LOOK = 4  # steps between two looks at the slots
REFILL = 16  # new sequences enter once one in so many slots is free
SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


def bucket(count: int, slots: int) -> int:
    """How many slots a step runs over, for `count` that are in use: few sizes, so that few steps are captured."""
    size = next((size for size in SIZES if count <= size), -(-count // 256) * 256)
    return min(size, slots)


@dataclass(eq=False)
class _Slot:
    """A running sequence, whose prompt it continues, where it stands, and the batch's steps before it entered."""

    sequence: int
    group: int
    place: int
    entered: int
    gone: bool = False


@dataclass(frozen=True)
class _Look:
    """Which slots were live after some steps, and who stood in them; to be read once the device has come so far."""

    slots: list[_Slot | None]
    live: Tensor
    ready: torch.cuda.Event | None

    def ended(self) -> list[_Slot]:
        """Those whose end this look is the first to show."""
        if self.ready is not None:
            self.ready.synchronize()
        live = self.live.tolist()
        return [slot for place, slot in enumerate(self.slots) if slot and not slot.gone and not live[place]]


class GpuBatch:
    """Runs sequences through a decoder, at most `slots` at a time.

    `groups[i]` is the group of sequence i, `prompts[g]` the token ids that all sequences of group g continue,
    `uniforms[i]` (room,) what sequence i draws by, and `stops` the tokens that end one. When none wait, live slots are
    moved together as soon as a step over fewer slots holds them all.
    """

    def __init__(
        self,
        decoder: GpuDecoder,
        slots: int,
        prompts: Mapping[int, list[int]],
        groups: Sequence[int],
        uniforms: Tensor,
        sampling: Sampling,
        stops: set[int],
    ) -> None:
        self.decoder, self.slots, self.prompts, self.sampling = decoder, slots, prompts, sampling
        self.room = sampling.max_new_tokens
        self.uniforms = uniforms.to(decoder.device)  # (sequences, room)
        self.waiting = deque(enumerate(groups))
        self.places: list[_Slot | None] = [None] * slots
        self.looks: deque[_Look] = deque()
        self.ended: list[tuple[list[int], tuple[Tensor, ...]]] = []  # sequences, and copies of what their slots held
        self.steps = 0
        self.slot_steps = 0  # slots stepped, live or idle, over all steps
        self.tokens_read = 0
        decoder.sample_by(sampling, stops)

    def run(self) -> list[Draw]:
        """What each sequence drew, on the CPU; a token of -1 ends a sequence whose logits gave no distribution."""
        while self.waiting or any(self.places):
            self.admit()
            self._compact()
            went_on = self._advance()
            if len(self.looks) > went_on:  # the newest look waits while the device still has steps to do
                self._leave(self.looks.popleft().ended())
        return self._answers()

    def admit(self) -> None:
        """Let waiting sequences into free slots, once there are enough of those to read prompts several at a time."""
        free = [place for place, slot in enumerate(self.places) if slot is None]
        if len(free) < min(len(self.waiting), max(1, self.slots // REFILL)) or not self.waiting:
            return
        holders = {slot.group: slot.place for slot in self.places if slot}
        unread: list[tuple[int, int]] = []  # (group, slot) of the prompts to be read
        copies: list[list[int]] = []  # (source, target, length)
        entered: list[_Slot] = []
        for place in free[: len(self.waiting)]:
            sequence, group = self.waiting.popleft()
            length = len(self.prompts[group]) - 1
            if group in holders:
                copies.append([holders[group], place, length])
            elif length:
                unread.append((group, place))
            holders.setdefault(group, place)
            slot = self.places[place] = _Slot(sequence, group, place, self.steps)
            entered.append(slot)
        if unread:
            self.decoder.prefill([self.prompts[group][:-1] for group, _ in unread], [place for _, place in unread])
            self.tokens_read += sum(len(self.prompts[group]) - 1 for group, _ in unread)
        if copies:
            source, target, length = on_device(copies, self.decoder.device).t().contiguous()
            longest = max(length for _, _, length in copies)
            self.decoder.kernels.copy_slots(self.decoder.cache, source, target, length, longest)
        self._enter(entered)

    def _enter(self, slots: list[_Slot]) -> None:
        """Make sequences that have just been given their slots live."""
        prompts = [self.prompts[slot.group] for slot in slots]
        rows = [
            [slot.place for slot in slots],
            [slot.sequence for slot in slots],
            [ids[-1] for ids in prompts],
            [len(ids) - 1 for ids in prompts],
        ]
        place, sequence, token, column = on_device(rows, self.decoder.device)
        state = self.decoder.state
        state.tokens[place], state.columns[place] = token, column
        state.drawn.index_fill_(0, place, 0)
        state.limits.index_fill_(0, place, self.room)
        state.uniforms[place, : self.room] = self.uniforms[sequence].to(state.uniforms.dtype)
        state.live.index_fill_(0, place, True)

    def _compact(self) -> None:
        """Move live slots together where that makes a step cheaper."""
        used = [slot for slot in self.places if slot]
        if self.waiting or not used or bucket(len(used), self.slots) >= bucket(used[-1].place + 1, self.slots):
            return
        holes = [place for place, slot in enumerate(self.places[: len(used)]) if slot is None]
        movers = used[-len(holes) :]
        device, state = self.decoder.device, self.decoder.state
        source, target = on_device([[slot.place for slot in movers], holes], device)
        longest = max(len(self.prompts[slot.group]) - 1 + self.steps - slot.entered for slot in movers)
        longest = min(longest, self.decoder.length)
        self.decoder.kernels.copy_slots(self.decoder.cache, source, target, state.columns[source], longest)
        state.move(source, target)
        for slot, hole in zip(movers, holes, strict=True):
            self.places[slot.place], self.places[hole] = None, slot
            slot.place = hole

    def _advance(self) -> bool:
        """Launch the next steps and ask who is live after them; False where every sequence has had all its steps."""
        left = max((self.room - (self.steps - slot.entered) for slot in self.places if slot), default=0)
        if left <= 0:
            return False
        n = bucket(max(slot.place for slot in self.places if slot) + 1, self.slots)
        steps = min(LOOK, left)
        self.decoder.advance(n, self.sampling, steps)
        self.steps += steps
        self.slot_steps += steps * n
        live, ready = self.decoder.state.live, None
        if live.is_cuda:
            live, ready = live.to("cpu", non_blocking=True), torch.cuda.Event()
            ready.record()
        self.looks.append(_Look(list(self.places), live if ready else live.clone(), ready))
        return True

    def _leave(self, ended: list[_Slot]) -> None:
        """Take what ended slots drew, and free them."""
        if not ended:
            return
        state, rows = self.decoder.state, on_device([slot.place for slot in ended], self.decoder.device)
        tables = (state.drawn[rows], *(table[rows, : self.room] for table in (state.answers, state.behavior)))
        self.ended.append(([slot.sequence for slot in ended], (*tables, state.untruncated[rows, : self.room])))
        for slot in ended:
            self.places[slot.place], slot.gone = None, True

    def _answers(self) -> list[Draw]:
        owners = [sequence for sequences, _ in self.ended for sequence in sequences]
        columns = zip(*(tables for _, tables in self.ended), strict=True)
        lengths, *tables = (torch.cat(column).cpu() for column in columns)
        rows = zip(owners, lengths.tolist(), *(table.unbind() for table in tables), strict=True)
        found: dict[int, Draw] = {}
        for sequence, length, *drawn in rows:
            found[sequence] = Draw(*(row if length == self.room else row[:length] for row in drawn))
        return [found[sequence] for sequence in range(len(owners))]
