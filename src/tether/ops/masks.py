"""Masks, positions, and statistics over sampled tokens only. Padding never enters.

Masks and positions. They come from lengths, never from token ids: a pad id that equals the end id does no harm.

Means, variances and whitening over sampled tokens only. Padding never enters.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tether.tensor_cache import tensor_cached


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
    """(B,) the column of each row's last True place. A row without one gives -1: callers must have ruled it out."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, columns, -1).amax(dim=1)


@tensor_cached
def last_places(mask: Tensor) -> Tensor:
    """(B, T) True at each row's last True place, and nowhere in a row without one."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    return columns == last_index(mask)[:, None]


def widened(x: Tensor) -> Tensor:
    """`x` in float64, where the device has it.

    A mean that is rounded in fp32 leaves a residue in numbers that are all equal, and dividing by their tiny deviation
    blows it up.
    """
    return x if x.device.type == "mps" else x.double()


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Scalar: the sum of `x` over True places. What stands elsewhere may be anything, NaN included."""
    return x.masked_fill(~mask, 0.0).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Scalar: (1/n) sum of x over the n True places; NaN if there are none, for there is no such number."""
    return masked_sum(x, mask) / mask.sum()


def masked_variance(x: Tensor, mask: Tensor, *, unbiased: bool = False) -> Tensor:
    """Scalar: (1/n) sum (x - mean)^2 over True places; divided by n - 1 if `unbiased`."""
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
