"""Which models the purpose-written passes are right for: Llama and its relatives, looked at part by part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import LlamaModel, MistralModel, Qwen2Model, Qwen3Model

TRUNKS = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
ROTARY = ("default", "linear", "llama3", "yarn")  # the kinds whose angles depend on the position alone


def departure(trunk: Any, length: int, around: nn.Module | None = None) -> str | None:
    """How a trunk, or sequences of `length` tokens in it, depart from what the passes compute; None where they do not.

    Looks at the model as it is now and computes nothing. `around` is the whole model where that is run too.
    """
    if type(trunk) not in TRUNKS:
        return f"{type(trunk).__name__} is not one of {', '.join(kind.__name__ for kind in TRUNKS)}"
    if trunk.rotary_emb.rope_type not in ROTARY:
        return f"rotary positions of type {trunk.rotary_emb.rope_type!r} depend on the length"
    window = getattr(trunk.config, "sliding_window", None)
    if window is not None and length > window:
        return f"sequences of {length} tokens exceed the attention window of {window}"
    return changed_module(trunk if around is None else around)


def changed_module(model: nn.Module) -> str | None:
    """The first module that does more than its class says: a hook, or a forward pass of its own."""
    for name, module in model.named_modules():
        hooks: list[Callable[..., Any]] = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        # transformers' own hooks record outputs, or mark the embeddings for gradients; they change no number
        if any(not (getattr(hook, "__module__", None) or "").startswith("transformers.") for hook in hooks):
            return f"{name or 'the model'} has a forward hook"
        if "forward" in vars(module):
            return f"{name or 'the model'} has a forward pass of its own"
    return None
