"""One pass through a causal language model, split where PPO needs it: the backbone, then the output layer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.errors import ConfigError
from tether.models import acceleration
from tether.ops.logprobs import log_distributions, token_logprobs
from tether.ops.masks import position_ids
from tether.types import Sequences


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its output layer; its parameters are the model's own."""
    return model.base_model  # pyright: ignore[reportReturnType]


def hidden_states(
    backbone: PreTrainedModel, batch: Sequences, embeddings: Tensor | None = None, *, recompute: bool = False
) -> Tensor:
    """(B, T, H) the backbone's last hidden states, after its final norm; positions start at the first real token.

    `embeddings` (B, T, H), where given, stand in place of those of the batch's tokens. With `recompute` each layer is
    run again in the backward pass and keeps only its inputs until then, where the architecture knows how.
    """
    arguments: dict[str, Any] = {"attention_mask": batch.attention_mask.long()}
    arguments |= {"input_ids": batch.tokens} if embeddings is None else {"inputs_embeds": embeddings}
    if "position_ids" in inspect.signature(backbone.forward).parameters:
        arguments["position_ids"] = position_ids(batch.attention_mask)
    with _recomputing(backbone) if recompute and backbone.supports_gradient_checkpointing else nullcontext():
        states: Tensor = backbone(**arguments, use_cache=False).last_hidden_state
    # Some backbones (Mamba) add up their residual stream in float32 whatever their weights are; output layers do not.
    return states.to(backbone.dtype) if states.dtype == torch.float32 and backbone.dtype.itemsize < 4 else states


@contextmanager
def _recomputing(backbone: PreTrainedModel) -> Iterator[None]:
    """Layers checkpoint themselves in training mode only, which is safe: dropout is gone for good."""
    backbone.gradient_checkpointing_enable({"use_reentrant": False})
    backbone.train()
    try:
        yield
    finally:
        backbone.eval()
        backbone.gradient_checkpointing_disable()


@dataclass(frozen=True)
class OutputLayer:
    """How hidden states become logits: softcap * tanh(scale * (h W^T + b) / softcap), no tanh where no softcap."""

    weight: Tensor  # (V, H)
    bias: Tensor | None
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> OutputLayer:
        """Read off a model, and checked against the model's own logits; a model it cannot describe is refused."""
        linear = model.get_output_embeddings()
        if not isinstance(linear, torch.nn.Linear):
            raise ConfigError(f"model.path: {type(model).__name__} has no linear output layer, which training needs")
        if not linear.weight.is_floating_point():
            raise ConfigError(
                f"model.quantize: the output layer of {type(model).__name__} was quantised too, and training needs it "
                "whole: set model.quantize none"
            )
        config = model.config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        layer = cls(linear.weight, linear.bias, scale, getattr(config, "final_logit_softcapping", None))
        layer.check(model)
        return layer

    def check(self, model: PreTrainedModel) -> None:
        """Raise unless these log-probs are the model's own, on a few tokens."""
        count = min(8, self.weight.shape[0])
        tokens = torch.arange(count, device=self.weight.device)[None]
        everything = torch.ones_like(tokens, dtype=torch.bool)
        probe = Sequences(tokens=tokens, attention_mask=everything, response_mask=everything)
        with torch.no_grad():
            hidden = hidden_states(backbone_of(model), probe)
            targets = tokens[0].flip(0)
            ours, _ = acceleration.logprobs(hidden[0], self.weight, targets, **self.options(1.0))
            logits = model(input_ids=tokens, use_cache=False).logits[0].float()
            theirs = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]
        tolerance = 1e-3 if self.weight.dtype == torch.float32 else 0.1
        if not torch.allclose(ours.float(), theirs, atol=tolerance, rtol=tolerance):
            raise ConfigError(
                f"model.path: the output layer of {type(model).__name__} does more than a product, a scale and a "
                "softcap, so its log-probabilities cannot be taken in chunks; use another architecture"
            )

    def options(self, temperature: float) -> dict[str, Any]:
        """The arguments of `tether.ops.logprobs` for this layer at a temperature."""
        return {"temperature": temperature, "bias": self.bias, "scale": self.scale, "softcap": self.softcap}

    def logprobs(self, hidden: Tensor, batch: Sequences) -> tuple[Tensor, Tensor]:
        """`(logprobs, entropy)` (B, T) at the batch's temperature, on its response mask."""
        given = (hidden, self.weight, batch.tokens, batch.response_mask)
        return token_logprobs(*given, **self.options(batch.temperature), by=acceleration.logprobs)

    def distributions(self, hidden: Tensor, batch: Sequences) -> Tensor:
        """(N, V) whole log-distributions at the batch's response tokens."""
        return log_distributions(hidden, self.weight, batch.response_mask, **self.options(batch.temperature))
