"""What passes ask of a batch's masks, computed once per mask.

Where the tokens of a mask are decides the sizes of later tensors, and reading such a size off a device makes the host
wait. The functions of `tether.ops` are pure, so their answers are cached here: `fill` computes them while the batch is
on the host and stores them for its copy on a device.
"""

from __future__ import annotations

from torch import Tensor

from tether.device_transfer import sent, tensor_cached
from tether.ops import losses, masks
from tether.ops.losses import Aggregation
from tether.ops.masks import Packing, Rows


@tensor_cached
def true_positions(mask: Tensor) -> Tensor:
    """`ops.masks.flat_positions`."""
    return masks.flat_positions(mask)


@tensor_cached
def last_tokens(mask: Tensor) -> Tensor:
    """`ops.masks.last_true`."""
    return masks.last_true(mask)


@tensor_cached
def packing_of(mask: Tensor) -> Packing:
    """The packing of an attention mask."""
    return Packing.of(mask)


@tensor_cached
def packed_rows(wanted: Tensor, packing: Packing) -> Rows:
    """The rows of a packing at the `wanted` tokens."""
    return packing.rows(wanted)


@tensor_cached
def token_count(mask: Tensor) -> float:
    """`ops.losses.count_tokens`."""
    return losses.count_tokens(mask)


@tensor_cached
def row_count(mask: Tensor) -> float:
    """`ops.losses.count_rows`."""
    return losses.count_rows(mask)


def loss_size(aggregation: Aggregation, mask: Tensor) -> float:
    """`aggregation.size(mask)`, from cached counts."""
    return aggregation.size(mask, tokens=token_count(mask), rows=row_count(mask))


def fill_attention(mask: Tensor, moved: Tensor) -> None:
    """Store the packing and the last tokens of an attention mask for `moved`, its copy on a device."""
    packing, ends = packing_of(mask), last_tokens(mask)
    packing_of.set(moved, packing.to(moved.device))
    ends_there = sent(ends, moved.device)
    last_tokens.set(moved, ends_there)
    packed_rows.set(ends_there, packing.rows(ends).to(moved.device))


def fill_response(mask: Tensor, moved: Tensor) -> None:
    """Store the positions and the counts of a response mask for `moved`, its copy on a device."""
    true_positions.set(moved, sent(true_positions(mask), moved.device))
    token_count.set(moved, token_count(mask))
    row_count.set(moved, row_count(mask))
