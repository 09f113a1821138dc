"""Where the real tokens of a padded batch stand, so that a pass can go over them alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from tether.device_transfer import sent
from tether.tensor_cache import tensor_cached

Moved = TypeVar("Moved", "Rows", "Packing")


@dataclass(frozen=True)
class Rows:
    """The n tokens of a packing whose states are wanted, and how they lie in their rows."""

    tokens: Tensor  # (n,) among the N packed ones
    starts: Tensor | None  # (B + 1,) where each row's wanted tokens start among the n; None unless they end its row
    most: int  # wanted tokens in any one row

    def to(self, device: torch.device | str) -> Rows:
        """The same on another device."""
        return _moved(self, device)


@dataclass(frozen=True)
class Packing:
    """Where the N real tokens of a (B, T) batch stand, and where they stand with all padding on the right (B, L)."""

    shape: tuple[int, int]  # (B, T)
    places: Tensor  # (N,) in the batch, flat, row after row
    positions: Tensor  # (N,) each token's number in its row
    longest: int  # L
    starts: Tensor  # (B + 1,) int32: where each row starts among the N tokens
    padded: Tensor | None  # (N,) among the B * L places with padding on the right; None where no row is padded
    sources: Tensor | None  # (B * L,) the token at each of those places, any one on padding

    @classmethod
    def of(cls, mask: Tensor) -> Packing:
        """From the attention mask (B, T); each row's real tokens stand together."""
        places = mask.flatten().nonzero()[:, 0]
        lengths = mask.sum(dim=1)
        longest = int(lengths.max()) if mask.numel() else 0
        positions = (mask.cumsum(dim=1) - 1).flatten().index_select(0, places)
        starts = _starts(lengths)
        if len(places) == mask.shape[0] * longest:
            return cls((mask.shape[0], mask.shape[1]), places, positions, longest, starts, None, None)
        rows = torch.arange(len(mask), device=mask.device).repeat_interleave(lengths, output_size=len(places))
        padded = rows * longest + positions
        sources = torch.zeros(len(mask) * longest, dtype=torch.long, device=mask.device)
        sources[padded] = torch.arange(len(places), device=mask.device)
        return cls((mask.shape[0], mask.shape[1]), places, positions, longest, starts, padded, sources)

    def to(self, device: torch.device | str) -> Packing:
        """The same on another device."""
        return _moved(self, device)

    def rows(self, wanted: Tensor) -> Rows:
        """Where the tokens of `wanted` (B, T) stand among the packed ones."""
        packed = self.pack(wanted)
        tokens = packed.nonzero()[:, 0]
        real = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.bool, device=wanted.device)
        real[self.places] = True
        counts = (wanted & real.view(self.shape)).sum(dim=1)
        # In its row the k-th wanted token from the end is the k-th token from the end, or they are no suffix.
        follows = torch.zeros_like(packed)
        follows[:-1] = packed[:-1] & ~packed[1:]
        ends = torch.zeros(len(packed) + 1, dtype=torch.bool, device=wanted.device)
        ends[self.starts.long()] = True
        broken = (follows & ~ends[1:]).any()
        most = counts.max() if len(counts) else counts.sum()
        both = torch.stack([most, (~broken).long()]).cpu()  # the host waits for the device once
        return Rows(tokens, _starts(counts) if both[1] else None, int(both[0]))

    def pack(self, x: Tensor) -> Tensor:
        """(N, ...) the real tokens of x (B, T, ...)."""
        return x.flatten(0, 1).index_select(0, self.places)

    def unpack(self, x: Tensor, tokens: Tensor | None) -> Tensor:
        """(B, T, H) of x (N, H), or of x (n, H) at the n `tokens` of the packing; 0 elsewhere."""
        places = self.places if tokens is None else self.places[tokens]
        flat = x.new_zeros(self.shape[0] * self.shape[1], x.shape[1])
        return flat.index_copy(0, places, x).view(*self.shape, -1)

    def for_attention(self, x: Tensor) -> Tensor:
        """(B, heads, L, D) of x (N, heads, D); what stands on padding is any token's."""
        if self.padded is not None:
            assert self.sources is not None
            reorder = cast("Callable[..., Tensor]", _Reorder.apply)  # pyright: ignore[reportUnknownMemberType]
            x = reorder(x, self.sources, self.padded)
        return x.view(self.shape[0], self.longest, *x.shape[1:]).transpose(1, 2)

    def from_attention(self, x: Tensor) -> Tensor:
        """(N, heads * D) of x (B, heads, L, D)."""
        flat = x.transpose(1, 2).reshape(self.shape[0] * self.longest, -1)
        return flat if self.padded is None else flat.index_select(0, self.padded)


def _moved(places: Moved, device: torch.device | str) -> Moved:
    columns = {field.name: getattr(places, field.name) for field in dataclasses.fields(places)}
    there = {name: sent(x, device) for name, x in columns.items() if isinstance(x, Tensor)}
    return dataclasses.replace(places, **there)


def _starts(counts: Tensor) -> Tensor:
    """(B + 1,) int32 running sums of counts (B,), from 0."""
    return torch.nn.functional.pad(counts.cumsum(dim=0), (1, 0)).to(torch.int32)


class _Reorder(torch.autograd.Function):
    """x[order], where `back` finds each of x's rows once among those, and the other copies are never read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


@tensor_cached
def packing_of(mask: Tensor) -> Packing:
    """Where the real tokens of an attention mask stand."""
    return Packing.of(mask)


@tensor_cached
def rows_of(wanted: Tensor, packing: Packing) -> Rows:
    """Where the wanted tokens stand among those."""
    return packing.rows(wanted)
