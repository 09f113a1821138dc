"""Reading prompts on a GPU: tokens a second of the native decoder's prefill, random weights of known shapes.

    python benchmarks/gpu/prompt_reading.py [--shapes 135m 1b 7b] [--lengths 128 512 2048 8192] [--tokens 32768]
        [--repeats 3] [--json FILE]

Each row reads `--tokens` tokens of prompts of one length; a last row reads four short prompts, which is what a sampler
reads when few slots are free. The best of `--repeats` after one warm-up. The rows belong into
`src/tether/plan/calibration.json` under `prompt_reading`; the last lines say what the plan then takes from them.
On a CPU a tiny model is read, which only tests the script itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, Shape, random_model

from tether.plan.calibration import reading_figures

TINY = Shape(64, 128, 3, 4, 2, 512, head_dim=16)
FEW = 4  # prompts of the last row


def operations(shape: Shape, tokens: int, prompt: int) -> float:
    """Operations of a pass, counted as `tether.plan.timing.reading_seconds` counts them."""
    products = shape.layers * shape.layer_weights
    return tokens * (2.0 * products + 2.0 * shape.layers * shape.heads * shape.head_dim * prompt)


def best_seconds(act: Callable[[], object], repeats: int) -> float:
    """The best of several, after one that compiles."""
    best = float("inf")
    for attempt in range(repeats + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        act()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if attempt:
            best = min(best, time.perf_counter() - began)
    return best


def reader(model: Any, prompts: list[list[int]]) -> Callable[[], object]:
    """What reads these prompts into as many slots, or, on a CPU, through the model's own modules."""
    if not torch.cuda.is_available():
        ids = torch.tensor(prompts)
        return lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1)
    from tether.accel.decode_gpu.gpu_decoder import GpuDecoder

    decoder = GpuDecoder(model, len(prompts), len(prompts[0]) + 128, 1)
    return lambda: decoder.prefill(prompts, list(range(len(prompts))))


def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one shape."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SHAPES[name]
    model: Any = random_model(name, device, torch.bfloat16 if device == "cuda" else torch.float32).model
    rows: list[dict[str, Any]] = []
    for length, count in [(n, max(1, options.tokens // n)) for n in options.lengths] + [(min(options.lengths), FEW)]:
        prompts = torch.randint(0, shape.vocabulary, (count, length)).tolist()
        read = reader(model, prompts)
        seconds = best_seconds(read, options.repeats)
        tokens = count * length
        rows.append(
            {
                "shape": name,
                "layers": shape.layers,
                "prompts": count,
                "prompt": length,
                "seconds": round(seconds, 6),
                "tokens_per_second": round(tokens / seconds),
                "operations": operations(shape, tokens, length),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        del read
        gc.collect()
    return rows


def main() -> None:
    """Measure each shape, print a line for each row, and what the plan takes from all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shapes", nargs="+", default=["135m", "1b", "7b"], choices=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 2048, 8192])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if min(*options.lengths, options.tokens, options.repeats) < 1:
        parser.error("--lengths, --tokens and --repeats: at least 1")
    if not torch.cuda.is_available():
        SHAPES["tiny"] = TINY
        options.shapes, options.lengths, options.tokens = ["tiny"], [16, 64], 256
    with torch.inference_mode():
        rows = [row for name in options.shapes for row in measure(name, options)]
    share, layer = reading_figures(rows)
    print(f"operations a second beyond the cost of a pass: {share / 1e12:.1f} T")
    print(f"a layer of a short pass: {layer * 1e6:.0f} microseconds")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
