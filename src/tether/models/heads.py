"""A scalar on top of a trunk: the critic's value of a state, the reward model's score of an answer."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from tether.errors import ConfigError
from tether.models.forward import OutputLayer, hidden_states, trunk_of
from tether.models.load import disable_dropout, resolve_device, resolve_dtype
from tether.ops.logprobs import spread, states_before
from tether.ops.masks import last_index
from tether.types import ScoreOutputs, Sequences


class ScalarHead(nn.Module):
    """A linear map from a hidden state to one number, computed in fp32 or better."""

    def __init__(self, width: int, *, deviation: float, seed: int, like: Tensor) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, width, generator=generator) * deviation
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.weight = nn.Parameter(weight.to(device=like.device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, device=like.device, dtype=dtype))

    def forward(self, states: Tensor) -> Tensor:
        """(..., H) -> (...,)."""
        return nn.functional.linear(states.to(self.weight.dtype), self.weight, self.bias)[..., 0]

    def values(self, hidden: Tensor, batch: Sequences) -> Tensor:
        """(B, T) V(tokens before t) on the response mask, 0 elsewhere."""
        return spread(self(states_before(hidden, batch.response_mask)), batch.response_mask)

    def at_end(self, hidden: Tensor, batch: Sequences) -> Tensor:
        """(B,) read at each row's last real token: the value of all tokens, or the score of an answer."""
        ends = last_index(batch.attention_mask)
        return self(hidden[torch.arange(len(batch), device=hidden.device), ends])


class ScalarModel(nn.Module):
    """A trunk of its own with a scalar head: a separate critic, or a reward model."""

    def __init__(self, trunk: PreTrainedModel, head: ScalarHead, group: str) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head
        self.group = group

    @classmethod
    def from_policy(cls, model: PreTrainedModel, *, group: str, deviation: float, seed: int) -> ScalarModel:
        """A copy of the policy's trunk with a fresh head, whose weights are drawn with the given deviation."""
        trunk = copy.deepcopy(trunk_of(model))
        like = OutputLayer.of(model).weight
        return cls(trunk, ScalarHead(like.shape[1], deviation=deviation, seed=seed, like=like), group)

    @classmethod
    def load(cls, path: str | Path, dtype: torch.dtype | str, device: torch.device | str) -> ScalarModel:
        """A reward model saved by `save_pretrained`, or a classifier of one label that another tool saved.

        Only a local folder and safetensors are read; dropout is gone. A folder without `scalar_head.json` has bias 0.
        """
        folder, place = Path(path).expanduser(), resolve_device(device)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{path} holds no saved reward model: name the folder with its config.json")
        try:
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                str(folder),
                dtype=resolve_dtype(dtype, place),
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            bias_file = folder / "scalar_head.json"
            bias = float(json.loads(bias_file.read_text())["bias"]) if bias_file.is_file() else 0.0
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"{path} could not be loaded as a reward model ({reason})") from error
        classifier, info = loaded
        score = getattr(classifier, "score", None)
        if info["missing_keys"] or not isinstance(score, nn.Linear) or score.out_features != 1:
            raise ConfigError(f"{path} is not a reward model: it needs a saved `score` layer with one output")
        disable_dropout(classifier)
        head = ScalarHead(score.in_features, deviation=0.0, seed=0, like=score.weight)
        with torch.no_grad():
            head.weight.copy_(score.weight)
            head.bias.fill_(bias)
        return cls(trunk_of(classifier), head, "reward").to(place)

    def hidden(self, batch: Sequences) -> Tensor:
        """(B, T, H)."""
        return hidden_states(self.trunk, batch)

    def forward(self, batch: Sequences) -> ScoreOutputs:
        """One score a row."""
        return ScoreOutputs(self.head.at_end(self.hidden(batch), batch))

    def save_pretrained(self, target: Path) -> None:
        """In the Hugging Face layout of a sequence classifier with one label, which other tools load.

        That layout has no room for the head's bias: it goes into `scalar_head.json` beside it.
        """
        config = copy.deepcopy(self.trunk.config)
        config.num_labels = 1
        with torch.device("meta"):
            classifier = AutoModelForSequenceClassification.from_config(config)
        prefix = classifier.base_model_prefix
        state = {f"{prefix}.{name}": value for name, value in self.trunk.state_dict().items()}
        state["score.weight"] = self.head.weight.detach().to(self.trunk.dtype)
        classifier.load_state_dict(state, assign=True, strict=False)
        classifier.save_pretrained(target)
        (target / "scalar_head.json").write_text(json.dumps({"bias": float(self.head.bias.detach())}) + "\n")

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """All of it, as one group."""
        return {self.group: [p for p in self.parameters() if p.requires_grad]}
