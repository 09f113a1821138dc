"""Which models the decoders and the training pass support, and the reason where they do not: all in this file.

| | models | where |
|---|---|---|
| decoding on a CPU | every family of `families.py` | float32 and float64 |
| decoding on a GPU | every family of `families.py` | one CUDA device, any float type; kernels in half precision |
| training pass, plain | every family of `families.py` | float32 and float64, any device |
| training pass, fused | every family of `families.py` | half precision on CUDA, compute capability 8 and later |
| log-probabilities | every output layer | half precision on CUDA |
| exact pass (`exact/`) | every family of `families.py` | float32 on a CPU |

Inside a supported model, a module that does more than `spec.py` can say (an adapter of an unusual kind, a quantised
layer) is called by the decoders; the fused pass leaves such a model to its own modules.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tether.accel.families import BACKBONES, CAUSAL_LMS
from tether.accel.spec import DecoderSpec, rotary_kinds
from tether.gathering import GatheredForward

Backend = Literal["plain", "fused"]
Kernels = Literal["triton", "torch"]
ROTARY = ("default", "linear", "llama3", "yarn")  # the kinds whose angles depend on the position alone
HALF = (torch.bfloat16, torch.float16)
# tokens x twice a layer's large weights, up to which a fused pass is captured: the host may be slower than the device
MAX_WORK = 8 * 10**11
CAPPED_HEADS = (16, 32, 64, 128, 256)  # widths of heads whose capped scores the fused pass has a kernel for


@cache
def has_triton() -> bool:
    """Whether Triton can be imported; torch for some platforms comes without it."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return False
    return True


def decode_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Whose kernels a GPU's decode step runs: Triton's in half precision where they can be built, else torch's.

    In float32 a product that keeps all its bits has no use for the tensor cores that Triton's kernels are laid out for.
    """
    return "triton" if device.type == "cuda" and dtype in HALF and has_triton() else "torch"


def backend_for(backbone: Any) -> Backend | None:
    """How the backbone's layers are trained on its device and in its dtype; None where they are not supported."""
    device, dtype = backbone.device, backbone.dtype
    if dtype in (torch.float32, torch.float64):
        return "plain"
    if device.type != "cuda" or dtype not in HALF or importlib.util.find_spec("triton") is None:
        return None
    width = DecoderSpec.from_model(backbone).head_dim if len(backbone.layers) else 8
    # what flash attention is made for
    return "fused" if width % 8 == 0 and width <= 256 and torch.cuda.get_device_capability(device)[0] >= 8 else None


def training_unsupported(backbone: Any, around: nn.Module | None = None) -> str | None:
    """Why the training pass does not compute this backbone; None where it does.

    Looks at the model as it is now and computes nothing. `around` is the whole model where that is run too.
    """
    return _unsupported(backbone, around) or _capped_heads(backbone)


def logprobs_supported(states: Tensor, weight: Tensor) -> bool:
    """Whether the kernels of log-probabilities are made for such states and such an output layer."""
    if states.device.type != "cuda" or states.dtype not in HALF:
        return False
    return weight.dtype == states.dtype and importlib.util.find_spec("triton") is not None


def decoding_unsupported(model: Any, base: Any = None) -> str | None:
    """Why a model cannot be decoded by `CpuDecoder` or `GpuDecoder`; None where it can be.

    `base` is the causal language model inside `model`, where that has adapters around it. Looks at the model as it is
    now and computes nothing.
    """
    base = model if base is None else base
    if type(base) not in CAUSAL_LMS:
        return f"{type(base).__name__} is not one of {', '.join(kind.__name__ for kind in CAUSAL_LMS)}"
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
    return _unsupported(base.model, model)


def exact_unsupported(base: Any, around: nn.Module | None = None) -> str | None:
    """Why the exact pass does not compute this causal language model, or backbone alone; None where it does.

    `around` is the model with adapters around it. Looks at the model as it is now and computes nothing.
    """
    if base.device.type != "cpu":
        return f"its fixed order of sums is written for a CPU, and the model is on {base.device.type}"
    whole = type(base) in CAUSAL_LMS
    reason = decoding_unsupported(base if around is None else around, base) if whole else _unsupported(base, around)
    if reason is not None:
        return reason
    if base.dtype != torch.float32:
        return f"it is written for float32, and the weights are {str(base.dtype).removeprefix('torch.')}"
    spec = DecoderSpec.from_model(base)
    output = [] if spec.output is None else [spec.output]
    parts = [*output, *(part for layer in spec.layers for part in layer.linears)]
    unknown = next((part.module for part in parts if part.weight is None), None)
    if unknown is not None:
        return f"it multiplies by plain weights and plain LoRA adapters, and there is a {type(unknown).__name__}"
    if spec.output is not None and spec.output.adapter is not None:
        return "the output layer has an adapter"
    if any(layer.activation_kind is None for layer in spec.layers):
        return f"it has SiLU and GELU (tanh), and the model's activation is {type(spec.layers[0].activation).__name__}"
    return None


def _unsupported(backbone: Any, around: nn.Module | None) -> str | None:
    if type(backbone) not in BACKBONES:
        return f"{type(backbone).__name__} is not one of {', '.join(kind.__name__ for kind in BACKBONES)}"
    if getattr(backbone.config, "use_bidirectional_attention", False):
        return "its tokens attend to later ones"
    for kind in rotary_kinds(backbone):
        if kind not in ROTARY:
            return f"rotary positions of type {kind!r} depend on the length"
    return changed_module(backbone if around is None else around)


def _capped_heads(backbone: Any) -> str | None:
    """Flash attention has no cap on scores, and the kernel that has one is made for some widths of heads."""
    config = backbone.config
    if not BACKBONES[type(backbone)].score_cap or config.attn_logit_softcapping is None or backbone.dtype not in HALF:
        return None
    known = ", ".join(map(str, CAPPED_HEADS))
    if config.head_dim in CAPPED_HEADS:
        return None
    return f"attention scores are capped and heads are {config.head_dim} wide, not one of {known}"


def changed_module(model: nn.Module) -> str | None:
    """The first module that does more than its class says: a hook, or a forward pass of its own.

    It runs before every pass, so it walks the modules itself: torch's walk takes four times as long, for names that
    are rarely needed.
    """
    waiting: list[nn.Module] = [model]
    for module in waiting:
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
            reason = _change(module)
            if reason is not None:
                name = next(name for name, each in model.named_modules() if each is module)
                return f"{name or 'the model'} {reason}"
        waiting += [child for child in own["_modules"].values() if child is not None]
    return None


def _change(module: nn.Module) -> str | None:
    hooks: list[Callable[..., Any]] = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    # transformers' own hooks record outputs, or mark the embeddings for gradients; they change no number
    if any(not (getattr(hook, "__module__", None) or "").startswith("transformers.") for hook in hooks):
        return "has a forward hook"
    own = vars(module).get("forward")
    return None if own is None or isinstance(own, GatheredForward) else "has a forward pass of its own"
