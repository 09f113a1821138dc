"""Which models the purpose-written passes are right for, and the facts in which those families differ.

Llama, Mistral, Qwen2 and Qwen3 share one block. Gemma 2 and 3 have a norm after attention and after the MLP too, norms
that multiply by 1 + w, caps on scores and logits, and layers that see a window only. The engine decodes them all; the
trainer's pass over packed tokens is for the first four.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Gemma2Model, Gemma3TextModel, LlamaModel, MistralModel, Qwen2Model, Qwen3Model

TRUNKS = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
GEMMAS = (Gemma2Model, Gemma3TextModel)
ROTARY = ("default", "linear", "llama3", "yarn")  # the kinds whose angles depend on the position alone


@dataclass(frozen=True)
class LayerFacts:
    """What a layer's attention does beyond softmax(q · k * scaling) v over all tokens before."""

    window: int | None  # how many tokens a token sees, itself counted; None: all before it
    cap: float | None  # a score s becomes cap * tanh(s / cap)
    rotary: str | None  # which of the backbone's tables of positions, where it has several
    scaling: float


@dataclass(frozen=True)
class Norm:
    """y = x * (offset + weight) / sqrt(mean x² + ε), the weight being the module's own."""

    weight: Tensor
    epsilon: float
    offset: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        """From a model's norm module: Gemma's multiply by 1 + w, and name their ε otherwise."""
        gemma = type(module).__name__.startswith("Gemma")
        return cls(
            module.weight.detach(), module.eps if gemma else module.variance_epsilon, offset=1.0 if gemma else 0.0
        )


def unsupported_reason(backbone: Any, length: int, around: nn.Module | None = None) -> str | None:
    """How a backbone, or sequences of `length` tokens in it, depart from what the packed pass computes; None where not.

    Looks at the model as it is now and computes nothing. `around` is the whole model where that is run too.
    """
    window = getattr(backbone.config, "sliding_window", None)
    if type(backbone) in TRUNKS and window is not None and length > window:
        return f"sequences of {length} tokens exceed the attention window of {window}"
    return _unsupported_reason(backbone, TRUNKS, around)


def decoding_unsupported_reason(backbone: Any, around: nn.Module) -> str | None:
    """The same for the decoders, which know windows and the Gemma families too."""
    if getattr(backbone.config, "use_bidirectional_attention", False):
        return "its tokens attend to later ones"
    return _unsupported_reason(backbone, (*TRUNKS, *GEMMAS), around)


def _unsupported_reason(backbone: Any, known: tuple[type, ...], around: nn.Module | None) -> str | None:
    if type(backbone) not in known:
        return f"{type(backbone).__name__} is not one of {', '.join(kind.__name__ for kind in known)}"
    kinds = backbone.rotary_emb.rope_type
    for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
        if kind not in ROTARY:
            return f"rotary positions of type {kind!r} depend on the length"
    return changed_module(backbone if around is None else around)


def changed_module(model: nn.Module) -> str | None:
    """The first module that does more than its class says: a hook, or a forward pass of its own.

    It is asked before every pass, so the walk is its own: torch's takes four times as long, for names nobody reads.
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
    return "has a forward pass of its own" if "forward" in vars(module) else None


def layer_facts(backbone: Any) -> list[LayerFacts]:
    """The facts of each layer."""
    found = []
    for layer in backbone.layers:
        attention = layer.self_attn
        # Mistral's window is every layer's; the others say it layer by layer
        mistral = isinstance(backbone, MistralModel)
        window = backbone.config.sliding_window if mistral else getattr(attention, "sliding_window", None)
        cap = attention.attn_logit_softcapping if isinstance(backbone, Gemma2Model) else None
        several = isinstance(backbone.rotary_emb.rope_type, dict)
        found.append(LayerFacts(window, cap, attention.layer_type if several else None, attention.scaling))
    return found


def block_norms(layer: Any) -> tuple[Norm, Norm | None, Norm, Norm | None]:
    """A block's norms before attention, after it, before the MLP and after it; those after are Gemma's."""
    first, second = Norm.of(layer.input_layernorm), Norm.of(layer.post_attention_layernorm)
    if not hasattr(layer, "pre_feedforward_layernorm"):
        return first, None, second, None
    return first, second, Norm.of(layer.pre_feedforward_layernorm), Norm.of(layer.post_feedforward_layernorm)


def head_norms(attention: Any) -> tuple[Norm, Norm] | None:
    """The norms of queries and keys by head, in the families that have them."""
    return (Norm.of(attention.q_norm), Norm.of(attention.k_norm)) if hasattr(attention, "q_norm") else None


def rotary_tables(backbone: Any, length: int, dtype: torch.dtype) -> dict[str | None, tuple[Tensor, Tensor]]:
    """cos and sin, (length, D) each, of positions 0 to length - 1, for each table that the layers name."""
    device = backbone.embed_tokens.weight.device
    like, positions = torch.empty(0, dtype=dtype, device=device), torch.arange(length, device=device)[None]
    tables = {}
    for kind in {facts.rotary for facts in layer_facts(backbone)}:
        cos, sin = backbone.rotary_emb(like, positions) if kind is None else backbone.rotary_emb(like, positions, kind)
        tables[kind] = cos[0], sin[0]
    return tables


def embedding_scale(backbone: Any) -> float:
    """What the embeddings are multiplied by, beside what the embedding module itself does; rounded as the model does.

    Some releases of transformers scale Gemma 2's embeddings in the backbone, others in the module.
    """
    module = backbone.embed_tokens
    if not isinstance(backbone, GEMMAS) or hasattr(module, "embed_scale"):
        return 1.0
    return float(torch.tensor(backbone.config.hidden_size**0.5, dtype=module.weight.dtype))
