"""Masks and positions. They come from lengths, never from token ids: a pad id that equals the end id does no harm."""

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
