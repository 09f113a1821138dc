"""Masks from lengths, positions from masks, and statistics over sampled tokens only."""

import math

from conformance.oracle.grids import Grid, Mask, picked, true_places, undefined_like


def position_ids(attention_mask: Mask) -> dict[str, list[list[int | None]]]:
    """positions[b][t] = (number of real tokens of row b at or before t) - 1, on real tokens."""
    positions: list[list[int | None]] = []
    for row in attention_mask:
        seen = 0
        row_positions: list[int | None] = []
        for is_real in row:
            row_positions.append(seen if is_real else None)
            seen += 1 if is_real else 0
        positions.append(row_positions)
    return {"positions": positions}


def response_mask(
    prompt_lengths: list[int], response_lengths: list[int], width: int, side: str
) -> dict[str, list[list[bool]]]:
    """A row starts at column 0, or at width - prompt - response when padded on the left.

    mask[b][t] = start + prompt <= t < start + prompt + response; attention_mask[b][t] = start <= t < the same end.
    Token ids play no part: an end token that shares its id with the padding is still a sampled token.
    """
    mask: list[list[bool]] = []
    attention: list[list[bool]] = []
    for prompt, response in zip(prompt_lengths, response_lengths, strict=True):
        length = prompt + response
        if length > width:
            raise ValueError(f"a row of {length} tokens does not fit a width of {width}")
        start = width - length if side == "left" else 0
        mask.append([start + prompt <= t < start + length for t in range(width)])
        attention.append([start <= t < start + length for t in range(width)])
    return {"mask": mask, "attention_mask": attention}


def mean(numbers: list[float]) -> float:
    """sum / n, with an exact sum."""
    return math.fsum(numbers) / len(numbers)


def variance(numbers: list[float], unbiased: bool) -> float:
    """sum (x - m)^2 / n, or / (n - 1) if `unbiased`: two passes, so that a large mean does no harm."""
    centre = mean(numbers)
    squares = math.fsum((x - centre) ** 2 for x in numbers)
    return squares / (len(numbers) - 1 if unbiased else len(numbers))


def masked_mean(x: Grid, mask: Mask) -> dict[str, float]:
    """m = sum over True of x / number of True."""
    return {"mean": mean(picked(x, mask))}


def masked_variance(x: Grid, mask: Mask, unbiased: bool) -> dict[str, float]:
    """The variance of the numbers that stand on True places."""
    return {"variance": variance(picked(x, mask), unbiased)}


def whiten(
    x: Grid, mask: Mask, shift_mean: bool, unbiased: bool, epsilon: float
) -> dict[str, list[list[float | None]]]:
    """w = (x - m) / sqrt(var + epsilon), plus m again unless `shift_mean`."""
    numbers = picked(x, mask)
    centre = mean(numbers)
    deviation = math.sqrt(variance(numbers, unbiased) + epsilon)
    whitened = undefined_like(mask)
    for b, t in true_places(mask):
        whitened[b][t] = (x[b][t] - centre) / deviation + (0.0 if shift_mean else centre)
    return {"whitened": whitened}
