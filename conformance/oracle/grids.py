"""The three habits every part of the oracle shares: which places are sampled, picking them, putting them back."""

from collections.abc import Sequence
from typing import Any, TypeAlias

Row: TypeAlias = list[float]
Grid: TypeAlias = list[list[float]]
Mask: TypeAlias = list[list[bool]]
PartialGrid: TypeAlias = list[list[float | None]]


def sampled_columns(mask_row: Sequence[bool]) -> list[int]:
    """The columns of a row's sampled tokens, in order: the only places where time passes."""
    return [t for t, is_sampled in enumerate(mask_row) if is_sampled]


def true_places(mask: Mask) -> list[tuple[int, int]]:
    """Every (row, column) that the policy sampled, in reading order."""
    return [(b, t) for b, mask_row in enumerate(mask) for t in sampled_columns(mask_row)]


def picked(x: Grid, mask: Mask) -> Row:
    """The numbers that stand on sampled tokens. Nothing off the mask is ever read."""
    return [x[b][t] for b, t in true_places(mask)]


def undefined_like(mask: Mask) -> list[list[Any]]:
    """A grid of the mask's shape in which no place has a value yet."""
    return [[None] * len(mask_row) for mask_row in mask]


def spread(row_values: Row, columns: list[int], width: int) -> list[float | None]:
    """One row: `row_values[k]` on `columns[k]`, undefined elsewhere."""
    row: list[float | None] = [None] * width
    for column, value in zip(columns, row_values, strict=True):
        row[column] = value
    return row
