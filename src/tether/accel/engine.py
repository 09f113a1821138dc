"""The decoders behind one face: whether they take a model, and the answers that they draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tether.accel import supported
from tether.accel.decode_cpu.cpu_batch import ContinuousBatch
from tether.accel.decode_cpu.cpu_decoder import LlamaDecoder
from tether.accel.decode_gpu.decoder_cache import MAX_SLOTS, DecoderCache
from tether.accel.decode_gpu.gpu_batch import GpuBatch
from tether.device_transfer import at
from tether.ops.sampling import Draw, by_sequence, draw_columns
from tether.protocols import Sampling

CheckToken = Callable[[int, int, int], None]  # (token, sequence, step): raises where no token could be drawn


class StateCollector(Protocol):
    """Takes the inputs of layer `depth` for each sampled sequence, so that training need not compute them again."""

    @property
    def depth(self) -> int:
        """The layer."""
        ...

    def keep(self, tokens: Tensor, states: Tensor) -> None:
        """Its inputs (T, H) for the sequence of token ids (T,)."""
        ...


@dataclass(frozen=True)
class DecodeRequest:
    """Sequences to be drawn: sequence i continues `prompts[groups[i]]` and draws by `uniforms[i]` (max_new_tokens,)."""

    prompts: dict[int, list[int]]
    groups: list[int]
    uniforms: Tensor
    sampling: Sampling
    stops: set[int]

    @property
    def length(self) -> int:
        """Tokens of the longest sequence, prompt included."""
        return max(map(len, self.prompts.values())) + self.sampling.max_new_tokens


class FastDecoder:
    """Draws answers on a CPU or a CUDA device. Captured steps of a GPU are kept from one call to the next."""

    def __init__(self) -> None:
        self.gpu = DecoderCache()

    def unsupported_reason(self, model: Any, base: Any) -> str | None:
        """Why the model, or `base` inside its adapters, cannot be decoded here as it is now; None where it can be."""
        return supported.unsupported(model, base)

    def disagreement(self, model: Any, base: Any) -> str | None:
        """How a trial on a few tokens departs from the model's own forward pass; None where it agrees."""
        return supported.disagreement(model, base)

    def most_slots(self, device: torch.device) -> int | None:
        """How many answers are decoded at once unasked; None where the engine decides."""
        return MAX_SLOTS if device.type == "cuda" else None

    @torch.inference_mode()
    def draw(
        self, base: Any, request: DecodeRequest, slots: int, check: CheckToken, keeper: StateCollector | None
    ) -> list[Draw]:
        """The drawn tokens and log-probs of each sequence, (length,) each, on the CPU.

        `keeper` is told what one layer was given for each token, where the CPU's decoder runs.
        """
        slots = min(slots, len(request.groups))
        if base.device.type == "cuda":
            return self.draw_on_gpu(base, request, slots, check)
        return _draw_on_cpu(base, request, slots, check, keeper)

    @torch.inference_mode()
    def draw_on_gpu(self, base: Any, request: DecodeRequest, slots: int, check: CheckToken) -> list[Draw]:
        """As `draw`, by the GPU's decoder; its cache's memory is handed back at the end."""
        sampling, parts = request.sampling, (request.prompts, request.groups, request.uniforms)
        try:
            with at(base.device):
                decoder = self.gpu.ready(base, slots, request.length, sampling.max_new_tokens)
                slots = min(slots, decoder.slots)
                answers = GpuBatch(decoder, slots, *parts, sampling, request.stops).run()
        finally:
            self.gpu.release()
        for row, answer in enumerate(answers):
            check(int(answer.tokens[-1]), row, len(answer.tokens) - 1)
        return answers


def _draw_on_cpu(
    base: Any, request: DecodeRequest, slots: int, check: CheckToken, keeper: StateCollector | None
) -> list[Draw]:
    decoder = LlamaDecoder(base, slots, request.length, keeper.depth if keeper else None)
    batch = ContinuousBatch(decoder, slots, request.prompts, request.groups, request.sampling.max_new_tokens)

    def draw_next(logits: Tensor, due: list[tuple[int, int]]) -> Draw:
        sequences, steps = zip(*due, strict=True)
        drawn = draw_columns(logits, request.uniforms[list(sequences), list(steps)], request.sampling)
        for token, row, step in zip(drawn.tokens.tolist(), sequences, steps, strict=True):
            check(token, row, step)
        return drawn

    answers = by_sequence(batch.run(draw_next, request.stops), len(request.groups))
    if keeper is not None:
        for row, states in batch.traces.items():
            prompt = request.prompts[request.groups[row]]
            keeper.keep(torch.tensor([*prompt, *answers[row].tokens.tolist()]), states)
    return answers
