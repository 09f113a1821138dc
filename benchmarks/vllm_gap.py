"""How far the log-probs of vLLM and of Tether's sampler are from the trainer's, after each of some updates.

    OMP_NUM_THREADS=1 python benchmarks/vllm_gap.py --tokens 100000 --updates 4

Needs `make vllm` (or TETHER_VLLM_PYTHON) and smollm2-135m. Prints one line of JSON for each engine: the mean and the
largest |log-prob of the engine - log-prob of the trainer's forward pass| over all sampled tokens, and tokens a second.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rollout"))

import torch
from test_vllm import MODEL, gaps, model_folder, move, policy_of, pool_on  # pyright: ignore[reportMissingImports]
from vllm_server import serving  # pyright: ignore[reportMissingImports]

from tether.protocols import Sampling
from tether.rollout.chunks import in_chunks
from tether.rollout.native import NativeEngine
from tether.types import Prompt

LENGTH, PROMPTS = 64, 16


def main() -> int:
    """Sample with both by the same weights, and compare with the forward pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000, help="of each engine, at least")
    parser.add_argument("--updates", type=int, default=4)
    options = parser.parse_args()
    policy = policy_of()
    prompts = [Prompt.from_text(f"p{number}", f"Tell me about the number {number}.") for number in range(PROMPTS)]
    native = in_chunks(NativeEngine(policy), 2)
    with serving(model_folder()) as server, tempfile.TemporaryDirectory() as folder, torch.inference_mode(mode=False):
        pool = pool_on(Path(folder), policy, server.url)
        found: dict[str, list[torch.Tensor]] = {"ours": [], "vllm": []}
        seconds = dict.fromkeys(found, 0.0)
        for update in range(options.updates):
            move(policy, update)
            for name, engine in (("ours", native), ("vllm", pool)):
                asked, call = sum(map(len, found[name])), 0
                while sum(map(len, found[name])) - asked < options.tokens / options.updates:
                    engine.policy_version = update
                    began = time.perf_counter()
                    seed = 1000 * update + call
                    rollouts = engine.generate(prompts, Sampling(LENGTH), samples_per_prompt=2, seed=seed)
                    seconds[name] += time.perf_counter() - began
                    found[name].append(gaps(policy, rollouts))
                    call += 1
        pool.close()
    for name, parts in found.items():
        gap = torch.cat(parts)
        record = {"engine": name, "model": MODEL, "updates": options.updates, "tokens": len(gap)}
        record |= {
            "mean": float(gap.mean()),
            "max": float(gap.max()),
            "above_0.001": float((gap > 1e-3).float().mean()),
        }
        print(json.dumps(record | {"tokens_a_second": round(len(gap) / seconds[name], 1)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
