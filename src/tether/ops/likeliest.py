"""What else a model might have said: the likeliest tokens at each place, without a [batch, time, vocabulary] tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.ops.logprobs import CHUNK_ELEMENTS, log_distributions


@torch.no_grad()
def likeliest_tokens(
    hidden: Tensor,
    weight: Tensor,
    mask: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """`(tokens, logprobs)` (B, T, K), K = min(count, V), the likeliest first: what stood to choice at `mask`'s tokens.

    `hidden` (B, T, H), `weight` (V, H), `mask` (B, T); off the mask both are 0. Whole distributions exist for a few
    places at a time.
    """
    kept = min(count, weight.shape[0])
    tokens = torch.zeros((*mask.shape, kept), dtype=torch.int32, device=hidden.device)
    logprobs = torch.zeros((*mask.shape, kept), dtype=torch.float32, device=hidden.device)
    places = mask.nonzero()
    rows = max(1, chunk_elements // weight.shape[0])
    for start in range(0, len(places), rows):
        row, column = places[start : start + rows].unbind(dim=1)
        # Each place as a sequence of two tokens: the state before it, and itself.
        before = hidden[row, column - 1][:, None].expand(-1, 2, -1)
        itself = torch.tensor([[False, True]], device=hidden.device).expand(len(row), -1)
        options = {"temperature": temperature, "bias": bias, "scale": scale, "softcap": softcap}
        found, which = log_distributions(before, weight, itself, **options).topk(kept, dim=-1)
        tokens[row, column], logprobs[row, column] = which.to(torch.int32), found.float()
    return tokens, logprobs
