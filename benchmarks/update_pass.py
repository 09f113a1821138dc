"""The update of several families with the pass over packed tokens and by the models' own modules, taking turns.

    python benchmarks/update_pass.py [--families llama gemma2 gemma3 olmo2] [--device cuda --dtype bfloat16]
                                     [--rows 16] [--prompt 64] [--new 64] [--rank 0] [--repeats 5] [--json]

Random weights in one shape of about 80 million parameters. A micro-batch has rows of different lengths: prompts padded
on the left, answers on the right. An update is a forward pass, the log-probabilities of the answers, and the backward
pass. On a CPU in float32 the pass is the plain backend, on a CUDA device in half precision the fused one. The ratio is
that of the best times; gradients of both are compared.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from tether.models.backbones import Backbone, OutputLayer, backbone_of, hidden_states
from tether.models.lora import inject_lora, lora_config
from tether.types import Sequences

SHAPE: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
GEMMA = {"query_pre_attn_scalar": 64, "sliding_window": 64}  # of a length that matters here
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 64}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", GEMMA),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def random_model(family: str, device: str, dtype: torch.dtype, rank: int) -> Any:
    """A model of the family with random weights, and adapters of that rank on every linear layer of a block."""
    config, kind, given = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**SHAPE, **given)).eval()
    if rank:
        model.requires_grad_(False)
        for parameter in inject_lora(model, lora_config(rank, rank, TARGETS), seed=0):
            parameter.data.normal_(std=0.02)
    return model.to(device, dtype)


def micro_batch(rows: int, prompt: int, new: int, device: str) -> Sequences:
    """Prompts of a half to all of `prompt` tokens, answers of one to `new`."""
    draws = torch.Generator().manual_seed(1)
    prompts = torch.randint(prompt // 2, prompt + 1, (rows, 1), generator=draws)
    answers = torch.randint(1, new + 1, (rows, 1), generator=draws)
    column = torch.arange(prompt + new)
    mask = (column >= prompt - prompts) & (column < prompt + answers)
    tokens = torch.randint(3, 32000, mask.shape, generator=draws)
    batch = Sequences(tokens=tokens, attention_mask=mask, response_mask=mask & (column >= prompt))
    return batch.to(device)


def timed(update: Callable[[], object], device: str) -> float:
    """Seconds of one update, all of it done."""
    began = time.perf_counter()
    update()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(family: str, options: argparse.Namespace) -> dict[str, Any]:
    """Best times of both, their ratio, and the distance of their gradients."""
    model = random_model(family, options.device, getattr(torch, options.dtype), options.rank)
    batch = micro_batch(options.rows, options.prompt, options.new, options.device)
    backbone, output = Backbone(backbone_of(model)), OutputLayer.of(model)
    own: Any = backbone.model
    assert backbone.fast.reason is None, backbone.fast.reason
    wanted = torch.zeros_like(batch.response_mask)
    wanted[:, :-1] = batch.response_mask[:, 1:]  # the states before the answers' tokens

    def update(states: Callable[[], torch.Tensor]) -> None:
        model.zero_grad()
        output.logprobs(states(), batch)[0].sum().backward()

    passes = {
        "packed": lambda: update(lambda: backbone(batch, wanted)),
        "modules": lambda: update(lambda: hidden_states(own, batch)),
    }
    times: dict[str, list[float]] = {name: [] for name in passes}
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(options.repeats + 1):
        for name, run in passes.items():
            times[name].append(timed(run, options.device))
            found = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
            gradients[name] = torch.cat(found)
    best = {name: min(each[1:]) for name, each in times.items()}
    distance = (gradients["packed"] - gradients["modules"]).norm() / gradients["modules"].norm()
    return {
        "family": family,
        "backend": backbone.fast.backend,
        **best,
        "ratio": best["modules"] / best["packed"],
        "gradient_distance": float(distance),
    }


def main() -> None:
    """Measure each family and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["llama", "gemma2", "gemma3", "olmo2"], choices=FAMILIES)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    for name, value in (("rows", 16), ("prompt", 64), ("new", 64), ("rank", 0), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = []
    for family in options.families:
        found = measure(family, options)
        results.append(found)
        print(
            f"{family:8} {found['backend']:6} packed {found['packed']:7.3f} s, modules {found['modules']:7.3f} s: "
            f"{found['ratio']:.2f}x, gradients differ by {found['gradient_distance']:.1e}",
            flush=True,
        )
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
