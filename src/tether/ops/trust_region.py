"""The machinery of TRPO (Schulman et al. 2015): natural-gradient directions and a line search that keeps a hard bound.

Vectors are flat (P,) concatenations of parameters; matrices are only ever known by their product with a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def conjugate_gradient(
    product: Callable[[Tensor], Tensor], vector: Tensor, *, iterations: int, tolerance: float = 1e-20
) -> Tensor:
    """x with `product(x)` = A x close to `vector`, A symmetric and positive definite, from x = 0.

    Hestenes and Stiefel (1952); ends early once the squared residual is below `tolerance` times that of `vector`.
    """
    solution = torch.zeros_like(vector)
    residual, direction = vector.clone(), vector.clone()
    squared = residual @ residual
    enough = tolerance * squared
    for _ in range(iterations):
        if bool(squared <= enough):
            break
        image = product(direction)
        step = squared / (direction @ image)
        solution = solution + step * direction
        residual = residual - step * image
        previous, squared = squared, residual @ residual
        direction = residual + (squared / previous) * direction
    return solution


def fisher_vector_product(
    mean_kls: Iterable[Callable[[], Tensor]], parameters: Sequence[Tensor], vector: Tensor
) -> Tensor:
    """(P,) F v, F the Hessian of KL(old || new) at new = old, where it is the Fisher matrix.

    Each of `mean_kls` builds one micro-batch's share of the KL; F v = grad((grad KL) . v), summed over them.
    """
    total = torch.zeros_like(vector)
    for mean_kl in mean_kls:
        slopes = torch.autograd.grad(mean_kl(), parameters, create_graph=True)
        along = torch.cat([slope.reshape(-1) for slope in slopes]) @ vector
        total += torch.cat([part.reshape(-1) for part in torch.autograd.grad(along, parameters)])
    return total


def step_scale(direction: Tensor, image: Tensor, *, max_kl: float) -> float:
    """sqrt(2 max_kl / (s^T A s)): how far along s the quadratic model of the KL reaches its bound; `image` is A s."""
    curvature = float(direction @ image)
    return math.sqrt(2.0 * max_kl / curvature) if curvature > 0.0 else 0.0


@dataclass(frozen=True)
class LineSearch:
    """The result of a line search; `fraction` is 0 if no trial was accepted."""

    fraction: float
    surrogate: float
    kl: float

    @property
    def accepted(self) -> bool:
        """Whether a step was found."""
        return self.fraction > 0.0


def line_search(
    trial: Callable[[float], tuple[float, float]],
    *,
    surrogate_before: float,
    max_kl: float,
    backtrack: float,
    max_backtracks: int,
) -> LineSearch:
    """The longest of the steps 1, b, b^2, ... for which the surrogate rises and KL(old || new) <= max_kl.

    `trial(fraction)` gives `(surrogate, kl)` there. A trial that is not a number fails the comparison and is rejected.
    """
    for attempt in range(max_backtracks + 1):
        fraction = backtrack**attempt
        surrogate, kl = trial(fraction)
        if surrogate > surrogate_before and kl <= max_kl:
            return LineSearch(fraction, surrogate, kl)
    return LineSearch(0.0, surrogate_before, 0.0)
