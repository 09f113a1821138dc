"""Which models the purpose-written decoder is right for: known kinds, looked at part by part and then tried out."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from tether.models.families import departure
from tether.rollout.llama import LlamaDecoder

KINDS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
TRIAL = ((1, 2, 0), (3, 1, 0, 2, 1))  # token ids that every model has
TOLERANCE = 1e-3  # of the largest logit


def plain_model(model: PreTrainedModel) -> Any:
    """The causal language model inside a model with adapters, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]


def unsupported(model: PreTrainedModel, length: int) -> str | None:
    """Why sequences of `length` tokens cannot be decoded by `LlamaDecoder`, or None where they can be.

    Looks at the model as it is now and computes nothing.
    """
    base = plain_model(model)
    if type(base) not in KINDS:
        return f"{type(base).__name__} is not one of {', '.join(kind.__name__ for kind in KINDS)}"
    parameters = list(base.parameters())
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return "it is written for the CPU"
    dtypes = {parameter.dtype for parameter in parameters}
    if dtypes not in ({torch.float32}, {torch.float64}):
        return f"the weights are {', '.join(sorted(map(str, dtypes)))} and not all float32"
    if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
        return "the adapter puts tokens of its own before the prompt"
    return departure(base.model, length, around=model)


@torch.inference_mode()
def disagreement(model: PreTrainedModel) -> str | None:
    """What is wrong when the decoder's logits on a few tokens are not the model's own; None where they are."""
    decoder = LlamaDecoder(plain_model(model), slots=len(TRIAL), length=max(map(len, TRIAL)))
    decoder.prefill([list(ids[:-1]) for ids in TRIAL], list(range(len(TRIAL))))
    lengths = torch.tensor([len(ids) for ids in TRIAL])
    logits = decoder.step(torch.tensor([ids[-1] for ids in TRIAL]), lengths - 1, int(lengths.max())).t()
    expected = torch.stack([model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1] for ids in TRIAL])
    gap, scale = (logits - expected).abs().max(), expected.abs().max()
    if gap <= TOLERANCE * scale.clamp(min=1.0):
        return None
    return f"its logits differ from the model's own by {float(gap):.2g}"
