"""Reward models of other makers: any classifier of one label, by folder or by Hugging Face id.

Only safetensors are read and no code of the checkpoint is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from tether.errors import ConfigError
from tether.hub.catalog import looks_like_path
from tether.hub.safe_files import check_folder
from tether.models.heads import WEIGHT_FILE, ScalarModel
from tether.models.load import ask_hub, disable_dropout, resolve_device
from tether.models.precision import hold_in, resolve_dtype
from tether.types import ScoreOutputs, Sequences

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]  # of a model on the hub


class ClassifierModel(nn.Module):
    """A classifier that is not a backbone with a linear `score` layer, such as BERT's kind: its own forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Sequences) -> ScoreOutputs:
        """One score a row: the one logit of the classifier."""
        logits = self.model(input_ids=batch.tokens, attention_mask=batch.attention_mask.long()).logits
        return ScoreOutputs(logits[:, 0].float())


RewardModel = ScalarModel | ClassifierModel


def reward_model_folder(path: str) -> Path:
    """The folder of a reward model: `path` itself, or a copy of what the hub has under this id.

    The local cache is looked at first, and only then the network.
    """
    folder = Path(path).expanduser()
    if folder.exists():
        return folder
    if looks_like_path(path) or path.count("/") != 1:
        raise ConfigError(f"reward model {path}: there is no such folder: correct the path, or give a Hugging Face id")
    try:
        found = Path(snapshot_download(path, allow_patterns=FILES, local_files_only=True))
        if (found / "config.json").is_file() and any(found.glob("*.safetensors")):
            return found
    except (OSError, ValueError):  # not in the cache
        pass
    ask_hub(path, "reward model")
    try:
        return Path(snapshot_download(path, allow_patterns=FILES))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"reward model {path}: there is no such folder, and the Hugging Face hub did not give it: check the name "
            f"and the network, or download the model and give its folder ({reason})"
        ) from error


def load_reward_model(folder: Path, dtype: torch.dtype | str, device: torch.device | str) -> RewardModel:
    """The reward model in a folder: a backbone with a `score` layer where it is one, else the classifier as it is."""
    if not (folder / "config.json").is_file() or not _has_own_head(folder):
        return ScalarModel.load(folder, dtype, device)
    check_folder(folder, "reward model")
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    try:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            str(folder),
            dtype=kind,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{folder} could not be loaded as a reward model ({reason})") from error
    model, info = loaded
    if info["missing_keys"] or model.config.num_labels != 1:
        why = f"it has {model.config.num_labels} labels" if model.config.num_labels != 1 else "it lacks its head"
        raise ConfigError(f"{folder} is not a reward model ({why}): it needs a saved classifier with one output")
    disable_dropout(model)
    hold_in(model, kind, place)
    return ClassifierModel(model)


def _has_own_head(folder: Path) -> bool:
    """Whether the architecture's classifier is something else than a backbone with a linear `score` layer."""
    if (folder / WEIGHT_FILE).is_file():
        return False  # a backbone, with the head that `tether train reward` gave it beside
    check_folder(folder, "reward model")
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError):
        return False  # ScalarModel.load says what is wrong
    return not isinstance(getattr(model, "score", None), nn.Linear)
