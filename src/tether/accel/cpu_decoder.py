"""A decoder on a CPU, for every family of `families.py`: its pass, and the batch that keeps its slots filled.

Activations are kept feature-major, (features, N) for N tokens, so that a linear layer is `weight @ x` on the weight as
the model holds it. For few tokens this is the layout in which a CPU's matrix product runs at its best: measured with 32
tokens and two threads, two to three times as fast as `F.linear`, which then uses one thread only.

Weights are the model's own and nothing is copied; make a decoder for each call to `generate`. A linear layer with an
adapter is called as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from tether.accel.cached_attention import Decode, Prefill, SlotCache, capped
from tether.accel.spec import DecoderSpec, Layer, Linear, Norm
from tether.ops.sampling import Draw

FEW = 128  # tokens up to which a weight in blocks is no slower than a whole one
TALL = 8192  # rows of a weight from which its blocks are of a fixed size


def row_blocks(rows: int) -> int:
    """Into how many blocks of rows a weight is cut for a product with few tokens; 1 leaves it whole.

    MKL splits a product between its threads as suits large ones, and packs a tall matrix in blocks that fit no cache.
    Measured with two threads, blocks against whole: with 64 tokens a 1536 x 576 or 576 x 576 weight is 1.3 times as
    fast and a 576 x 1536 one 1.5 times; with 32 tokens the last is 1.6 times as fast, the others the same; the 49152 x
    576 output layer 1.1 times.
    """
    if rows >= TALL:
        return next((rows // size for size in (512, 256, 128) if rows % size == 0), 1)
    return 4 if rows % 4 == 0 else 1


@cache
def column_multiple() -> int:
    """The number of tokens that a pass is filled up to a multiple of; 1 leaves it as it is.

    On AMD processors MKL multiplies by whole blocks of 16 columns at full speed, and by any other number at a half
    down to an eighth of it. Measured on an EPYC with AVX-512, one thread, a 1536 x 576 weight, in useful GFLOP/s: 2
    tokens 3.5 and filled up 9.7, 8 tokens 14 and 39, 15 tokens 23 and 73, 31 tokens 40 and 86, 63 tokens 53 and 90.
    """
    try:
        vendor = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")[:400]
    except OSError:
        return 1
    return 16 if "AuthenticAMD" in vendor else 1


def filled(x: Tensor, multiple: int) -> Tensor:
    """x (..., N) with its last column repeated until N is a multiple; one column alone stays alone."""
    missing = -x.shape[-1] % multiple if x.shape[-1] > 1 else 0
    return torch.cat((x, x[..., -1:].expand(*x.shape[:-1], missing)), dim=-1) if missing else x


class Projection:
    """A linear layer on feature-major activations."""

    def __init__(self, linear: Linear) -> None:
        self.module = linear.module
        self.weight: Tensor | None = None  # (out, in)
        self.blocks: Tensor | None = None  # (blocks, out / blocks, in), the same memory, where that is faster
        self.bias: Tensor | None = None  # (out, 1)
        if linear.weight is not None and linear.adapter is None:
            self.weight = weight = linear.weight.detach()
            count = row_blocks(len(weight)) if weight.is_contiguous() else 1
            self.blocks = weight.view(count, -1, weight.shape[1]) if count > 1 else None
            self.bias = None if linear.bias is None else linear.bias.detach().unsqueeze(-1)

    def into(self, out: Tensor, x: Tensor) -> None:
        """out (out, N) = W x + b, for x (in, N)."""
        if self.weight is None:
            out.copy_(self.module(x.t()).t())
        elif self.bias is not None:
            torch.addmm(self.bias, self.weight, x, out=out)
        elif self.blocks is not None and x.shape[1] <= FEW:
            torch.bmm(self.blocks, x.expand(len(self.blocks), *x.shape), out=out.view(*self.blocks.shape[:2], -1))
        else:
            torch.mm(self.weight, x, out=out)

    def added_to(self, total: Tensor, x: Tensor) -> None:
        """total (out, N) += W x + b, for x (in, N)."""
        if self.weight is None:
            total.add_(self.module(x.t()).t())
            return
        if self.blocks is not None and x.shape[1] <= FEW:
            parts = total.view(*self.blocks.shape[:2], -1)
            parts.baddbmm_(self.blocks, x.expand(len(self.blocks), *x.shape))
        else:
            total.addmm_(self.weight, x)
        if self.bias is not None:
            total.add_(self.bias)


class FeatureNorm:
    """An RMS norm on feature-major activations."""

    def __init__(self, norm: Norm) -> None:
        weight = norm.weight.detach()
        self.weight = (weight if norm.offset == 0.0 else weight + norm.offset).unsqueeze(-1)  # (width, 1)
        self.epsilon = norm.epsilon

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., width, N) · weight / sqrt(mean over the width of x² + ε)."""
        scale = (x * x).sum(dim=-2, keepdim=True).mul_(1.0 / x.shape[-2]).add_(self.epsilon).rsqrt_()
        return (x * scale).mul_(self.weight)

    def grouped(self, x: Tensor) -> Tensor:
        """The norm of each group of `width` features of x (features, N)."""
        return self(x.unflatten(0, (-1, len(self.weight)))).flatten(0, 1)


