"""Writing a trained model so that other tools load it: plain, or with LoRA merged.

A merged model is loaded back and compared. The comparison runs in float32 on the CPU whatever dtype is stored, so it
shows only what merging and storing changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tether.errors import ConfigError, DataError
from tether.files import list_files, swap
from tether.hub.folder_check import check_folder
from tether.models.backbones import Backbone, ScalarHead, backbone_of
from tether.models.load import (
    LoadedModel,
    choose_pad_id,
    embedding_count,
    is_reward_model,
    load_adapters,
    load_base,
    load_causal_lm,
)
from tether.models.lora import CONFIG as ADAPTER_CONFIG
from tether.models.lora import has_lora, inject_lora, load_config, load_lora, merge_lora, save_lora
from tether.models.precision import DTYPES
from tether.models.scalar_models import ScalarModel
from tether.types import Sequences


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of every parameter, its name, dtype and shape."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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


CPU = torch.device("cpu")
PROBE = "The quick brown fox jumps over 13 lazy dogs. Which of them was faster, and why?\n"
# What logits may differ by, as a share of the largest: rounding of a sum in float32, of each weight in fewer bits.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Merged:
    """A whole model in memory, and its outputs for the probe. `scalar` is set for a reward model."""

    model: LoadedModel  # of a reward model: its backbone with its tokenizer
    scalar: ScalarModel | None
    probe: Tensor  # (1, T) token ids
    outputs: Tensor  # (T, V) logits, or (1,) the score, before anything was merged

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        return self.model.tokenizer


@dataclass(frozen=True)
class Checked:
    """How far the written model is from the trained one."""

    largest: float  # |difference| of a logit or score
    limit: float
    dtype: str


@torch.no_grad()
def load_merged(folder: Path) -> Merged:
    """The model that a run saved in `folder`, whole, or as adapters, which are merged into their base."""
    adapters = (folder / ADAPTER_CONFIG).is_file()
    if is_reward_model(folder):
        return _merged_reward(folder, adapters)
    if not adapters:
        loaded = load_causal_lm(str(folder), dtype=torch.float32, device=CPU, seed=0)
    else:
        loaded = load_adapters(folder, torch.float32, CPU)
    probe = probe_ids(loaded.tokenizer, embedding_count(loaded.model))
    outputs = loaded.model(input_ids=probe, use_cache=False).logits[0]
    if adapters:
        merge_lora(loaded.model)
    return Merged(loaded, None, probe, outputs)


def _merged_reward(folder: Path, adapters: bool) -> Merged:
    if adapters:
        loaded = load_base(folder, torch.float32, CPU)
        scalar = adapted_reward(loaded, folder)
        tokenizer, end_id, pad_id = loaded.tokenizer, loaded.end_id, loaded.pad_id
    else:
        scalar = ScalarModel.load(folder, torch.float32, CPU)
        tokenizer = _tokenizer(folder)
        end_id = int(tokenizer.eos_token_id)  # pyright: ignore[reportArgumentType]
        pad_id, _ = choose_pad_id(tokenizer, end_id, embedding_count(scalar.backbone.model))
    probe = probe_ids(tokenizer, embedding_count(scalar.backbone.model))
    outputs = score(scalar, probe)
    merge_lora(scalar.backbone.model)
    whole = LoadedModel(scalar.backbone.model, tokenizer, end_id, pad_id, 0)
    return Merged(whole, scalar, probe, outputs)


def adapted_reward(base: LoadedModel, folder: Path) -> ScalarModel:
    """A reward model that was saved as adapters, on its base; the adapters are not yet merged."""
    head = ScalarHead.like_output(base.model, deviation=0.0, seed=0)
    backbone = backbone_of(base.model)
    inject_lora(backbone, load_config(folder), 0)
    beside = load_lora(backbone, folder, inside=f"{base.model.base_model_prefix}.")
    with torch.no_grad():
        head.weight.copy_(beside["score.weight"])
        head.bias.fill_(ScalarModel.saved_bias(folder))
    return ScalarModel(Backbone(backbone), head, "reward")


def score(scalar: ScalarModel, probe: Tensor) -> Tensor:
    """(1,) the score of the probe."""
    real = torch.ones_like(probe, dtype=torch.bool)
    return scalar(Sequences(tokens=probe, attention_mask=real, response_mask=real)).scores


def probe_ids(tokenizer: Any, known: int) -> Tensor:
    """(1, T) a text, and then ids from all over the vocabulary."""
    spread = torch.linspace(0, known - 1, 16).long().tolist()
    ids = [*tokenizer.encode(PROBE, add_special_tokens=False)[:48], *spread]
    return torch.tensor([[id for id in ids if id < known]])


def write_merged(merged: Merged, target: Path, dtype: str) -> None:
    """Config, weights in `dtype`, tokenizer with its chat template, and generation_config; a reward model's bias too.

    The folder must not exist. It is whole once it has its name.
    """
    kind = DTYPES[dtype]
    model = merged.model.model
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(kind)
    if merged.scalar is not None:
        model.config.pad_token_id = merged.model.pad_id  # by which transformers finds the last token of each row
        save_model(merged.scalar, merged.tokenizer, target)
        return
    chosen = getattr(model, "generation_config", None)
    if chosen is not None and chosen.eos_token_id is None:
        ends = list(merged.model.end_ids)
        chosen.eos_token_id = ends if len(ends) > 1 else ends[0]
    save_model(model, merged.tokenizer, target)


@torch.no_grad()
def check_merged(merged: Merged, folder: Path, dtype: str) -> Checked:
    """Load the folder with transformers alone, and compare its outputs with those of the run's model."""
    given: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True, "use_safetensors": True}
    try:
        if merged.scalar is None:
            again: Any = AutoModelForCausalLM.from_pretrained(str(folder), trust_remote_code=False, **given)
            outputs = again.eval()(input_ids=merged.probe, use_cache=False).logits[0]
        else:
            again = AutoModelForSequenceClassification.from_pretrained(str(folder), trust_remote_code=False, **given)
            outputs = again.eval()(input_ids=merged.probe).logits[0] + ScalarModel.saved_bias(folder)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise DataError(f"{folder} was written and transformers cannot load it ({error})") from error
    largest = float((outputs - merged.outputs).abs().max())
    limit = TOLERANCE[DTYPES[dtype]] * max(1.0, float(merged.outputs.abs().max()))
    if not largest <= limit:  # NaN is never within
        shutil.rmtree(folder)
        raise DataError(
            f"the merged model is not the run's: {'scores' if merged.scalar else 'logits'} differ by {largest:.3g}, "
            f"and {limit:.3g} is allowed in {dtype}; nothing was kept"
        )
    return Checked(largest, limit, dtype)


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    check_folder(folder, "model")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"{folder} has no tokenizer that can be loaded ({error})") from error
    if not isinstance(tokenizer.eos_token_id, int):
        raise ConfigError(f"{folder}: the tokenizer has no end token; set `eos_token` in its tokenizer_config.json")
    return tokenizer
