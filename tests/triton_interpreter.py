"""Triton's interpreter: kernels run on a CPU, as plain array code, so that a machine without a device can test them."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import version

import numpy
import pytest
import torch


def interpret() -> None:
    """Have Triton interpret the kernels that are imported from now on; where it cannot, skip the module of tests."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed", allow_module_level=True)
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a device", allow_module_level=True)
    if _release(numpy.__version__) >= (2, 4) and _release(version("triton")) < (3, 7):
        pytest.skip("the interpreter of Triton before 3.7 needs numpy before 2.4", allow_module_level=True)
    if "triton" in sys.modules and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton was imported before it could be told to interpret", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"


def _release(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))
