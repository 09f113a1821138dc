"""Norms of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)


def total_norm(gradients: Sequence[Tensor], device: torch.device | str) -> Tensor:
    """The norm of all gradients together, on `device`, where they are; half-precision ones are summed in float32.

    Without any it is 0 there as well: torch's own would be 0 on the CPU, which stacks with nothing on another device.
    """
    if not gradients:
        return torch.zeros((), device=device)
    half = [gradient for gradient in gradients if gradient.dtype in HALF]
    if not half:
        return nn.utils.get_total_norm(gradients)
    each_norm: Any = torch._foreach_norm  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    norms = list(each_norm(half, 2.0, dtype=torch.float32))
    others = [gradient for gradient in gradients if gradient.dtype not in HALF]
    if others:
        norms.append(nn.utils.get_total_norm(others))
    return torch.linalg.vector_norm(torch.stack(norms))


def read_norms(norms: Mapping[str, Tensor]) -> dict[str, float]:
    """The norms as numbers; the device is waited for once."""
    if not norms:
        return {}
    return dict(zip(norms, torch.stack(list(norms.values())).tolist(), strict=True))


def clip(gradients: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scale gradients of this norm together so that it is `limit` at most: by min(1, limit / (norm + 1e-6)).

    By a number and not, as torch's own does, by a tensor, which takes gradients in half precision one by one.
    """
    factor = limit / (norm + 1e-6)
    if factor < 1.0:
        scale_all: Any = torch._foreach_mul_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        scale_all(list(gradients), factor)
