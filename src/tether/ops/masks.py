"""Masks, positions, statistics over masked tokens, and packing.

Masks and positions come from lengths, never from token ids, so a pad id that equals the end id is harmless. Means,
variances and whitening read sampled tokens only; padding never enters. A `Packing` records where the real tokens of a
padded batch are, so that a forward pass can run over them alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from tether.device_transfer import sent


def position_ids(attention_mask: Tensor) -> Tensor:
    """(B, T) positions that start at each row's first real token, whichever side the padding stands on.

    pos[b, t] = (number of real tokens up to and including t) - 1, and 0 on padding before the first.
    """
    return (attention_mask.long().cumsum(dim=1) - 1).clamp_min(0)


def masks_from_lengths(
    prompt_lengths: Tensor, response_lengths: Tensor, width: int, side: Literal["left", "right"]
) -> tuple[Tensor, Tensor]:
    """`(attention_mask, response_mask)`, each (B, width) bool, of rows [prompt, response] padded on `side`.

    Lengths are (B,) integers.
    """
    total = prompt_lengths + response_lengths
    columns = torch.arange(width, device=total.device).expand(total.shape[0], width)
    start = (width - total if side == "left" else torch.zeros_like(total))[:, None]
    attention_mask = (columns >= start) & (columns < start + total[:, None])
    response_mask = attention_mask & (columns >= start + prompt_lengths[:, None])
    return attention_mask, response_mask


def last_index(mask: Tensor) -> Tensor:
    """(B,) the column of each row's last True; -1 for a row without one, which callers must rule out."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, columns, -1).amax(dim=1)


def last_true(mask: Tensor) -> Tensor:
    """(B, T) True at each row's last True, and nowhere in a row without one."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    return columns == last_index(mask)[:, None]


def flat_positions(mask: Tensor) -> Tensor:
    """(N,) the indices of the N True entries of `mask` (B, T) in the flattened batch, row after row."""
    return mask.flatten().nonzero()[:, 0]


def widened(x: Tensor) -> Tensor:
    """`x` in float64, where the device has it.

    A mean rounded in fp32 leaves a residue in numbers that are all equal, and dividing by their tiny deviation
    amplifies it.
    """
    return x if x.device.type == "mps" else x.double()


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Scalar: the sum of `x` over True positions. Entries elsewhere may be anything, NaN included."""
    return x.masked_fill(~mask, 0.0).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Scalar: (1/n) sum of x over the n True positions; NaN if there are none."""
    return masked_sum(x, mask) / mask.sum()


def masked_variance(x: Tensor, mask: Tensor, *, unbiased: bool = False) -> Tensor:
    """Scalar: (1/n) sum (x - mean)^2 over True positions; divided by n - 1 if `unbiased`."""
    squares = (x - masked_mean(x, mask)) ** 2
    count = mask.sum()
    return masked_sum(squares, mask) / (count - 1 if unbiased else count)


def whiten(
    x: Tensor, mask: Tensor, *, shift_mean: bool = True, unbiased: bool = False, epsilon: float = 1e-8
) -> Tensor:
    """(x - m) / sqrt(var + epsilon), plus m again unless `shift_mean`; 0 off the mask.

    Advantages are whitened with the mean removed, rewards with the mean kept (Ziegler et al. 2019, whose released
    code uses the population variance).
    """
    wide = widened(x)
    mean = masked_mean(wide, mask)
    whitened = (wide - mean) * (masked_variance(wide, mask, unbiased=unbiased) + epsilon).rsqrt()
    if not shift_mean:
        whitened = whitened + mean
    return whitened.masked_fill(~mask, 0.0).to(x.dtype)


Moved = TypeVar("Moved", "Rows", "Packing")


@dataclass(frozen=True)
class Rows:
    """The n tokens of a packing whose states are wanted, and where each row's begin."""

    tokens: Tensor  # (n,) their indices among the N packed tokens
    starts: Tensor | None  # (B + 1,) where each row's wanted tokens begin among the n; None unless they end its row
    most: int  # largest number of wanted tokens in a row

    def to(self, device: torch.device | str) -> Rows:
        """The same on another device."""
        return _moved(self, device)


@dataclass(frozen=True)
class Packing:
    """Where the N real tokens of a (B, T) batch are, and where they are with all padding on the right (B, L)."""

    shape: tuple[int, int]  # (B, T)
    places: Tensor  # (N,) indices in the flattened batch, row after row
    positions: Tensor  # (N,) each token's position in its row
    longest: int  # L
    starts: Tensor  # (B + 1,) int32: where each row starts among the N tokens
    padded: Tensor | None  # (N,) indices in the flattened (B, L) layout; None if no row is padded
    sources: Tensor | None  # (B * L,) the token at each index of that layout; any token on padding

    @classmethod
    def of(cls, mask: Tensor) -> Packing:
        """From the attention mask (B, T); the real tokens of a row are contiguous."""
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
        """The packed tokens that `wanted` (B, T) selects."""
        packed = self.pack(wanted)
        tokens = packed.nonzero()[:, 0]
        real = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.bool, device=wanted.device)
        real[self.places] = True
        counts = (wanted & real.view(self.shape)).sum(dim=1)
        # A wanted token that an unwanted one follows in its row shows that the wanted ones are not a suffix.
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
        """(B, heads, L, D) of x (N, heads, D); padding holds copies of some token."""
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
    """x[order]; `back` holds the index of one copy of each row of x, and only those copies are read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None
