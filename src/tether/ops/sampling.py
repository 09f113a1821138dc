"""The mathematics of drawing a token, as pure functions of tensors.

Per step, with logits z and temperature τ:

    untruncated   log p  = log-softmax(z / τ)                     over every id the model has a logit for
    behaviour     log q  = log p, kept ids only, renormalised     top-k first, then top-p
    token                = the first id whose CDF under q reaches u,  u uniform on (0, 1]

One uniform per (sample, step), from a stream that depends on the seed, the prompt's id and the sample's index alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor

from tether.errors import ConfigError
from tether.protocols import Sampling
from tether.seeds import derive_seed

BLOCK = 256  # ids in a block; blocks are summed before the search for a token


class Draw(NamedTuple):
    """One token for each row, and its log-probability."""

    tokens: Tensor  # (B,) int64; -1 where the row's logits give no distribution (NaN, +inf, or all -inf)
    behavior: Tensor  # (B,) float32, under the distribution sampled from
    untruncated: Tensor  # (B,) float32, over the whole vocabulary at the same temperature


def check_sampling(sampling: Sampling) -> None:
    """Raise on settings that describe no distribution."""
    if sampling.max_new_tokens < 1:
        raise ConfigError(f"sampling.max_new_tokens is {sampling.max_new_tokens}: it must be at least 1")
    if not 0.0 <= sampling.temperature < math.inf:
        raise ConfigError(f"sampling.temperature is {sampling.temperature}: it must be 0 (greedy) or positive")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ConfigError(f"sampling.top_p is {sampling.top_p}: it must be above 0 and at most 1 (1 keeps every token)")
    if sampling.top_k < 0:
        raise ConfigError(f"sampling.top_k is {sampling.top_k}: it must be 0 (keep every token) or positive")


def sample_uniforms(seed: int, prompt_id: str, sample: int, steps: int) -> Tensor:
    """(steps,) float64 uniforms on (0, 1] for one sample; a longer request begins with the shorter one."""
    generator = torch.Generator().manual_seed(derive_seed(seed, sample, prompt_id))
    return 1.0 - torch.rand(steps, generator=generator, dtype=torch.float64)


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Draw:
    """One token for each row of `logits` (B, V), by `uniforms` (B,).

    Temperature 0 is greedy: the most likely token, with both log-probabilities taken at temperature 1 over the whole
    vocabulary (the log-probability under the one-point distribution would be 0 everywhere, and say nothing).
    A logit of -inf is a token that cannot be drawn; NaN and +inf are errors, reported as token -1.
    """
    logprobs = log_softmax(logits.float() / (sampling.temperature or 1.0))
    if sampling.temperature == 0.0:
        behavior, tokens = logprobs, logprobs.argmax(dim=-1)
    else:
        behavior = truncate(logprobs, top_k=sampling.top_k, top_p=sampling.top_p)
        tokens = inverse_cdf(behavior, uniforms)
    chosen = tokens.unsqueeze(-1)
    untruncated = logprobs.gather(-1, chosen).squeeze(-1)
    behavior = untruncated if behavior is logprobs else behavior.gather(-1, chosen).squeeze(-1)
    # One NaN or +inf makes the whole row's log-softmax NaN, so the drawn token's value shows a fault of any logit.
    return Draw(tokens.masked_fill(untruncated.isnan(), -1), behavior, untruncated)


def draw_columns(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Draw:
    """`draw` for logits (V, B): one column for each row of the batch.

    Without truncation the token is found in two levels: sums over blocks of ids say which block the uniform falls into,
    and only that block is summed id by id.
    """
    if sampling.temperature == 0.0 or sampling.top_k or sampling.top_p < 1.0:
        return draw(logits.t().contiguous(), uniforms, sampling)
    numbers, temperature = logits.float(), sampling.temperature
    count, rows = numbers.shape
    highest = numbers.amax(dim=0) / temperature  # (B,)
    centred = numbers - highest if temperature == 1.0 else (numbers / temperature).sub_(highest)
    heights = centred.exp_()  # in the memory of `centred`: one tensor of the logits' size is allocated
    whole = count - count % BLOCK
    sums = heights[:whole].view(-1, BLOCK, rows).sum(dim=1)  # (blocks, B)
    if whole < count:
        sums = torch.cat((sums, heights[whole:].sum(dim=0, keepdim=True)))
    wide = _wide(logits)
    cdf = sums.t().cumsum(dim=-1, dtype=wide)  # (B, blocks)
    total = cdf[:, -1]
    target = (uniforms.to(wide) * total).unsqueeze(-1)
    block = torch.searchsorted(cdf, target).clamp_(max=cdf.shape[1] - 1)  # (B, 1)
    before = torch.where(block > 0, cdf.gather(1, (block - 1).clamp_(min=0)), 0.0)
    tokens = _within_block(heights, block, target - before)
    # not the logarithm of the height, which is denormal, and so imprecise, where a token is all but impossible
    chosen = numbers.gather(0, tokens[None])[0] / temperature - highest
    logprobs = (chosen.to(wide) - total.log()).float()
    # NaN in a column makes its total NaN; +inf makes the difference to the highest NaN; all -inf likewise
    return Draw(tokens.masked_fill(total.isnan(), -1), logprobs, logprobs)


def _within_block(heights: Tensor, block: Tensor, target: Tensor) -> Tensor:
    """(B,) the first id of block (B, 1) whose sum within the block reaches target (B, 1)."""
    ids = block * BLOCK + torch.arange(BLOCK, device=block.device)  # (B, BLOCK)
    inside = heights.t().gather(1, ids.clamp(max=len(heights) - 1)).masked_fill_(ids >= len(heights), 0.0)
    place = torch.searchsorted(inside.cumsum(dim=-1, dtype=target.dtype), target)
    # rounding may leave the block's own sum just short of the target: then it is the last id that can be drawn
    last = torch.where(inside > 0, torch.arange(BLOCK, device=block.device), 0).amax(dim=-1, keepdim=True)
    place = torch.minimum(place, last)
    height = inside.gather(1, place)
    place = torch.where(height > 0, place, inside.argmax(dim=-1, keepdim=True))
    return (block * BLOCK + place).squeeze(-1).clamp_(max=len(heights) - 1)


def truncate(logprobs: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """(B, V) log-probs of the truncated distribution, renormalised; -inf for ids left out. Top-k first, then top-p.

        top-k keeps i  iff  fewer than k ids are strictly more likely than i
        top-p keeps i  iff  the ids strictly more likely than i hold less than top_p of the mass that top-k left

    Both are rules about values, not positions: equally likely ids stay or go together, so the result does not depend
    on how a sort happens to order ties, and the most likely id always stays.
    """
    vocabulary = logprobs.shape[-1]
    top_k = top_k if 0 < top_k < vocabulary else 0
    if not top_k and top_p >= 1.0:
        return logprobs
    if top_k:
        ranked = logprobs.topk(top_k, dim=-1).values  # (B, K), most likely first
        logprobs = logprobs.masked_fill(logprobs < ranked[:, -1:], -math.inf)
    else:
        ranked = logprobs.sort(dim=-1, descending=True).values
    if top_p < 1.0:
        heights = ranked.exp()
        above = heights.cumsum(dim=-1) - heights  # mass of the ids ranked before each
        mass = logprobs.exp().sum(dim=-1, keepdim=True)
        least = ranked.masked_fill(above >= top_p * mass, math.inf).amin(dim=-1, keepdim=True)
        logprobs = logprobs.masked_fill(logprobs < least, -math.inf)
    return log_softmax(logprobs)


def log_softmax(logits: Tensor) -> Tensor:
    """(B, V) z - log sum exp z in the type of the logits, the sums of blocks summed in a wider one.

    Torch's own sums in the logits' type: off by 1e-5 and more for a vocabulary of 50,000, depending on the processor.
    """
    centred = logits - logits.amax(dim=-1, keepdim=True)
    heights = centred.exp()
    whole = heights.shape[-1] - heights.shape[-1] % BLOCK
    blocks = (heights[:, :whole].reshape(len(heights), whole // BLOCK, BLOCK).sum(dim=-1), heights[:, whole:])
    total = torch.cat(blocks, dim=-1).sum(dim=-1, keepdim=True, dtype=_wide(logits))
    return centred.sub_(total.log().to(logits.dtype))


def _wide(like: Tensor) -> torch.dtype:
    """The type for long sums: float64, where the device has it."""
    return torch.float32 if like.device.type == "mps" else torch.float64


def inverse_cdf(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """(B,) the first id of each row whose cumulative probability reaches u · total, for u in (0, 1].

    An id of probability 0 adds nothing to the sum before it, so it is never the first to reach a positive target.
    """
    probabilities = logprobs.exp()
    cdf = probabilities.cumsum(dim=-1, dtype=_wide(logprobs))  # rounding stays far below any probability that matters
    target = uniforms.to(cdf.dtype).unsqueeze(-1) * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, target).clamp_(max=logprobs.shape[-1] - 1)
    # A parallel scan may round up at an id of probability 0; then, about once in 2**50 draws, take the likeliest.
    possible = probabilities.gather(-1, tokens) > 0
    return torch.where(possible, tokens, probabilities.argmax(dim=-1, keepdim=True)).squeeze(-1)


def by_sequence(history: list[tuple[list[int], Draw]], count: int) -> list[Draw]:
    """Steps of many sequences -> sequences of many steps, on the CPU.

    A step is `(rows, drawn)`: the sequence that each drawn token belongs to, -1 where it had finished before.
    """
    owners = torch.tensor([row for rows, _ in history for row in rows])
    order = owners.argsort(stable=True)[(owners < 0).sum() :]  # by sequence, and within it by step
    lengths = cast("list[int]", owners[owners >= 0].bincount(minlength=count).tolist())  # pyright: ignore[reportUnknownMemberType]
    steps = zip(*(drawn for _, drawn in history), strict=True)
    columns = [torch.split(torch.cat(column).cpu()[order], lengths) for column in steps]
    return [Draw(*column) for column in zip(*columns, strict=True)]
