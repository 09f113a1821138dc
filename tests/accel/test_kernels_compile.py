"""Kernels compile for CUDA devices on a machine without one: Triton brings its own assembler. Nothing is run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
HALF, FLOAT, LONG, INTEGER = "*bf16", "*fp32", "*i64", "*i32"
# the types of arguments by their names, whatever the kernel
TYPES: dict[str, str] = {
    **dict.fromkeys(("lse", "shifts", "inverse", "grad_weight", "partial", "logprobs", "entropy", "normaliser"), FLOAT),
    **dict.fromkeys(("grad_logprobs", "grad_entropy", "parts", "numbers", "sums", "total"), FLOAT),
    **dict.fromkeys(
        ("scale", "epsilon", "factor", "after_epsilon", "embedding_scale", "gate_scale", "up_scale"), "fp32"
    ),
    **dict.fromkeys(("tokens", "width", "rows", "count", "span", "stride_part"), "i32"),
    **dict.fromkeys(("query_starts", "starts"), INTEGER),
    "targets": LONG,
}
ATTENTION = ("forward", "grad_query", "grad_key")
GEMMA = {"WINDOW": 512, "LIMIT": 800.0}
RANKS = {"GATE_RANK": 8, "UP_RANK": 8, "RANKS": 16}
STEP = {"H": 640, "AFTER": True, "OFFSET": 0.0, "BLOCK": 1024, "EARLY": 0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "norm": ("norm.add_norm_kernel", {"ADDS": True, "BLOCK": 1024, "OFFSET": 1.0}),
    "norm, backward": (
        "norm.add_norm_backward_kernel",
        {"PASSES": True, "WEIGHTS": True, "BLOCK": 1024, "OFFSET": 1.0},
    ),
    "gelu": ("swiglu.gate_kernel", {"BLOCK": 1024, "GELU": True}),
    "gelu, backward": ("swiglu.gate_backward_kernel", {"AGAIN": True, "BLOCK": 1024, "GELU": True}),
    "gelu, adapters": ("lora.adapted_gate_kernel", {**RANKS, "ROWS": 32, "COLUMNS": 64, "GELU": True}),
    "gelu, adapters, backward": (
        "lora.adapted_gate_backward_kernel",
        {**RANKS, "DOWN_RANK": 8, "AGAIN": True, "ROWS": 32, "COLUMNS": 32, "GELU": True},
    ),
    "capped logits": ("logprobs.row_kernel", {"BLOCK": 1024, "LIMIT": 30.0}),
    "capped logits, backward": ("logprobs.slope_kernel", {"ENTROPY": True, "BLOCK": 1024, "LIMIT": 30.0}),
    "step without norm": ("decode.step_norm_kernel", {**STEP, "PARTS": 4, "EMBED": False, "NORMS": False}),
    "step's embedding": ("decode.step_norm_kernel", {**STEP, "PARTS": 0, "EMBED": True, "NORMS": False}),
    **{
        f"attention, heads of {width}, {part}": (
            f"attention.{part}_kernel",
            {"KEY_HEADS": 4, "GROUP": 2, "WIDTH": width, **GEMMA},
        )
        for width in (64, 256)
        for part in ATTENTION
    },
}
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # bytes that a program may have, by compute capability


def compiled(case: str, capability: int) -> Any:
    """The kernel's compiled form."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    path, constants = CASES[case]
    module = importlib.import_module(f"tether.accel.kernels.{path.split('.')[0]}")
    kernel, options = getattr(module, path.split(".")[1]), {"num_warps": 4}
    if path.startswith("attention"):
        tile = getattr(module.TILES[constants["WIDTH"]], path.split(".")[1].removesuffix("_kernel"))
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        constants = {**constants, "QUERIES": tile.queries, "KEYS": tile.keys}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES.get(name, HALF) for name in names}
    if path == "decode.step_norm_kernel":
        signature["tokens"] = LONG
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_kernels_of_every_family_compile_and_fit(capability: int):
    """In an interpreter of its own: tests of this process may have told Triton to interpret kernels."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, str(capability)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


if __name__ == "__main__":
    capability = int(sys.argv[1])
    for case in CASES:
        shared = compiled(case, capability).metadata.shared
        assert shared <= SHARED_MEMORY[capability], f"{case}: {shared} bytes of shared memory"