class CpuLayer:
    """A layer's parts as the CPU computes them."""

    def __init__(self, layer: Layer) -> None:
        self.spec = layer
        self.query, self.key, self.value, self.output, self.gate, self.up, self.down = map(Projection, layer.linears)
        norms = (layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp)
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = map(feature_norm, norms)
        self.query_norm, self.key_norm = feature_norm(layer.query_norm), feature_norm(layer.key_norm)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """act(gate) * up, over the memory of `gate` where that is possible."""
        silu = self.spec.activation_kind == "silu"
        return (F.silu(gate, inplace=True) if silu else self.spec.activation(gate)).mul_(up)


def feature_norm(norm: Norm | None) -> FeatureNorm | None:
    """The norm, where there is one."""
    return None if norm is None else FeatureNorm(norm)


def normed(norm: FeatureNorm | None, x: Tensor) -> Tensor:
    """The norm of x, or x where there is none."""
    return x if norm is None else norm(x)


def add_output(hidden: Tensor, projection: Projection, x: Tensor, norm: FeatureNorm | None) -> None:
    """hidden (H, N) += the projection of x (in, N), normed first where the family does so."""
    if norm is None:
        projection.added_to(hidden, x)
    else:
        out = torch.empty_like(hidden)
        projection.into(out, x)
        hidden.add_(norm(out))


