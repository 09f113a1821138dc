"""Norms of gradients: of each tensor, then of all together, so that tensors may lie on different ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def total_norm(gradients: Sequence[Tensor], device: torch.device | str) -> Tensor:
    """The norm of all gradients together, on `device`, where they are."""
    return norm_of_norms(tensor_norms(gradients), [gradient.dtype in HALF for gradient in gradients], device)


def tensor_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each gradient; half-precision ones are summed in float32."""
    each_norm: Any = torch._foreach_norm  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    norms: dict[int, Tensor] = {}
    for is_half in (True, False):
        places = [place for place, gradient in enumerate(gradients) if (gradient.dtype in HALF) == is_half]
        if places:
            options = {"dtype": torch.float32} if is_half else {}
            found = each_norm([gradients[place] for place in places], 2.0, **options)
            norms |= dict(zip(places, found, strict=True))
    return [norms[place] for place in range(len(gradients))]


def norm_of_norms(norms: Sequence[Tensor], halves: Sequence[bool], device: torch.device | str) -> Tensor:
    """The norm of all tensors from that of each; `halves` says which are in half precision, which come first.

    Without any it is 0 on `device`: torch's own would be 0 on the CPU, which stacks with nothing on another device.
    """
    if not norms:
        return torch.zeros((), device=device)
    first = [norm for norm, half in zip(norms, halves, strict=True) if half]
    others = [norm for norm, half in zip(norms, halves, strict=True) if not half]
    if not first:
        return torch.linalg.vector_norm(torch.stack(others))
    together = [torch.linalg.vector_norm(torch.stack(others))] if others else []
    return torch.linalg.vector_norm(torch.stack([*first, *together]))


def read_norms(norms: Mapping[str, Tensor]) -> dict[str, float]:
    """The norms as numbers; the device is waited for once."""
    if not norms:
        return {}
    return dict(zip(norms, torch.stack(list(norms.values())).tolist(), strict=True))
