"""Which models the purpose-written decoder is right for: known kinds, looked at part by part and then tried out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from tether.accel.decode_cpu.cpu_decoder import LlamaDecoder
from tether.accel.decode_gpu.gpu_decoder import GpuDecoder
from tether.accel.families import decoding_unsupported_reason

KINDS = (
    *(LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM),
    *(Gemma2ForCausalLM, Gemma3ForCausalLM),
)
TRIAL = ((1, 2, 0), (3, 1, 0, 2, 1))  # token ids that every model has
TOLERANCE = 1e-3  # of the largest logit
HALF_TOLERANCE = 0.05  # nats between the distributions, with weights of 16 bits: logits alone grow apart with depth
HALF = (torch.bfloat16, torch.float16)


def unsupported(model: Any, base: Any = None) -> str | None:
    """Why a model cannot be decoded by `LlamaDecoder` or `GpuDecoder`, or None where it can be.

    `base` is the causal language model inside `model`, where that has adapters around it. Looks at the model as it is
    now and computes nothing.
    """
    base = model if base is None else base
    if type(base) not in KINDS:
        return f"{type(base).__name__} is not one of {', '.join(kind.__name__ for kind in KINDS)}"
    named = list(base.named_parameters())
    devices = {weight.device for _, weight in named}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        return "it is written for a CPU or one CUDA device"
    on_gpu = next(iter(devices)).type == "cuda"
    dtypes = {weight.dtype for name, weight in named if not on_gpu or "lora_" not in name}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64, *(HALF if on_gpu else ())}:
        wanted = "of one kind" if on_gpu else "all float32"
        return f"the weights are {', '.join(sorted(map(str, dtypes)))} and not {wanted}"
    if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
        return "the adapter puts tokens of its own before the prompt"
    return decoding_unsupported_reason(base.model, around=model)


@torch.inference_mode()
def disagreement(model: Any, base: Any = None) -> str | None:
    """What is wrong when the decoder's logits on a few tokens are not the model's own; None where they are."""
    base = model if base is None else base
    device = next(model.parameters()).device
    if device.type == "cuda":
        try:
            logits = _gpu_trial(base)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # a machine that cannot build the kernels, or a device that they do not fit
            return f"its kernels do not run here ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    else:
        logits = _trial(base)
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


def _trial(base: Any) -> Tensor:
    """(trials, V) logits after each trial, by `LlamaDecoder`."""
    decoder = LlamaDecoder(base, slots=len(TRIAL), length=max(map(len, TRIAL)))
    decoder.prefill([list(ids[:-1]) for ids in TRIAL], list(range(len(TRIAL))))
    lengths = torch.tensor([len(ids) for ids in TRIAL])
    return decoder.step(torch.tensor([ids[-1] for ids in TRIAL]), lengths - 1, int(lengths.max())).t()


def _gpu_trial(base: Any) -> Tensor:
    """(trials, V) logits after each trial, by `GpuDecoder`."""
    decoder = GpuDecoder(base, slots=len(TRIAL), length=max(map(len, TRIAL)), room=1)
    decoder.prefill([list(ids[:-1]) for ids in TRIAL], list(range(len(TRIAL))))
    decoder.state.tokens.copy_(torch.tensor([ids[-1] for ids in TRIAL]))
    decoder.state.columns.copy_(torch.tensor([len(ids) - 1 for ids in TRIAL]))
    decoder.state.live.fill_(True)
    decoder.logits(len(TRIAL))
    return decoder.work.logits[: len(TRIAL)]
