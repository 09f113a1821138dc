"""Means, variances and whitening over sampled tokens only. Padding never enters."""

from __future__ import annotations

from torch import Tensor


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
