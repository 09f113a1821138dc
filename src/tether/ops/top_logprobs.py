"""What else a model might have said: the likeliest tokens at each place, without a [batch, time, vocabulary] tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.ops.logprobs import places_of, rows_at_a_time, spread, states_before

BLOCK = 64  # ids that are looked at together: only the blocks with the highest members are searched


@torch.no_grad()
def top_tokens(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    mask: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`(ids, logprobs)` (B, T, K), K = min(count, V), the likeliest first: what stood to choice at `mask`'s tokens.

    `hidden` (B, T, H), `weight` (V, H); `tokens` and their `logprobs` (B, T) are what was sampled. With z the logits as
    in `chunked_logprobs`, the sum over the vocabulary is known already, from the sampled token y:

        log p(v) = z_v - logsumexp(z) = z_v - z_y + log p(y)

    Off the mask both are 0. Logits exist for a few places at a time.
    """

    def squashed(product: Tensor) -> Tensor:
        numbers = product.float()
        capped = numbers * scale if softcap is None else softcap * torch.tanh(numbers * (scale / softcap))
        return capped / temperature

    kept = min(count, weight.shape[0])
    states, places = states_before(hidden, mask), places_of(mask)
    targets, known = (column.flatten().index_select(0, places)[:, None] for column in (tokens, logprobs))
    ids = torch.empty(len(places), kept, dtype=torch.int32, device=hidden.device)
    found = torch.empty(len(places), kept, dtype=torch.float32, device=hidden.device)
    rows = rows_at_a_time(weight, chunk_elements)
    for start in range(0, len(places), rows):
        part = slice(start, start + rows)
        logits = torch.nn.functional.linear(states[part], weight, bias)
        highest, which = top_of_blocks(logits, kept)
        ids[part] = which
        found[part] = squashed(highest) - squashed(logits.gather(1, targets[part])) + known[part].float()
    return spread(ids, mask), spread(found, mask)


def top_of_blocks(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`values.topk(count)` of each row, (N, V) -> (N, K), found in two levels.

    The highest K lie in the K blocks whose highest members are highest, so that one pass over all values is enough. A
    block's members stand far apart and neighbours belong to different blocks, so that a device compares whole lines.
    """
    blocks = values.shape[1] // BLOCK
    whole = blocks * BLOCK
    members = values[:, :whole].view(len(values), BLOCK, blocks)
    best = members.amax(dim=1).topk(min(count, blocks), dim=1).indices  # (N, K)
    inside = members.gather(2, best[:, None].expand(-1, BLOCK, -1)).flatten(1)
    ids = (best[:, None] + blocks * torch.arange(BLOCK, device=values.device)[:, None]).flatten(1)
    rest = torch.arange(whole, values.shape[1], device=values.device).expand(len(values), -1)
    highest, place = torch.cat((inside, values[:, whole:]), dim=1).topk(count, dim=1)
    return highest, torch.cat((ids, rest), dim=1).gather(1, place)