class CpuDecoder:
    """A model's decoding pass over the slots of a cache."""

    def __init__(self, model: Any, slots: int, length: int, traced: int | None = None) -> None:
        """Room for `slots` sequences of `length` tokens; the cache's states keep the inputs of layer `traced`."""
        self.spec = spec = DecoderSpec.from_model(model)
        assert spec.output is not None and spec.final_norm is not None
        self.layers = list(map(CpuLayer, spec.layers))
        self.norm, self.head = FeatureNorm(spec.final_norm), Projection(spec.output)
        self.device = spec.device
        self.cache = SlotCache(
            len(self.layers), slots, spec.kv_heads, spec.head_dim, length, dtype=spec.dtype, device=spec.device
        )
        self.column_multiple = column_multiple() if self.device.type == "cpu" else 1
        self.traced = traced
        if traced is not None:
            self.cache.keep_states(spec.hidden)
        tables = spec.angles(torch.arange(length, device=self.device))
        self.angles = {  # cos and sin, (D, length) each
            kind: (cos.t().contiguous(), sin.t().contiguous()) for kind, (cos, sin) in tables.items()
        }

    def prefill(self, prompts: list[list[int]], slots: list[int]) -> None:
        """Read `prompts[i]` into slot `slots[i]`. No logits: the pass ends at the last layer's keys and values."""
        lengths = [len(ids) for ids in prompts]
        tokens = torch.tensor([id for ids in prompts for id in ids], device=self.device)
        columns = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        self._backbone(tokens, columns, Prefill(self.cache, slots, lengths))

    def step(self, tokens: Tensor, columns: Tensor, length: int) -> Tensor:
        """(V, n) logits after one more token in each of the slots 0 to n - 1: `tokens` (n,) at `columns` (n,).

        `length` is the longest slot's, this token counted.
        """
        hidden = self._backbone(tokens, columns, Decode(self.cache, columns, length))
        logits = hidden.new_empty(self.spec.vocabulary, hidden.shape[1])
        self.head.into(logits, self.norm(hidden))
        logits = logits[:, : len(tokens)]
        return logits if self.spec.logit_cap is None else capped(logits, self.spec.logit_cap)

    def _backbone(self, tokens: Tensor, columns: Tensor, attend: Prefill | Decode) -> Tensor:
        """(H, N') hidden states before the last norm, N' >= N as `column_multiple` has it, the first N of them real.

        Of no meaning after a prefill, which stops early.
        """
        count, multiple, inner = len(tokens), self.column_multiple, self.spec.inner
        hidden = self.spec.embedding(filled(tokens, multiple)).t().contiguous()
        places = filled(columns, multiple)
        angles = {kind: (cos[:, places], sin[:, places]) for kind, (cos, sin) in self.angles.items()}  # (D, N')
        features = (self.spec.heads + 2 * self.spec.kv_heads) * self.spec.head_dim
        qkv = hidden.new_empty(features, hidden.shape[1])
        gates = hidden.new_empty(2 * inner, hidden.shape[1])
        for index, layer in enumerate(self.layers):
            if index == self.traced:
                assert self.cache.states is not None
                self.cache.states.index_put_((attend.slots, columns), hidden[:, :count].t())
            own = angles[layer.spec.rotary]
            query, key, value = self._project(layer, normed(layer.before_attention, hidden), qkv, *own)
            attend.store(index, key[:count], value[:count])
            if attend.reads_only and index + 1 == len(self.layers):
                break
            mixed = filled(attend(index, query[:count], layer.spec), multiple)
            add_output(hidden, layer.output, mixed, layer.after_attention)
            x = normed(layer.before_mlp, hidden)
            layer.gate.into(gates[:inner], x)
            layer.up.into(gates[inner:], x)
            add_output(hidden, layer.down, layer.gated(gates[:inner], gates[inner:]), layer.after_mlp)
        return hidden

    def _project(
        self, layer: CpuLayer, x: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (N, heads, D) and keys (N, K, D), and values (N, K, D), as views; `qkv` is work space."""
        heads, kv_heads, width = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        first, second = heads * width, (heads + kv_heads) * width
        layer.query.into(qkv[:first], x)
        layer.key.into(qkv[first:second], x)
        layer.value.into(qkv[second:], x)
        both = qkv[:second]
        if layer.query_norm and layer.key_norm:
            both = torch.cat((layer.query_norm.grouped(qkv[:first]), layer.key_norm.grouped(qkv[first:second])))
        both = rotate(both.unflatten(0, (-1, width)), cos, sin).permute(2, 0, 1)
        value = qkv[second:].unflatten(0, (-1, width)).permute(2, 0, 1)
        return both[:, :heads], both[:, heads:], value


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x (heads, D, N): pairs (i, i + D/2) turned by the angles of cos and sin, (D, N) each."""
    half = x.shape[1] // 2
    turned = x * cos
    turned[:, :half].addcmul_(x[:, half:], sin[:half], value=-1.0)
    turned[:, half:].addcmul_(x[:, :half], sin[half:])
    return turned


# -- continuous batching ------------------------------------------------------------------------------------------
#
# A fixed number of slots, each holding a running sequence, is refilled as sequences end. A sequence enters with its
# prompt but for the last token in the cache, and that token is the first one it is stepped on. So reading a prompt
# needs no logits, every draw comes out of the same kind of step, and a sequence whose prompt is already in some slot
# enters by a copy of that part of the slot.


PREFILL_TOKENS = 1024  # read in one pass, unless a single prompt is longer


class HeldSlots(Protocol):
    """The cache behind the slots of a decoder."""

    states: Tensor | None

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first `length` columns of one slot those of another, in every layer."""
        ...


class SlotDecoder(Protocol):
    """A decoder as a batch sees it: `CpuDecoder`, or that of the exact pass."""

    device: torch.device
    traced: int | None

    @property
    def cache(self) -> HeldSlots:
        """The slots."""
        ...

    def prefill(self, prompts: list[list[int]], slots: list[int]) -> None:
        """Read `prompts[i]` into slot `slots[i]`."""
        ...

    def step(self, tokens: Tensor, columns: Tensor, length: int) -> Tensor:
        """(V, n) logits after one more token in each of the slots 0 to n - 1."""
        ...


@dataclass
class _Slot:
    """A running sequence: which one, the prompt it continues, how much of it is cached, and its next input."""

    sequence: int
    group: int
    prompt: int  # tokens of the prompt
    cached: int
    token: int
    ended: bool = False  # has drawn its last token, and stays for that one's state

    @property
    def drawn(self) -> int:
        """How many tokens it has drawn; between a step and its draw, the one now due counts."""
        return self.cached - self.prompt + 1


class ContinuousBatch:
    """Runs sequences through a decoder, at most `slots` at a time.

    `groups[i]` is the group of sequence i and `prompts[g]` the token ids that all sequences of group g continue.
    Sequences enter in order. New ones are let in once an eighth of the slots is free, so that prompts are read
    several at a time; meanwhile the last slot is moved into each hole, and a step costs what its live slots cost.
    """

    def __init__(
        self, decoder: SlotDecoder, slots: int, prompts: Mapping[int, list[int]], groups: Sequence[int], room: int
    ) -> None:
        """`room` is how many tokens a sequence may draw."""
        self.decoder = decoder
        self.slots = slots
        self.prompts = prompts
        self.room = room
        self.traces: dict[int, Tensor] = {}  # (T, H) by sequence, where the decoder keeps states
        self.waiting = deque(enumerate(groups))
        self.live: list[_Slot] = []
        self.steps = 0
        self.tokens_read = 0

    def run(
        self, draw: Callable[[Tensor, list[tuple[int, int]]], Draw], stops: set[int]
    ) -> list[tuple[list[int], Draw]]:
        """Every step's sequences and what they drew.

        `draw` is given logits (V, n) and, for each column, the sequence and how many tokens it has drawn before.
        """
        history: list[tuple[list[int], Draw]] = []
        while self.waiting or self.live:
            self._admit()
            logits = self._step()
            if self.decoder.traced is not None:
                logits = self._trace(logits)
                if not self.live:
                    continue
            drawn = draw(logits, [(slot.sequence, slot.drawn - 1) for slot in self.live])
            history.append(([slot.sequence for slot in self.live], drawn))
            self._leave(drawn.tokens.tolist(), stops)
        return history

    def _admit(self) -> None:
        free = self.slots - len(self.live)
        if free < min(len(self.waiting), max(1, self.slots // 8)):
            return
        holders = {slot.group: place for place, slot in enumerate(self.live)}
        unread: list[tuple[int, int]] = []  # (group, slot) of the prompts to be read
        copies: list[tuple[int, int, int]] = []
        for place in range(len(self.live), len(self.live) + min(free, len(self.waiting))):
            sequence, group = self.waiting.popleft()
            ids = self.prompts[group]
            if group in holders:
                copies.append((holders[group], place, len(ids) - 1))
            elif len(ids) > 1:
                unread.append((group, place))
            holders.setdefault(group, place)
            self.live.append(_Slot(sequence, group, len(ids), len(ids) - 1, ids[-1]))
        self._read(unread)
        for source, target, length in copies:
            self.decoder.cache.copy(source, target, length)

    def _read(self, unread: list[tuple[int, int]]) -> None:
        """Prefill in passes of at most PREFILL_TOKENS, prompts of like length together."""
        unread.sort(key=lambda pair: len(self.prompts[pair[0]]))
        while unread:
            batch, width = [], 0
            while unread and (not batch or width + len(self.prompts[unread[-1][0]]) <= PREFILL_TOKENS):
                batch.append(unread.pop())
                width += len(self.prompts[batch[-1][0]]) - 1
            batch.sort(key=lambda pair: pair[1])  # slots in order are written as one block
            self.decoder.prefill([self.prompts[group][:-1] for group, _ in batch], [place for _, place in batch])
            self.tokens_read += width

    def _step(self) -> Tensor:
        device = self.decoder.device
        tokens = torch.tensor([slot.token for slot in self.live], device=device)
        columns = torch.tensor([slot.cached for slot in self.live], device=device)
        logits = self.decoder.step(tokens, columns, max(slot.cached for slot in self.live) + 1)
        self.steps += 1
        for slot in self.live:
            slot.cached += 1
        return logits

    def _leave(self, tokens: list[int], stops: set[int]) -> None:
        """Take up the drawn tokens; where a sequence ends, the last slot moves into its place."""
        for place in reversed(range(len(tokens))):
            slot = self.live[place]
            slot.token = tokens[place]
            if slot.token in stops or slot.drawn >= self.room:
                if self.decoder.traced is None:
                    self._remove(place)
                else:
                    slot.ended = True

    def _remove(self, place: int) -> None:
        """Free a slot; the last one moves into its place."""
        last = self.live.pop()
        if place < len(self.live):
            self.decoder.cache.copy(len(self.live), place, last.cached)
            self.live[place] = last

    def _trace(self, logits: Tensor) -> Tensor:
        """Take out the sequences that have been stepped on their last token, with their states; the others' logits."""
        states = self.decoder.cache.states
        assert states is not None
        columns = list(range(len(self.live)))
        for place in reversed(columns):
            slot = self.live[place]
            if slot.ended:
                self.traces[slot.sequence] = states[place, : slot.cached].clone()
                self._remove(place)
                columns[place] = columns[-1]
                columns.pop()
        return logits if len(columns) == logits.shape[1] else logits[:, columns]
