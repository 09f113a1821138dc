"""8-bit AdamW against AdamW: the error of the moments, its effect on learning, and its time.

    python benchmarks/adamw_8bit.py [--steps 1000 5000] [--curve 300] [--json]

Moments: stationary normal gradients whose standard deviation varies within a block by a number of decades. The error of
the second moment is relative to float32, that of the first moment to the root of the second; medians are reported.
Learning: the tiny byte-level model predicts the next byte of docs/; the result is the mean loss of the last tenth of
the steps. For comparison, `nearest` rounds to the nearest of 255 (127) magnitudes below the block's largest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tether.hub.tiny_model import tiny_model
from tether.learner import adamw
from tether.learner.adamw import BLOCK, SIGNED, UNSIGNED, Codes, MixedAdamW

BETAS = (0.9, 0.999)
DOCS = Path(__file__).resolve().parent.parent / "docs"


class Nearest:
    """Rounds to the nearest level of one geometric grid below the block's largest magnitude."""

    def __init__(self, steps: int, floor: float) -> None:
        self.steps, self.log_ratio = steps, -math.log(floor) / (steps - 1)

    def close(self, x: Tensor, key: int = 0, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Signs and levels in one float, and the scale of each block."""
        del key, before
        flat = x.reshape(-1)
        blocks = nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1).clamp_min(1e-38)
        step = (blocks.abs() / scales[:, None]).log().div(self.log_ratio).add(self.steps).round().clamp(0, self.steps)
        codes = torch.where(blocks == 0.0, 0.0, torch.copysign(step.clamp_min(1.0), blocks))
        return codes.view(-1)[: len(flat)], scales

    def open(self, codes: Tensor, scales: Tensor, shape: torch.Size) -> Tensor:
        """Decode the numbers."""
        step = nn.functional.pad(codes, (0, -len(codes) % BLOCK)).view(-1, BLOCK)
        sizes = ((step.abs() - self.steps) * self.log_ratio).exp() * scales[:, None]
        return torch.where(step == 0.0, 0.0, torch.copysign(sizes, step)).view(-1)[: len(codes)].view(shape)


WAYS: dict[str, tuple[Codes | Nearest, Codes | Nearest]] = {
    "stochastic": (SIGNED, UNSIGNED),
    "nearest": (Nearest(127, 1e-5), Nearest(255, 1e-9)),
}


def moment_errors(way: str, decades: float, steps: list[int]) -> Iterator[dict[str, Any]]:
    """Both moments after each of `steps`."""
    draw, size = torch.Generator().manual_seed(0), 8 * BLOCK
    scale = 10.0 ** -torch.empty(size).uniform_(0.0, decades, generator=draw)
    signed, unsigned = WAYS[way]
    exact_mean, exact_square = torch.zeros(size), torch.zeros(size)
    mean, square = signed.close(exact_mean, 0), unsigned.close(exact_square, 0)
    for step in range(1, max(steps) + 1):
        gradient = torch.randn(size, generator=draw) * scale
        exact_mean.lerp_(gradient, 1.0 - BETAS[0])
        exact_square.lerp_(gradient.square(), 1.0 - BETAS[1])
        opened = signed.open(*mean, exact_mean.shape).lerp_(gradient, 1.0 - BETAS[0])
        opened_square = unsigned.open(*square, exact_mean.shape).lerp_(gradient.square(), 1.0 - BETAS[1])
        mean, square = signed.close(opened, 2 * step, mean[1]), unsigned.close(opened_square, 2 * step + 1, square[1])
        if step in steps:
            off = (unsigned.open(*square, exact_mean.shape) - exact_square) / exact_square
            off_mean = (signed.open(*mean, exact_mean.shape) - exact_mean) / exact_square.sqrt()
            found = {"median": off.abs().median(), "bias": off.mean(), "first_moment": off_mean.abs().median()}
            numbers = {name: round(float(number), 4) for name, number in found.items()}
            yield {"way": way, "decades": decades, "step": step, **numbers}


def curve(eight_bit: str | None, steps: int, seed: int) -> list[float]:
    """Losses of the tiny model on the docs; `eight_bit` names a rounding method, None is plain AdamW."""
    if eight_bit is not None:
        adamw.SIGNED, adamw.UNSIGNED = WAYS[eight_bit]  # pyright: ignore[reportAttributeAccessIssue]
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
    data = torch.tensor(list(text.encode()), dtype=torch.long)
    model, draw = tiny_model(seed), torch.Generator().manual_seed(seed)
    parameters = [{"params": list(model.parameters())}]
    optimizer = MixedAdamW(parameters, lr=2e-3, betas=BETAS, eight_bit=eight_bit is not None, seed=seed)
    losses: list[float] = []
    for _ in range(steps):
        starts = torch.randint(0, len(data) - 65, (16, 1), generator=draw)
        rows = data[starts + torch.arange(65)]
        logits = model(rows[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def seconds_a_step(eight_bit: bool, numbers: int = 2**22) -> float:
    """Seconds per step for `numbers` weights, the best of three."""
    weight = nn.Parameter(torch.zeros(numbers))
    optimizer, best = MixedAdamW([{"params": [weight]}], eight_bit=eight_bit), math.inf
    for _ in range(4):  # the first allocates the state
        weight.grad = torch.randn(numbers)
        began = time.perf_counter()
        optimizer.step()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--curve", type=int, default=300, help="steps of the learning curve; 0 skips it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {"moments": [], "seconds": {}, "loss": {}}

    def tell(part: str) -> None:
        if not options.json:
            print(part, flush=True)

    for way, decades in itertools.product(WAYS, (0.0, 1.0, 3.0)):
        for row in moment_errors(way, decades, options.steps):
            found["moments"].append(row)
            tell("  ".join(f"{name} {value}" for name, value in row.items()))
    for name, eight_bit in (("full", False), ("8bit", True)):
        seconds = seconds_a_step(eight_bit)
        found["seconds"][name] = seconds
        tell(f"{name}: {1e3 * seconds:.0f} ms per step of 4M weights")
    tail = max(1, options.curve // 10)
    for name, way in (("full", None), ("8bit", "stochastic"), ("nearest", "nearest")) if options.curve else ():
        losses = [curve(way, options.curve, seed) for seed in range(options.seeds)]
        found["loss"][name] = [round(sum(each[-tail:]) / tail, 4) for each in losses]
        tell(f"{name}: loss {found['loss'][name]} after {options.curve} steps")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
