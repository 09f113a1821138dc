"""Writing a trained model so that other tools load it."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.models.heads import ScalarModel
from tether.models.lora import has_lora, save_lora


def save_model(model: PreTrainedModel | ScalarModel, tokenizer: PreTrainedTokenizerBase, target: Path) -> Path:
    """A whole model in the Hugging Face layout, adapters in peft's; the tokenizer beside either."""
    if not isinstance(model, ScalarModel) and has_lora(model):
        save_lora(model, target)
    else:
        model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target
