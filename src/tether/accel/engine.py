"""The decoders behind one interface: whether they support a model, and the answers that they draw.

A model that `supported.py` has no reason against is tried out: the decoder's logits on a few tokens must be its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tether.accel.cached_attention import capped
from tether.accel.cpu_decoder import ContinuousBatch, CpuDecoder
from tether.accel.decode_gpu.gpu_decoder import MAX_SLOTS, DecoderCache, GpuBatch, GpuDecoder
from tether.accel.exact.exact_decoder import ExactDecoder
from tether.accel.exact.exact_logprobs import draw_exactly
from tether.accel.exact.trial import misplaced
from tether.accel.supported import HALF, decoding_unsupported, exact_unsupported
from tether.device_transfer import at
from tether.ops.sampling import Draw, by_sequence, draw_columns
from tether.protocols import Sampling

CheckToken = Callable[[int, int, int], None]  # (token, sequence, step): raises where no token could be drawn
TRIAL = ((1, 2, 0), (3, 1, 0, 2, 1))  # token ids that every model has
TOLERANCE = 1e-3  # of the largest logit
HALF_TOLERANCE = 0.05  # nats between the distributions, with weights of 16 bits: logits alone grow apart with depth


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
    """Draws answers on a CPU or a CUDA device. Captured steps of a GPU are kept from one call to the next.

    An exact one draws by the exact pass, and its log-probs are to the bit what that pass finds in training.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        self.gpu: DecoderCache | None = None  # made for the first draw on a CUDA device

    @property
    def cache_bytes(self) -> int:
        """The most device memory that the cache has taken, which torch's counters do not see."""
        return 0 if self.gpu is None else self.gpu.cache_bytes

    def release(self) -> None:
        """Hand back the device memory of the cache; the next draw takes it again."""
        if self.gpu is not None:
            self.gpu.release()

    def unsupported_reason(self, model: Any, base: Any) -> str | None:
        """Why the model, or `base` inside its adapters, cannot be decoded here as it is now; None where it can be."""
        return exact_unsupported(base, model) if self.exact else decoding_unsupported(model, base)

    def disagreement(self, model: Any, base: Any) -> str | None:
        """How a trial on a few tokens differs from the model's own forward pass; None where it agrees."""
        return disagreement(model, base, exact=self.exact)

    def most_slots(self, device: torch.device) -> int | None:
        """How many answers are decoded at once unasked; None where the engine decides."""
        return MAX_SLOTS if device.type == "cuda" else None

    @torch.inference_mode()
    def draw(
        self, base: Any, request: DecodeRequest, slots: int, check: CheckToken, collector: StateCollector | None
    ) -> list[Draw]:
        """The drawn tokens and log-probs of each sequence, (length,) each, on the CPU.

        `collector` is given one layer's inputs for each token, where the CPU's decoder runs.
        """
        slots = min(slots, len(request.groups))
        if base.device.type == "cuda":
            return self.draw_on_gpu(base, request, slots, check)
        return _draw_on_cpu(base, request, slots, check, collector, exact=self.exact)

    @torch.inference_mode()
    def draw_on_gpu(self, base: Any, request: DecodeRequest, slots: int, check: CheckToken) -> list[Draw]:
        """As `draw`, by the GPU's decoder; its cache's memory is handed back at the end."""
        sampling, parts = request.sampling, (request.prompts, request.groups, request.uniforms)
        cache = self.gpu = self.gpu or DecoderCache()
        try:
            with at(base.device):
                decoder = cache.ready(base, slots, request.length, sampling.max_new_tokens)
                slots = min(slots, decoder.slots)
                answers = GpuBatch(decoder, slots, *parts, sampling, request.stops).run()
        finally:
            cache.release()
        for row, answer in enumerate(answers):
            check(int(answer.tokens[-1]), row, len(answer.tokens) - 1)
        return answers


