"""A backbone with a scalar head: the critic's value of a state, or the reward model's score of an answer.

Reward models from elsewhere are classifiers with one label, given as a folder or a Hugging Face id. Only safetensors
are read, and no code of the checkpoint is run.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from tether.errors import ConfigError
from tether.gathering import with_weights
from tether.hub.catalog import looks_like_path
from tether.hub.folder_check import check_folder
from tether.mask_cache import last_tokens
from tether.models.backbones import Backbone, ScalarHead, backbone_of
from tether.models.load import ask_hub, attention_options, disable_dropout, resolve_device
from tether.models.lora import has_lora, save_lora
from tether.models.precision import hold_in, resolve_dtype
from tether.types import ScoreOutputs, Sequences

BIAS_FILE = "scalar_head.json"
WEIGHT_FILE = "scalar_head.safetensors"  # for architectures of which transformers has no sequence classifier
SCORE = "score.weight"


class ScalarModel(nn.Module):
    """A backbone of its own with a scalar head: a separate critic, or a reward model."""

    def __init__(self, backbone: Backbone, head: ScalarHead, group: str) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.group = group

    @classmethod
    def load(cls, path: str | Path, dtype: torch.dtype | str, device: torch.device | str) -> ScalarModel:
        """A reward model saved by `save_pretrained`, or a classifier of one label that another tool saved.

        Only a local folder and safetensors are read; dropout is removed. The bias is 0 without `scalar_head.json`.
        With `scalar_head.safetensors` the folder holds a backbone alone, and its head is in that file.
        """
        folder, place = Path(path).expanduser(), resolve_device(device)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{path} holds no saved reward model: name the folder with its config.json")
        check_folder(folder, "reward model")
        where: dict[str, Any] = {"local_files_only": True}
        try:
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, **where)
            kernels = attention_options(config, "auto")
            apart = load_file(folder / WEIGHT_FILE)[SCORE] if (folder / WEIGHT_FILE).is_file() else None
            kind = AutoModelForSequenceClassification if apart is None else AutoModel
            loaded: Any = kind.from_pretrained(
                str(folder),
                dtype=resolve_dtype(dtype, place),
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **kernels,
                **where,
            )
            bias = cls.saved_bias(folder)
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"{path} could not be loaded as a reward model ({reason})") from error
        model, info = loaded
        layer = getattr(model, "score", None)
        score = apart if apart is not None else layer.weight if isinstance(layer, nn.Linear) else None
        if info["missing_keys"] or score is None or score.shape[0] != 1:
            raise ConfigError(f"{path} is not a reward model: it needs a saved `score` layer with one output")
        disable_dropout(model.to(place))  # first: how a backbone runs depends on its device
        score = score.to(place)
        head = ScalarHead(score.shape[1], deviation=0.0, seed=0, like=score)
        with torch.no_grad():
            head.weight.copy_(score)
            head.bias.fill_(bias)
            if apart is None and isinstance(layer, nn.Linear) and layer.bias is not None:
                head.bias.add_(layer.bias.to(place))
        return cls(Backbone(backbone_of(model)), head, "reward")

    @staticmethod
    def saved_bias(folder: Path) -> float:
        """The head's bias, which is saved beside the Hugging Face layout; 0 if another tool saved the model."""
        file = folder / BIAS_FILE
        return float(json.loads(file.read_text())["bias"]) if file.is_file() else 0.0

    def forward(self, batch: Sequences) -> ScoreOutputs:
        """One score a row."""
        states = self.states(batch, last_tokens(batch.attention_mask))
        return ScoreOutputs(with_weights(self.head, self.head.at_end, states, batch))

    def states(self, batch: Sequences, wanted: Tensor) -> Tensor:
        """(B, T, H) the backbone's states; only those of `wanted` (B, T) have to be right."""
        return with_weights(self.backbone.model, self.backbone, batch, wanted)

    def save_pretrained(self, target: Path) -> None:
        """In the Hugging Face layout of a sequence classifier with one label, or as peft adapters for one.

        Neither layout has room for the head's bias: it goes into a file of its own beside them. An architecture of
        which transformers has no classifier is saved as a backbone, with the head's weight in a file of its own too.
        """
        tree, score = self.backbone.model, self.head.weight.detach().to(self.backbone.model.dtype)
        if has_lora(tree):
            save_lora(tree, target, inside=f"{tree.base_model_prefix}.", extra={SCORE: score}, kind="SEQ_CLS")
        elif type(tree.config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            self._save_classifier(tree, score, target)
        else:
            tree.save_pretrained(target)
            save_file({SCORE: score.cpu().contiguous()}, target / WEIGHT_FILE)
        (target / BIAS_FILE).write_text(json.dumps({"bias": float(self.head.bias.detach())}) + "\n")

    @staticmethod
    def _save_classifier(tree: PreTrainedModel, score: Tensor, target: Path) -> None:
        """The backbone and the head's weight as one classifier of transformers."""
        with torch.device("meta"):
            config = copy.deepcopy(tree.config)
            config.num_labels = 1
            classifier = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
        state = {f"{classifier.base_model_prefix}.{name}": value for name, value in tree.state_dict().items()}
        classifier.load_state_dict(state | {SCORE: score}, assign=True, strict=False)
        classifier.save_pretrained(target)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """All of it, as one group."""
        return {self.group: [p for p in self.parameters() if p.requires_grad]}


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
        return False  # ScalarModel.load reports what is wrong
    return not isinstance(getattr(model, "score", None), nn.Linear)
