"""Writing a trained model so that other tools load it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.models.heads import ScalarModel
from tether.models.lora import has_lora, save_lora
from tether.seal import list_files, swap


def save_model(model: PreTrainedModel | ScalarModel, tokenizer: PreTrainedTokenizerBase, target: Path) -> Path:
    """A whole model in the Hugging Face layout, adapters in peft's; the tokenizer beside either.

    Written beside the target and renamed, so that being interrupted leaves no half of a model under its name, and
    never loses the model that had it. A list of the files goes with it: whoever loads the model checks them.
    """
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    if not isinstance(model, ScalarModel) and has_lora(model):
        save_lora(model, unfinished)
    else:
        model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    list_files(unfinished)
    for file in (*unfinished.iterdir(), unfinished):  # on the disk before it has its name
        _sync(file)
    swap(unfinished, target)
    _sync(target.parent)
    return target


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
