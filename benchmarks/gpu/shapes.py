"""Shapes of known models with random weights, made on the device, and what a pass through them costs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from smollm_shape import NEVER, Numbers

from tether.models.load import LoadedModel


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes; Qwen2 has biases on queries, keys and values."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 49152
    tied: bool = True
    qwen: bool = False
    head_dim: int = 64

    @property
    def layer_weights(self) -> int:
        """Numbers in one layer's matrices."""
        attention = 2 * self.heads + 2 * self.kv_heads
        return self.hidden * (attention * self.head_dim + 3 * self.inner)


SHAPES = {
    "135m": Shape(576, 1536, 30, 9, 3),
    "360m": Shape(960, 2560, 32, 15, 5),
    "1b": Shape(2048, 8192, 16, 32, 8),
    "3b": Shape(2048, 11008, 36, 16, 2, 151936, True, True, 128),
    "7b": Shape(3584, 18944, 28, 28, 4, 152064, False, True, 128),
    "14b": Shape(5120, 13824, 48, 40, 8, 152064, False, True, 128),
    "32b": Shape(5120, 27648, 64, 40, 8, 152064, False, True, 128),
    "65b": Shape(8192, 22016, 80, 64, 8, 49152, False, False, 128),
}


def random_model(name: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    """A model of that shape whose weights are drawn on the device, in their own type; nothing ends its answers."""
    shape = SHAPES[name]
    make, kind = (Qwen2Config, Qwen2ForCausalLM) if shape.qwen else (LlamaConfig, LlamaForCausalLM)
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "max_position_embeddings": 8192,
        "tie_word_embeddings": shape.tied,
    }  # fmt: skip
    if shape.qwen:
        sizes |= {"use_sliding_window": False, "max_window_layers": shape.layers}
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: Any = kind(make(**sizes))
    finally:
        torch.set_default_dtype(before)
    return LoadedModel(model.eval(), Numbers(), end_id=NEVER, pad_id=0, context_length=8192)  # pyright: ignore[reportArgumentType]


def forward_operations(shape: Shape, rows: int, length: int, read: int) -> tuple[float, float]:
    """`(backbone, head)`: operations (2 a multiplication and addition) of a pass over `rows` rows of `length` tokens.

    The states of `read` tokens a row are read: the last layer makes keys and values of all tokens, and the rest of
    these alone. Attention counts what causality leaves.
    """
    keys = 2 * shape.hidden * 2 * shape.kv_heads * shape.head_dim
    mixing = 2 * shape.heads * shape.head_dim * length  # for one token on average: half of two products
    whole = 2 * shape.layer_weights + mixing
    backbone = (shape.layers - 1) * length * whole + length * keys + read * (whole - keys)
    return float(rows * backbone), float(rows * read * 2 * shape.vocabulary * shape.hidden)


def matrix_rate() -> float:
    """Operations a second of an 8192³ bf16 product of random numbers: the best of five runs of ten."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            torch.mm(left, right)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 10)
    return 2 * 8192**3 / (min(times[1:]) / 1e3)
