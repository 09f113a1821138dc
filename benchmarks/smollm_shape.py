"""Shared by the CPU benchmarks: SmolLM2-135M or its shape, prompts of an exact length, the machine's matrix rate."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tether.models.load import LoadedModel, load_causal_lm
from tether.protocols import RewardFn
from tether.types import Prompt, Score

NEVER = -2  # an end token that no model samples
SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


class Numbers:
    """A tokenizer whose text is token ids written as numbers, so that prompts have an exact length."""

    eos_token_id = NEVER

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:  # noqa: ARG002
        """The numbers in the text; other words, such as the probe for a BOS token, have no ids."""
        return [int(word) for word in text.split() if word.isdigit()]

    def batch_decode(self, rows: list[list[int]], **_: Any) -> list[str]:
        """The ids as text."""
        return [" ".join(map(str, row)) for row in rows]


def smollm2(*, random: bool) -> LoadedModel:
    """SmolLM2-135M, or a model of its shape with random weights; its answers never end early."""
    if not random:
        loaded = load_causal_lm("smollm2-135m", dtype="float32", device="cpu", seed=0)
        return dataclasses.replace(loaded, tokenizer=cast(Any, Numbers()), end_id=NEVER)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    return LoadedModel(model, cast(Any, Numbers()), end_id=NEVER, pad_id=0, context_length=8192)


def random_ids(count: int, length: int) -> torch.Tensor:
    """(count, length) token ids, the same at each call."""
    return torch.randint(3, 40000, (count, length), generator=torch.Generator().manual_seed(1))


def random_prompts(count: int, length: int) -> list[Prompt]:
    """`count` prompts of `length` tokens each."""
    rows = random_ids(count, length).tolist()
    return [Prompt.from_text(str(index), " ".join(map(str, row))) for index, row in enumerate(rows)]


class RandomPrompts:
    """A task of random tokens; its reward, the parity of the last token, costs nothing."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def prompts(self) -> list[Prompt]:
        """What is asked."""
        return random_prompts(self.count, self.length)

    def held_out(self) -> list[Prompt]:
        """Nothing."""
        return []

    def reward(self) -> RewardFn:
        """Scores by the last token."""
        return lambda rollouts: [Score(float(int(rollout.token_ids[-1]) % 2)) for rollout in rollouts]


def matrix_rate() -> float:
    """GFLOP/s of an fp32 matrix product on this machine now: best of five."""
    left, right = torch.randn(2048, 2048), torch.randn(2048, 2048)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        torch.mm(left, right)
        seconds.append(time.perf_counter() - began)
    return 2 * 2048**3 / min(seconds) / 1e9
