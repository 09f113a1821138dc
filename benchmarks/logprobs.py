"""Chunked log-probs and entropies against computing all logits at once: memory, time and gradients.

    python benchmarks/logprobs.py [--tokens 4096] [--vocabulary 49152] [--width 576] [--json]

Each method runs in its own process, so that its peak memory can be measured: the growth of the resident set since
before the first forward pass. Times are the best of several repeats.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from tether.ops.logprobs import chunked_logprobs


def plain(states: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The usual method: all logits at once."""
    logprobs = torch.log_softmax(states @ weight.T, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


def measure(way: str, tokens: int, vocabulary: int, width: int, repeats: int, answer: Connection) -> None:
    """Forward and backward `repeats` times; sends seconds, peak bytes and the gradients."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) * width**-0.5).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    slopes = torch.randn(2, tokens, generator=generator)
    compute = plain if way == "plain" else chunked_logprobs
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds, logprobs = [], torch.empty(0)
    for _ in range(repeats):
        states.grad = weight.grad = None
        began = time.perf_counter()
        logprobs, entropy = compute(states, weight, targets)
        (logprobs @ slopes[0] + entropy @ slopes[1]).backward()
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert states.grad is not None and weight.grad is not None
    answer.send((min(seconds), peak, logprobs.detach().numpy(), states.grad.numpy(), weight.grad.numpy()))


def run(way: str, options: argparse.Namespace) -> tuple[float, int, Tensor, Tensor, Tensor]:
    """Run one method in its own process."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    sizes = (options.tokens, options.vocabulary, options.width, options.repeats)
    process = context.Process(target=measure, args=(way, *sizes, theirs))
    process.start()
    seconds, peak, logprobs, by_states, by_weight = mine.recv()
    process.join()
    return seconds, peak, torch.from_numpy(logprobs), torch.from_numpy(by_states), torch.from_numpy(by_weight)


def main() -> None:
    """Run both and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {way: run(way, options) for way in ("plain", "chunked")}
    print(
        f"{options.tokens} tokens x {options.vocabulary} vocabulary x {options.width} wide, forward and backward, fp32"
    )
    for way, (seconds, peak, *_) in results.items():
        print(f"{way:8s} {seconds:7.2f} s {peak / 2**20:8.0f} MiB")
    ours, usual = results["chunked"], results["plain"]
    names = ("log-probs", "gradient by states", "gradient by weight")
    gaps = {name: float((a - b).norm() / b.norm()) for name, a, b in zip(names, ours[2:], usual[2:], strict=True)}
    for name, gap in gaps.items():
        print(f"relative difference of {name}: {gap:.1e}")
    memory, duration = ours[1] / usual[1], ours[0] / usual[0]
    print(f"memory {memory:.3f} of the plain method, time {duration:.2f} of it")
    if options.json:
        print(json.dumps({"ratio": memory, "memory_ratio": memory, "time_ratio": duration, "differences": gaps}))


if __name__ == "__main__":
    main()
