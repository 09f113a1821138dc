"""The Triton kernels against their plain twins, run by Triton's interpreter. Skipped where Triton is not installed."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from typing import Any

import numpy
import pytest
import torch
import transformers

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a device", allow_module_level=True)
if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("Triton's interpreter needs an older numpy", allow_module_level=True)
if "triton" in sys.modules and not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("Triton was imported before it could be told to interpret", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

from tether.protocols import Sampling
from tether.rollout.gpu import fused, reference
from tether.rollout.gpu.batch import GpuBatch
from tether.rollout.gpu.decoder import GpuDecoder

SHAPE: dict[str, Any] = {
    "vocab_size": 1100,  # two blocks of ids, the second not full
    "hidden_size": 192,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])  # plain, with biases, with norms of the heads
@torch.inference_mode()
def test_the_kernels_draw_what_their_plain_twins_draw(kind: str):
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SHAPE)).eval()
    for parameter in model.parameters():
        parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(0.2 * torch.randn_like(parameter))
    prompts = {0: [5, 6, 7], 1: torch.randint(0, 1100, (90,)).tolist(), 2: [9]}
    uniforms = 1.0 - torch.rand(4, 3, dtype=torch.float64)
    found = []
    for kernels in (reference, fused):
        decoder = GpuDecoder(model, 4, 128, 3, kernels=kernels)  # few slots: attention is split over the columns
        found.append(GpuBatch(decoder, 4, prompts, [0, 0, 1, 2], uniforms, Sampling(3, temperature=0.8), {11}).run())
    for plain, fast in zip(*found, strict=True):
        assert plain.tokens.tolist() == fast.tokens.tolist()
        assert torch.allclose(plain.behavior, fast.behavior, atol=1e-4)


@pytest.mark.parametrize(
    "logits, uniform, token",
    [
        ([0.0, 0.0, 0.0, 0.0], 0.25, 0),
        ([0.0, 0.0, 0.0, 0.0], 0.26, 1),
        ([0.0, -torch.inf, 0.0, 0.0], 0.5, 2),
        ([0.0, 0.0, 0.0, -torch.inf], 1.0, 2),
        ([0.0, torch.nan, 0.0, 0.0], 0.5, -1),
        ([0.0, torch.inf, 0.0, 0.0], 0.5, -1),
        ([-torch.inf] * 4, 0.5, -1),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, where inf - inf is what is meant
@torch.inference_mode()
def test_a_draw_is_the_first_id_whose_cumulative_probability_reaches_the_uniform(
    logits: list[float], uniform: float, token: int
):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))  # pyright: ignore[reportCallIssue]
    decoder = GpuDecoder(model, 2, 8, 2, kernels=fused)
    decoder.work.logits[:2].fill_(-torch.inf)
    decoder.work.logits[0, [3, 700, 1050, 1099]] = torch.tensor(logits)
    decoder.work.logits[1, 4] = 0.0
    state = decoder.state
    state.live.copy_(torch.tensor([True, False]))
    state.uniforms.fill_(uniform)
    state.limits.fill_(2)
    fused.draw(decoder.work, 2, state, Sampling(2))
    drawn = [3, 700, 1050, 1099][token] if token >= 0 else -1
    assert state.answers[:, 0].tolist() == [drawn, 0], "the idle slot keeps what it had"
    assert state.live.tolist() == [drawn >= 0, False]
    assert state.drawn.tolist() == state.columns.tolist() == [1, 0]
    if drawn >= 0:
        possible = sum(value == 0.0 for value in logits)
        assert float(state.behavior[0, 0]) == pytest.approx(-math.log(possible), abs=1e-6)
