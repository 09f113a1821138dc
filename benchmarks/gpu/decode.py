"""Decoding on a GPU: tokens per second of the native engine's decoder, random weights in the shape of real models.

    python benchmarks/gpu/decode.py [--shapes 135m 1b] [--slots 256] [--prompt 128] [--new 128] [--tail] [--steps]
                                    [--repeats 3] [--rank 16] [--top-k 50] [--top-p 0.9] [--json]

Every token is sampled with its log-prob. `decode` starts after the prefill of the first prompts; `call` includes it.
With `--tail` about one token id in 128 ends an answer and at most 1024 tokens are sampled, as in a rollout: 1,024
answers to as many prompts in 1,024 slots that empty, and a queue of 4,096 answers, four to each of 1,024 prompts, over
1,024 slots and over the number of slots of the full batch (`--slots`).
The rate counts tokens of answers, so idle slots, small steps and prefills in between lower it.
`--steps` times a step for each number of slots, at a length of 192 tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tether.accel.decode_gpu.gpu_decoder import SIZES, GpuBatch, GpuDecoder
from tether.models.lora import inject_lora, lora_config
from tether.protocols import Sampling

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
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MAX_LENGTH, ENDING = 1024, set(range(0, VOCABULARY, 128))  # with --tail: the maximum length, and the end tokens
MAX_SLOTS = 1024  # slots, as with `rollout.max_num_seqs: auto`


def random_model(shape: str, device: str, dtype: torch.dtype, rank: int = 0) -> Any:
    """A Llama of that shape with random weights, and adapters of that rank on every linear layer of a block."""
    make: Any = LlamaConfig
    config = make(
        vocab_size=VOCABULARY, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True, **SHAPES[shape]
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    model = model.to(dtype).eval()
    if rank:
        for parameter in inject_lora(model, lora_config(rank, rank, TARGETS), seed=0):
            parameter.data.normal_(std=0.02)
        model.to(device)
    return model


def gap(model: Any, decoder: GpuDecoder, tokens: int, samples: int, new: int) -> dict[str, float]:
    """The difference between sampled log-probs and the model's own forward pass, for a long and a short prompt."""
    prompts = {0: torch.randint(0, VOCABULARY, (tokens,)).tolist(), 1: torch.randint(0, VOCABULARY, (7,)).tolist()}
    uniforms = 1.0 - torch.rand(2 * samples, new, dtype=torch.float64)
    groups = [0] * samples + [1] * samples
    drawn = GpuBatch(decoder, 2 * samples, prompts, groups, uniforms, Sampling(new), set()).run()
    gaps = []
    for group, first in ((0, 0), (1, samples)):
        answers = drawn[first : first + samples]
        ids = torch.tensor([[*prompts[group], *answer.tokens.tolist()] for answer in answers], device=decoder.device)
        logits = model(input_ids=ids, use_cache=False).logits[:, -new - 1 : -1].float()
        own = logits.log_softmax(-1).gather(2, ids[:, -new:, None])[..., 0].cpu()
        gaps.append((own - torch.stack([answer.behavior for answer in answers])).abs())
    every = torch.cat(gaps)
    return {"mean": float(every.mean()), "max": float(every.max())}


