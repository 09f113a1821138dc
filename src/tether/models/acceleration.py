"""The only door to `tether.accel`, the package that is there for speed alone.

Nothing outside that package imports it but this file (see `tests/test_layering.py`). Without it models are run by
their own modules and log-probabilities are found in plain torch: the results agree within rounding, and take longer.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Literal

from tether.ops.logprobs import CHUNK_ELEMENTS
from tether.ops.logprobs import chunked_logprobs as plain_logprobs

AVAILABLE = importlib.util.find_spec("tether.accel") is not None
MISSING = "the package tether.accel is not installed"
SLOWER = f"Sampling and training run the model's own modules, which is slower: {MISSING}."

if TYPE_CHECKING or AVAILABLE:
    from tether.accel.engine import DecodeRequest, FastDecoder, StateCollector
    from tether.accel.exact.exact_logprobs import exact_logprobs
    from tether.accel.exact.exact_pass import exact_states
    from tether.accel.fused_pass.packed import cuda_graphs, packed_states, release_cuda_graphs
    from tether.accel.logprobs import CHUNK_ELEMENTS as FUSED_CHUNK_ELEMENTS
    from tether.accel.logprobs import logprobs
    from tether.accel.supported import (
        MAX_WORK,
        Backend,
        backend_for,
        exact_unsupported,
        logprobs_supported,
        training_unsupported,
    )
else:
    Backend = Literal["plain", "fused"]
    FUSED_CHUNK_ELEMENTS, MAX_WORK = CHUNK_ELEMENTS, 0
    DecodeRequest, FastDecoder, StateCollector = None, None, Any
    logprobs = exact_logprobs = plain_logprobs

    def exact_unsupported(*_: Any) -> str:
        """Why there is no exact pass."""
        return MISSING

    def exact_states(*_: Any, **settings: Any) -> None:
        """There is no exact pass."""

    def training_unsupported(*_: Any) -> str:
        """Why the fast pass is not taken."""
        return MISSING

    def logprobs_supported(*_: Any) -> bool:
        """There are no kernels."""
        return False

    def release_cuda_graphs() -> None:
        """There are no CUDA graphs."""

    def cuda_graphs() -> None:
        """There are no CUDA graphs."""

    def backend_for(backbone: Any) -> None:
        """There is no fast pass."""

    def packed_states(*args: Any, **settings: Any) -> None:
        """There is no fast pass."""


__all__ = [
    "AVAILABLE",
    "FUSED_CHUNK_ELEMENTS",
    "MAX_WORK",
    "MISSING",
    "SLOWER",
    "Backend",
    "DecodeRequest",
    "FastDecoder",
    "StateCollector",
    "backend_for",
    "cuda_graphs",
    "exact_logprobs",
    "exact_states",
    "exact_unsupported",
    "logprobs",
    "logprobs_supported",
    "packed_states",
    "release_cuda_graphs",
    "training_unsupported",
]
