"""The model's side of decoding: a batch with its cache, which can be read into, stepped, and cut down to fewer rows."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from tether.errors import ConfigError
from tether.models.load import LoadedModel
from tether.models.lora import causal_lm_of


def check_cached(model: Any) -> None:
    """Raise where a model's forward pass knows no cache of keys and values, which every engine needs."""
    if "past_key_values" not in inspect.signature(causal_lm_of(model).forward).parameters:
        raise _no_cache(model)


def _no_cache(model: Any) -> ConfigError:
    return ConfigError(
        f"model.path: {type(causal_lm_of(model)).__name__} returns no cache, which sampling needs: use a model whose "
        "forward pass takes and returns past_key_values"
    )


class CachedBatch:
    """Left-padded rows of a causal language model and their KV cache.

    Padding stands on the left, so the last column is every row's newest token; position ids start at 0 on the first
    real token, so a row's numbers are those it would have alone. Where no row has padding, neither mask nor positions
    are passed, which lets attention use its faster kernels.
    """

    def __init__(self, loaded: LoadedModel, room: int) -> None:
        """`room` is how many tokens will be decoded at most."""
        self.loaded = loaded
        self.model: Any = loaded.model
        self.device: torch.device = loaded.model.device
        self.room = room
        self.cache: Any = None
        self.mask: Tensor | None = None  # (B, width + room) int64, 0 on padding
        self.lengths = torch.empty(0)  # (B, 1) int64 real tokens so far
        self.width = 0
        self.accepts = set(inspect.signature(causal_lm_of(self.model).forward).parameters)

    def read(self, prompts: list[list[int]], rows: list[int]) -> Tensor:
        """(B, V) logits after the prompts, where row b continues `prompts[rows[b]]`.

        Each prompt is read once and its cache rows are then repeated; a cache that cannot be repeated is made again
        with one prompt a row.
        """
        logits = self._prefill(prompts)
        if rows == list(range(len(prompts))):
            return logits
        if not self.can_select:
            return self._prefill([prompts[row] for row in rows])
        places = torch.tensor(rows, device=self.device)
        self.select(places)
        return logits[places]

    def step(self, tokens: Tensor) -> Tensor:
        """(B, V) logits after one more token, `tokens` (B,), in each row."""
        self.width += 1
        positions = self.lengths
        self.lengths = self.lengths + 1
        return self._forward(tokens.unsqueeze(-1), positions)

    @property
    def can_select(self) -> bool:
        """Whether rows of this model's cache can be dropped and repeated."""
        return hasattr(self.cache, "reorder_cache")

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be given more than once.

        The cache's `reorder_cache` is an index-select over rows that every kind of layer has, also those with a
        recurrent state; `batch_select_indices` forgets that state.
        """
        self.cache.reorder_cache(rows)
        self.lengths = self.lengths[rows]
        if self.mask is not None:
            self.mask = self.mask[rows]

    def _prefill(self, prompts: list[list[int]]) -> Tensor:
        lengths = [len(ids) for ids in prompts]
        self.width = max(lengths)
        tokens = torch.tensor([[self.loaded.pad_id] * (self.width - len(ids)) + ids for ids in prompts])
        self.lengths = torch.tensor(lengths, device=self.device).unsqueeze(-1)
        columns = torch.arange(self.width + self.room, device=self.device)
        padding = self.width - self.lengths
        self.mask = None if min(lengths) == self.width else (columns >= padding).long()
        self.cache = None
        return self._forward(tokens.to(self.device), (columns[: self.width] - padding).clamp_(min=0))

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": True, "past_key_values": self.cache}
        if "logits_to_keep" in self.accepts:
            given["logits_to_keep"] = 1
        if self.mask is not None:
            given["attention_mask"] = self.mask[:, : self.width]
            if "position_ids" in self.accepts:
                given["position_ids"] = positions
        outputs = self.model(**given)
        self.cache = getattr(outputs, "past_key_values", None)
        if self.cache is None:
            raise _no_cache(self.model)
        return outputs.logits[:, -1]