class Run:
    """One model, its decoder, and requests to it."""

    def __init__(self, model: Any, slots: int, prompt: int, sampling: Sampling) -> None:
        self.slots, self.prompt, self.sampling = slots, prompt, sampling
        self.decoder = GpuDecoder(model, slots, prompt + sampling.max_new_tokens, sampling.max_new_tokens)

    def once(self, answers: int, samples: int, stops: set[int]) -> tuple[GpuBatch, int, float, float]:
        """The batch, tokens sampled, seconds since the first prefill, and total seconds."""
        prompts = {i: torch.randint(0, VOCABULARY, (self.prompt,)).tolist() for i in range(answers // samples)}
        groups = [group for group in prompts for _ in range(samples)]
        uniforms = 1.0 - torch.rand(answers, self.sampling.max_new_tokens, dtype=torch.float64)
        torch.cuda.synchronize()
        began = time.perf_counter()
        batch = GpuBatch(self.decoder, self.slots, prompts, groups, uniforms, self.sampling, stops)
        batch.admit()
        torch.cuda.synchronize()
        read = time.perf_counter()
        drawn = batch.run()
        ended = time.perf_counter()
        return batch, sum(len(answer.tokens) for answer in drawn), ended - read, ended - began

    def best(self, answers: int, stops: set[int], repeats: int, samples: int = 1, warm: bool = False) -> dict[str, Any]:
        """The best of several requests, after a warm-up that compiles and captures if needed."""
        before = torch.cuda.memory_reserved() + torch.cuda.mem_get_info()[0]
        if not warm:
            self.once(answers, samples, stops)
        graphs = before - torch.cuda.memory_reserved() - torch.cuda.mem_get_info()[0]  # allocated outside torch
        runs = [self.once(answers, samples, stops) for _ in range(repeats)]
        batch, tokens, seconds, whole = min(runs, key=lambda run: run[2] / run[1])
        decoder = self.decoder
        return {
            "answers": answers,
            "slots": self.slots,
            "tokens": tokens,
            "decode_tokens_per_second": round(tokens / seconds),
            "call_tokens_per_second": round(tokens / whole),
            "milliseconds_per_step": round(seconds / batch.steps * 1e3, 4),
            "steps": batch.steps,
            "live_share": round(tokens / batch.slot_steps, 3),
            "seconds": [round(run[2], 4) for run in runs],
            "captures": decoder.captures,
            "capture_seconds": round(decoder.capture_seconds, 2),
            "cache_gib": round(decoder.cache.memory.size / 2**30, 2),
            "graphs_gib": round(graphs / 2**30, 2),
            "peak_gib_of_torch": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }

    def steps(self, repeats: int = 30) -> dict[int, float]:
        """Milliseconds of one step for each number of slots, all active at 192 tokens."""
        state, found = self.decoder.state, {}
        self.decoder.sample_by(self.sampling, set())
        for n in [size for size in SIZES if size <= self.slots]:
            self.decoder.advance(n, self.sampling, 1)
            times = []
            for _ in range(3):
                state.columns.fill_(192)
                state.drawn.zero_()
                state.limits.fill_(1 << 30)
                state.live.fill_(True)
                torch.cuda.synchronize()
                began = time.perf_counter()
                self.decoder.advance(n, self.sampling, repeats)
                torch.cuda.synchronize()
                times.append((time.perf_counter() - began) / repeats * 1e3)
            found[n] = round(min(times), 3)
        return found

    def handed_back(self) -> dict[str, float]:
        """Milliseconds to release the cache's memory, and to allocate and clear it again."""
        memory, times = self.decoder.cache.memory, []
        for act in (memory.hand_back, memory.take, self.decoder.cache.clear):
            torch.cuda.synchronize()
            began = time.perf_counter()
            act()
            torch.cuda.synchronize()
            times.append(round((time.perf_counter() - began) * 1e3, 2))
        return dict(zip(("hand_back", "take", "clear"), times, strict=True))


def measure(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """All requested measurements for one shape."""
    torch.cuda.reset_peak_memory_stats()
    model = random_model(shape, "cuda", torch.bfloat16, options.rank)
    settings = {"top_k": options.top_k, "top_p": options.top_p}
    run = Run(model, options.slots, options.prompt, Sampling(options.new, **settings))
    found = run.best(options.slots, set(), options.repeats)
    if not options.top_k and options.top_p == 1.0:
        found["gap"] = gap(model, run.decoder, options.prompt, min(64, options.slots // 2), min(64, options.new))
    print(shape, json.dumps(found), flush=True)
    del run
    if not (options.tail or options.steps):
        return found

    def tell(name: str, numbers: dict[str, Any]) -> None:
        if rate := numbers.get("decode_tokens_per_second"):
            numbers["share_of_full_rate"] = round(rate / found["decode_tokens_per_second"], 3)
        found[name] = numbers
        print(shape, name, json.dumps(numbers), flush=True)

    long = Sampling(MAX_LENGTH, **settings)
    wide = Run(model, MAX_SLOTS, options.prompt, long)
    if options.steps:
        tell("milliseconds per step by slots", {str(slots): taken for slots, taken in wide.steps().items()})
    if options.tail:
        tell("tail", wide.best(MAX_SLOTS, ENDING, options.repeats))
        tell("queue", wide.best(4 * MAX_SLOTS, ENDING, options.repeats, samples=4, warm=True))
    tell("cache memory, milliseconds", wide.handed_back())
    del wide
    if options.tail:
        narrow = Run(model, options.slots, options.prompt, long)
        tell("queue, narrow", narrow.best(4 * MAX_SLOTS, ENDING, options.repeats, samples=4))
    return found


def main() -> None:
    """Measure each shape and print a line for it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tail", action="store_true")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device; benchmarks/rollout_cpu.py measures a CPU")
    results: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        for shape in options.shapes:
            results[shape] = measure(shape, options)
            torch.cuda.empty_cache()
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
