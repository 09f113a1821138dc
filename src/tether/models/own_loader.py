"""A model that the user's own function loads (`model.loader`), checked before anything trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.errors import ConfigError

REPAIR = "return (model, tokenizer), a causal language model of transformers and its tokenizer"


@dataclass(frozen=True)
class OwnLoader:
    """A function from `model.path` to `(model, tokenizer)`; `label` is `model.loader: mine.py:load`, for errors."""

    function: Callable[..., Any]
    label: str

    def __call__(
        self, path: str, *, dtype: torch.dtype, device: torch.device, seed: int, attention: str
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Call the function with the path, and with dtype, device and seed where it has parameters of these names.

        Torch's generator is seeded before the call, so that weights which the function draws are the same in a resumed
        run, and is put back after it.
        """
        known = {"dtype": dtype, "device": device, "seed": seed}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            given = self.function(path, **{name: known[name] for name in known if name in _named(self.function, known)})
        model, tokenizer = self._checked(given)
        if attention != "auto":
            model.set_attn_implementation(attention)
        return model, tokenizer

    def _checked(self, given: object) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        pair: tuple[Any, ...] = cast("tuple[Any, ...]", given) if isinstance(given, tuple) else ()
        if len(pair) != 2:
            raise ConfigError(f"{self.label} gave a {type(given).__name__}: {REPAIR}")
        model, tokenizer = pair
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(f"{self.label} gave a {type(model).__name__} as the model: {REPAIR}")
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ConfigError(f"{self.label} gave a {type(tokenizer).__name__} as the tokenizer: {REPAIR}")
        if model.get_output_embeddings() is None:
            raise ConfigError(f"{self.label} gave a {type(model).__name__} without a language-model head: {REPAIR}")
        return model, tokenizer


def _named(function: Callable[..., Any], known: dict[str, Any]) -> set[str]:
    """Which of the known arguments a function takes by name."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()
    if any(each.kind is Parameter.VAR_KEYWORD for each in parameters):
        return set(known)
    return {each.name for each in parameters if each.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}
