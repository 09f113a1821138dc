"""Rollouts on a CPU against `transformers` generate: the same model, prompts, lengths, threads and process.

    python benchmarks/rollout_cpu.py [--new 64] [--batch 32] [--prompt 32] [--ends] [--random] [--transformers] [--json]

Both sample at temperature 1 from the whole vocabulary, at most `batch` answers at a time. Without `--ends` no token
ends an answer, so both produce answers x new tokens. With `--ends` one token id in twenty ends an answer, as in
training, and there are four times as many answers as fit a batch. The two alternate, and the best time of each is
reported, because single times vary on a shared machine. Times are those of whole calls, including prefill and, for
Tether, log-probs and decoding to text. `--transformers` also times Tether's transformers engine, which runs any model.
The last line with `--json` has the `ratio` of tokens per second.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from smollm_shape import matrix_rate, random_ids, random_prompts, smollm2
from transformers import GenerationConfig

from tether.models.load import LoadedModel
from tether.protocols import Sampling
from tether.rollout.native import NativeEngine


def contenders(loaded: LoadedModel, options: argparse.Namespace) -> dict[str, Callable[[], int]]:
    """The functions to time, by name; each call returns the number of tokens it produced."""
    answers = options.batch * (4 if options.ends else 1)
    different = answers // options.samples
    ids, prompts = random_ids(different, options.prompt), random_prompts(different, options.prompt)
    stops = tuple(range(7, 49152, 20)) if options.ends else ()
    sampling = Sampling(options.new, stop_token_ids=stops)
    model: Any = loaded.model
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=options.new, pad_token_id=loaded.pad_id,
        num_return_sequences=options.samples, eos_token_id=list(stops) or None,
    )  # fmt: skip

    def generate() -> int:
        made = 0
        for part in ids.split(options.batch // options.samples):
            with torch.inference_mode():
                new = model.generate(part, attention_mask=torch.ones_like(part))[:, options.prompt :]
            ended = torch.isin(new, torch.tensor(stops, dtype=new.dtype)).int()
            made += int((ended.cumsum(dim=1) - ended == 0).sum())  # tokens after an answer's end are padding
        return made

    def rollouts(engine: NativeEngine) -> int:
        made = engine.generate(prompts, sampling, samples_per_prompt=options.samples, seed=0)
        return sum(rollout.response_length for rollout in made)

    engine = NativeEngine(loaded, max_num_seqs=options.batch)
    assert not engine.notices, engine.notices
    found: dict[str, Callable[[], int]] = {"transformers generate": generate, "tether": lambda: rollouts(engine)}
    if options.transformers:
        transformers = NativeEngine(loaded, max_num_seqs=options.batch)
        transformers._distrusted = "asked for"
        found["tether, transformers engine"] = lambda: rollouts(transformers)
    return found


def main() -> None:
    """Time them in turn and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--samples", type=int, default=1, help="answers to each prompt; batch / samples prompts")
    parser.add_argument("--ends", action="store_true", help="some tokens end an answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--random", action="store_true", help="random weights of the same shape: no download")
    parser.add_argument("--transformers", action="store_true", help="also time Tether's transformers engine")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.batch % options.samples:
        parser.error("--samples must divide --batch")
    torch.set_num_threads(options.threads)
    ways = contenders(smollm2(random=options.random), options)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            made = way()
            assert options.ends or made == options.batch * options.new, f"{name} produced another number of tokens"
            seconds[name].append(time.perf_counter() - began)
            rates[name].append(made / seconds[name][-1])
    print(
        f"{options.batch} x ({options.prompt} + {options.new}) tokens, {options.samples} answers per prompt, "
        f"{'with end tokens, ' * options.ends}fp32, "
        f"{options.threads} threads, best of {options.repeats}, load average {os.getloadavg()[0]:.1f}, "
        f"{matrix_rate():.0f} GFLOP/s"
    )
    speeds = {name: max(each) for name, each in rates.items()}
    base = speeds["transformers generate"]
    for name, speed in speeds.items():
        spread = " ".join(f"{value:.2f}" for value in seconds[name])
        print(f"{name:28s} {speed:8.1f} tok/s {speed / base:6.2f}x   seconds: {spread}")
    if options.json:
        best = {name: round(speed, 1) for name, speed in speeds.items()}
        print(json.dumps({"ratio": speeds["tether"] / base, "tokens_per_second": best, "seconds": seconds}))


if __name__ == "__main__":
    main()
