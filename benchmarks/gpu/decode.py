"""Decoding on a GPU: tokens per second of the native engine's decoder, random weights in the shape of real models.

    python benchmarks/gpu/decode.py [--shapes 135m 1b] [--slots 256] [--prompt 128] [--new 128] [--tail] [--json]

The whole distribution is sampled at temperature 1, with log-probs. `decode` counts from when all prompts are read;
`call` counts the reading of the prompts too. With `--tail`, about one token id in 128 ends an answer, at most 1024
tokens are drawn, and there are four times as many answers as slots: the rate is per token of an answer, so idle slots
and the reading of prompts in between count against it.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tether.protocols import Sampling
from tether.rollout.gpu.batch import GpuBatch
from tether.rollout.gpu.decoder import GpuDecoder

SHAPES: dict[str, dict[str, int]] = {
    "135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
VOCABULARY = 49152


def random_model(shape: str, device: str, dtype: torch.dtype) -> Any:
    """A Llama of that shape with random weights."""
    make: Any = LlamaConfig
    config = make(
        vocab_size=VOCABULARY, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True, **SHAPES[shape]
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval()


def gap(model: Any, decoder: GpuDecoder, tokens: int) -> dict[str, float]:
    """How far the log-probs of a few sampled answers are from the model's own forward pass."""
    prompts = {0: torch.randint(0, VOCABULARY, (tokens,)).tolist(), 1: torch.randint(0, VOCABULARY, (7,)).tolist()}
    uniforms = 1.0 - torch.rand(4, 64, dtype=torch.float64)
    drawn = GpuBatch(decoder, 4, prompts, [0, 0, 1, 1], uniforms, Sampling(64), set()).run()
    gaps = []
    for group, answer in zip((0, 0, 1, 1), drawn, strict=True):
        ids = torch.tensor([[*prompts[group], *answer.tokens.tolist()]], device=decoder.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, -65:-1].float()
        own = logits.log_softmax(-1).gather(1, ids[0, -64:, None])[:, 0].cpu()
        gaps.append((own - answer.behavior).abs())
    every = torch.cat(gaps)
    return {"mean": float(every.mean()), "max": float(every.max())}


class Run:
    """One model, its decoder, and requests to it."""

    def __init__(self, model: Any, slots: int, prompt: int, new: int) -> None:
        self.slots, self.prompt, self.new = slots, prompt, new
        self.decoder = GpuDecoder(model, slots, prompt + new, new)

    def once(self, answers: int, stops: set[int]) -> tuple[GpuBatch, int, float, float]:
        """The batch, tokens drawn, seconds from when the first prompts were read, and seconds in all."""
        prompts = {i: torch.randint(0, VOCABULARY, (self.prompt,)).tolist() for i in range(answers)}
        uniforms = 1.0 - torch.rand(answers, self.new, dtype=torch.float64)
        torch.cuda.synchronize()
        began = time.perf_counter()
        batch = GpuBatch(self.decoder, self.slots, prompts, list(prompts), uniforms, Sampling(self.new), stops)
        batch.admit()
        torch.cuda.synchronize()
        read = time.perf_counter()
        drawn = batch.run()
        ended = time.perf_counter()
        return batch, sum(len(answer.tokens) for answer in drawn), ended - read, ended - began

    def best(self, answers: int, stops: set[int], repeats: int) -> dict[str, Any]:
        """The best of several requests, after one that compiles and captures."""
        self.once(answers, stops)
        runs = [self.once(answers, stops) for _ in range(repeats)]
        batch, tokens, seconds, whole = min(runs, key=lambda run: run[2])
        return {
            "tokens": tokens,
            "decode_tokens_per_second": round(tokens / seconds),
            "call_tokens_per_second": round(tokens / whole),
            "milliseconds_per_step": round(seconds / batch.steps * 1e3, 4),
            "steps": batch.steps,
            "live_share": round(tokens / batch.slot_steps, 3),
            "seconds": [round(run[2], 4) for run in runs],
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }


def main() -> None:
    """Measure each shape and print a line for it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tail", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        for shape in options.shapes:
            torch.cuda.reset_peak_memory_stats()
            model = random_model(shape, "cuda", torch.bfloat16)
            run = Run(model, options.slots, options.prompt, options.new)
            results[shape] = run.best(options.slots, set(), options.repeats)
            results[shape]["gap"] = gap(model, run.decoder, options.prompt)
            print(shape, json.dumps(results[shape]), flush=True)
            if options.tail:
                tail = Run(model, options.slots, options.prompt, 1024)
                results[shape]["tail"] = tail.best(4 * options.slots, set(range(0, VOCABULARY, 128)), options.repeats)
                print(shape, "long tail", json.dumps(results[shape]["tail"]), flush=True)
            del run, model
            torch.cuda.empty_cache()
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
