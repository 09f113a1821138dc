"""What the tests of this folder draw from: masks of every shape that a batch can take, and numbers to lay on them."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

few = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**31 - 1)
garbage = st.sampled_from([float("nan"), float("inf"), 1e30, -7.0])


@st.composite
def masks(draw: st.DrawFn, max_rows: int = 4, max_width: int = 8) -> Tensor:
    """(B, T) bool, at least one True a row: padded left, right or on both sides, with gaps inside, single tokens."""
    rows, width = draw(st.integers(1, max_rows)), draw(st.integers(1, max_width))
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for row in range(rows):
        kind = draw(st.sampled_from(["full", "left", "right", "both", "gaps", "single"]))
        first = draw(st.integers(0, width - 1))
        if kind == "full":
            mask[row] = True
        elif kind == "left":
            mask[row, first:] = True
        elif kind == "right":
            mask[row, : first + 1] = True
        elif kind == "both":
            mask[row, first : draw(st.integers(first, width - 1)) + 1] = True
        elif kind == "gaps":
            mask[row] = torch.tensor(draw(st.lists(st.booleans(), min_size=width, max_size=width)))
            mask[row, first] = True
        else:
            mask[row, first] = True
    return mask


def numbers(seed: int, *shape: int) -> Tensor:
    """Float64 numbers from a normal distribution."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spoil(x: Tensor, mask: Tensor, bad: float) -> Tensor:
    """`x` with `bad` off the mask: what stands there must never be read."""
    return x.masked_fill(~mask, bad)


def close(found: Tensor, wanted: Tensor | list | float, tolerance: float = 1e-12) -> None:
    """Assert that the two are equal to `tolerance`, relative and absolute, and of one shape."""
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=found.dtype), rtol=tolerance, atol=tolerance)


def on_row(found: Tensor, mask: Tensor, row: int) -> list[float]:
    """One row's numbers on the mask, as Python floats."""
    return found[row][mask[row]].tolist()


def lay_out(rows: list[list[float]], mask: Tensor) -> Tensor:
    """(B, T) the rows' numbers on the mask, 0 elsewhere, one at a time."""
    laid = torch.zeros(mask.shape, dtype=torch.float64)
    for row, values in enumerate(rows):
        columns = [column for column in range(mask.shape[1]) if mask[row, column]]
        for column, value in zip(columns, values, strict=True):
            laid[row, column] = value
    return laid
