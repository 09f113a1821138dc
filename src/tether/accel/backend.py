"""The one place where it is decided whose kernels run on a device, for the engine and the trainer alike.

A decode step has `decode_gpu/fused_step.py` and its plain twin `reference_step.py`; a user names its modules by kind.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Literal

import torch

Kind = Literal["triton", "torch"]


@cache
def has_triton() -> bool:
    """Whether Triton can be imported; torch for some platforms comes without it."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return False
    return True


def kernel_kind(device: torch.device, dtype: torch.dtype) -> Kind:
    """Triton's kernels in half precision on a CUDA device that has them; else plain torch.

    In float32 a product that keeps all its bits has no use for the tensor cores that these kernels are laid out for.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    return "triton" if device.type == "cuda" and half and has_triton() else "torch"