def _draw_on_cpu(
    base: Any,
    request: DecodeRequest,
    slots: int,
    check: CheckToken,
    collector: StateCollector | None,
    *,
    exact: bool,
) -> list[Draw]:
    kind = ExactDecoder if exact else CpuDecoder
    decoder = kind(base, slots, request.length, collector.depth if collector else None)
    batch = ContinuousBatch(decoder, slots, request.prompts, request.groups, request.sampling.max_new_tokens)

    def draw_next(logits: Tensor, due: list[tuple[int, int]]) -> Draw:
        sequences, steps = zip(*due, strict=True)
        uniforms = request.uniforms[list(sequences), list(steps)]
        drawn = (
            draw_exactly(logits.t(), uniforms, request.sampling, decoder.spec.logit_cap)
            if exact
            else draw_columns(logits, uniforms, request.sampling)
        )
        for token, row, step in zip(drawn.tokens.tolist(), sequences, steps, strict=True):
            check(token, row, step)
        return drawn

    answers = by_sequence(batch.run(draw_next, request.stops), len(request.groups))
    if collector is not None:
        for row, states in batch.traces.items():
            prompt = request.prompts[request.groups[row]]
            collector.keep(torch.tensor([*prompt, *answers[row].tokens.tolist()]), states)
    return answers


@torch.inference_mode()
def disagreement(model: Any, base: Any = None, *, exact: bool = False) -> str | None:
    """What is wrong when the decoder's logits on a few tokens are not the model's own; None where they are."""
    base = model if base is None else base
    if exact and (reason := misplaced(base)) is not None:
        return reason
    device = next(model.parameters()).device
    if device.type == "cuda":
        try:
            logits = gpu_trial(base)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # a machine that cannot build the kernels, or a device that they do not fit
            return f"its kernels do not run here ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    else:
        logits = cpu_trial(base, exact=exact)
    expected = torch.stack(
        [model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, -1] for ids in TRIAL]
    )
    if logits.dtype in HALF:
        apart = nats_apart(logits, expected)
        return None if apart <= HALF_TOLERANCE else f"its tokens are drawn {apart:.2g} nats from the model's own"
    gap, scale = (logits - expected).abs().max(), expected.abs().max()
    if gap <= TOLERANCE * scale.clamp(min=1.0):
        return None
    return f"its logits differ from the model's own by {float(gap):.2g}"


def nats_apart(logits: Tensor, expected: Tensor) -> float:
    """KL(p || q) of p = softmax(expected) and q = softmax(logits), both (B, V), of the row where it is most."""
    q, p = (x.float().log_softmax(dim=-1) for x in (logits, expected))
    return float((p.exp() * (p - q)).sum(dim=-1).max())


def cpu_trial(base: Any, *, exact: bool = False) -> Tensor:
    """(trials, V) logits after each trial, by `CpuDecoder` or `ExactDecoder`."""
    kind = ExactDecoder if exact else CpuDecoder
    decoder = kind(base, slots=len(TRIAL), length=max(map(len, TRIAL)))
    decoder.prefill([list(ids[:-1]) for ids in TRIAL], list(range(len(TRIAL))))
    lengths = torch.tensor([len(ids) for ids in TRIAL])
    logits = decoder.step(torch.tensor([ids[-1] for ids in TRIAL]), lengths - 1, int(lengths.max())).t()
    cap = decoder.spec.logit_cap
    return capped(logits, cap) if exact and cap is not None else logits


def gpu_trial(base: Any) -> Tensor:
    """(trials, V) logits after each trial, by `GpuDecoder`."""
    decoder = GpuDecoder(base, slots=len(TRIAL), length=max(map(len, TRIAL)), room=1)
    decoder.prefill([list(ids[:-1]) for ids in TRIAL], list(range(len(TRIAL))))
    decoder.state.tokens.copy_(torch.tensor([ids[-1] for ids in TRIAL]))
    decoder.state.columns.copy_(torch.tensor([len(ids) - 1 for ids in TRIAL]))
    decoder.state.live.fill_(True)
    decoder.logits(len(TRIAL))
    return decoder.work.logits[: len(TRIAL)]
