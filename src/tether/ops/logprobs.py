"""Log-probabilities, entropies and most likely tokens from hidden states, without a [batch, time, vocabulary] tensor.

`hidden[b, t]` is the backbone's output *at* token t, which predicts token t + 1. The shift by one happens in
`states_before` and nowhere else; from there on `x[b, t]` is about token t. Logits exist for a few tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tether.device_transfer import at
from tether.ops.masks import flat_positions

StateLogprobs = Callable[..., tuple[Tensor, Tensor]]  # as `chunked_logprobs`
CHUNK_ELEMENTS = 2**23  # logits in memory at a time: 32 MiB in fp32, which fits into caches


def states_before(hidden: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
    """(N, H) the hidden states from which the N tokens of `mask` were sampled, in row-major order.

    `hidden` is (B, T, H), `mask` (B, T) with column 0 False: the first token has no state before it. `positions` (N,)
    is `flat_positions(mask)`; pass it where it is known already, here and below.
    """
    return hidden.flatten(0, 1).index_select(0, _positions(mask, positions) - 1)


def _positions(mask: Tensor, known: Tensor | None) -> Tensor:
    return flat_positions(mask) if known is None else known


def mask_before(mask: Tensor) -> Tensor:
    """(B, T) the mask of those states: each True of `mask` moved one column to the left."""
    return torch.nn.functional.pad(mask[:, 1:], (0, 1))


def scatter_to_mask(values: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
    """(B, T, ...) the values (N, ...) at the True positions of `mask` (B, T), 0 elsewhere."""
    flat = torch.zeros(mask.numel(), *values.shape[1:], dtype=values.dtype, device=values.device)
    return flat.index_copy(0, _positions(mask, positions), values).view(*mask.shape, *values.shape[1:])


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_elements: int | None = None,
    by: StateLogprobs | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`(logprobs, entropy)`, each (B, T) and 0 off the mask, of the tokens on it.

    `hidden` (B, T, H), `weight` (V, H), `tokens` (B, T); the rest as in `chunked_logprobs`, which `by` may replace.
    Both carry gradients.
    """
    positions = _positions(mask, positions)
    states, targets = states_before(hidden, mask, positions), tokens.flatten().index_select(0, positions)
    logprobs, entropy = (by or chunked_logprobs)(
        states,
        weight,
        targets,
        temperature=temperature,
        bias=bias,
        scale=scale,
        softcap=softcap,
        chunk_elements=chunk_elements,
    )
    return scatter_to_mask(logprobs, mask, positions), scatter_to_mask(entropy, mask, positions)


def chunked_logprobs(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`(logprobs, entropy)` of N tokens: states (N, H), weight (V, H), targets (N,) -> (N,) each.

        y = scale * (states @ weight^T + bias)
        z = softcap * tanh(y / softcap) / temperature       (y / temperature without a softcap)
        logprob = z[target] - logsumexp(z),   entropy = logsumexp(z) - sum_v softmax(z)_v z_v

    Logits exist for a few rows at a time (`chunk_elements` numbers, by default `CHUNK_ELEMENTS`), forward and
    backward; the backward recomputes them. Half-precision inputs are multiplied as they are and reduced in fp32. If the
    output layer is frozen, the gradient of logprob is (W[target] - sum_v softmax(z)_v W_v) * scale / temperature,
    so the mean row of W is found in the forward pass and the backward needs no logits, unless a gradient comes through
    the entropy.
    """
    to_logits = ToLogits(temperature, scale, softcap)
    apply = cast("StateLogprobs", ChunkedLogprobs.apply)  # pyright: ignore[reportUnknownMemberType]
    with at(states.device):
        return apply(states, weight, bias, targets, to_logits, rows_at_a_time(weight, chunk_elements))


def rows_at_a_time(weight: Tensor, chunk_elements: int | None) -> int:
    """The number of tokens whose logits are in memory at once, from `chunk_elements` (default `CHUNK_ELEMENTS`)."""
    return max(1, (chunk_elements or CHUNK_ELEMENTS) // weight.shape[0])


def log_distributions(
    hidden: Tensor,
    weight: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """(N, V) whole log-distributions at the N tokens of `mask`, differentiable twice: for an exact KL."""
    logits = ToLogits(temperature, scale, softcap)(_product(states_before(hidden, mask, positions), weight, bias))
    return torch.log_softmax(logits, dim=-1)


@dataclass(frozen=True)
class ToLogits:
    """Turns products with the output matrix into the logits that are sampled from."""

    temperature: float
    scale: float
    softcap: float | None

    def __call__(self, product: Tensor) -> Tensor:
        """The logits of products."""
        if self.softcap is not None:
            return torch.tanh(product * (self.scale / self.softcap)) * (self.softcap / self.temperature)
        factor = self.scale / self.temperature
        return product if factor == 1.0 else product * factor

    def pull_back_(self, slope: Tensor, product: Tensor) -> Tensor:
        """d loss / d product from `slope` = d loss / d logits, in place."""
        if self.softcap is not None:
            slope.mul_(1.0 - torch.tanh(product * (self.scale / self.softcap)) ** 2)
        factor = self.scale / self.temperature
        return slope if factor == 1.0 else slope.mul_(factor)


def _product(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.nn.functional.linear(states, weight, bias)
    return product.float() if product.dtype in (torch.float16, torch.bfloat16) else product


class ChunkedLogprobs(torch.autograd.Function):
    """`chunked_logprobs` as a node of the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        to_logits: ToLogits,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        """`(logprobs, entropy)`, (N,) each."""
        dtype = torch.promote_types(states.dtype, torch.float32)
        logprobs = torch.empty(targets.shape, dtype=dtype, device=states.device)
        entropy = torch.empty_like(logprobs)
        normaliser = torch.empty_like(logprobs)
        frozen = not any(ctx.needs_input_grad[1:3]) and to_logits.softcap is None
        mean_rows = torch.empty_like(states) if frozen and ctx.needs_input_grad[0] else None
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            logits = to_logits(_product(states[part], weight, bias))
            top = logits.amax(dim=1, keepdim=True)
            logits = logits.sub_(top)
            exponentials = logits.exp()
            mass = exponentials.sum(dim=1)
            log_mass = mass.log()
            normaliser[part] = log_mass + top[:, 0]
            if mean_rows is not None:
                torch.mm(exponentials.div_(mass[:, None]).to(weight.dtype), weight, out=mean_rows[part])
                mass = torch.ones_like(mass)
            entropy[part] = log_mass - exponentials.mul_(logits).sum(dim=1) / mass
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0] - log_mass
        ctx.save_for_backward(states, weight, bias, targets, normaliser, entropy, mean_rows)
        ctx.to_logits, ctx.rows = to_logits, rows
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """d logprob / dz = onehot - p,  d entropy / dz = -p (log p + entropy); then the chain rule through z."""
        if torch.is_grad_enabled():
            raise RuntimeError("chunked_logprobs has no second derivative: use log_distributions")
        grad_logprobs, grad_entropy = grad_outputs
        states, weight, bias, targets, normaliser, entropy, mean_rows = ctx.saved_tensors
        wants_states, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        through_entropy = bool(grad_entropy.any())
        if mean_rows is not None and not through_entropy:
            slope = (grad_logprobs * (ctx.to_logits.scale / ctx.to_logits.temperature)).to(states.dtype)
            return (weight[targets].sub_(mean_rows).mul_(slope[:, None]), *[None] * 5)
        grad_states = torch.empty_like(states) if wants_states else None
        # Summed in fp32 over the chunks: half-precision sums would lose the small ones.
        grad_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=normaliser.dtype) if wants_bias else None
        for start in range(0, len(targets), ctx.rows):
            part = slice(start, start + ctx.rows)
            product = _product(states[part], weight, bias)
            logits = ctx.to_logits(product)
            logprobs = logits.sub_(normaliser[part, None])
            probabilities = logprobs.exp() if through_entropy else logprobs.exp_()
            if through_entropy:
                slope = logprobs.add_(entropy[part, None]).mul_(grad_entropy[part, None])
                slope = slope.add_(grad_logprobs[part, None]).mul_(probabilities).neg_()
            else:
                slope = probabilities.mul_(-grad_logprobs[part, None])
            slope.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            slope = ctx.to_logits.pull_back_(slope, product).to(states.dtype)
            if grad_states is not None:
                torch.mm(slope, weight, out=grad_states[part])
            if grad_weight is not None:
                if grad_weight.dtype == slope.dtype:
                    grad_weight.addmm_(slope.t(), states[part])
                else:
                    grad_weight += slope.t() @ states[part]
            if grad_bias is not None:
                grad_bias += slope.sum(dim=0)
        return (
            grad_states,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


BLOCK = 64  # ids in a block; only the blocks with the highest members are searched


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
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`(ids, logprobs)` (B, T, K) of the K = min(count, V) most likely tokens at `mask`, the most likely first.

    `hidden` (B, T, H), `weight` (V, H); `tokens` and their `logprobs` (B, T) are the sampled ones. With z the logits as
    in `chunked_logprobs`, the normaliser follows from the sampled token y:

        log p(v) = z_v - logsumexp(z) = z_v - z_y + log p(y)

    Off the mask both are 0. Logits exist for a few tokens at a time.
    """

    def squashed(product: Tensor) -> Tensor:
        numbers = product.float()
        capped = numbers * scale if softcap is None else softcap * torch.tanh(numbers * (scale / softcap))
        return capped / temperature

    kept = min(count, weight.shape[0])
    positions = _positions(mask, positions)
    states = states_before(hidden, mask, positions)
    targets, known = (column.flatten().index_select(0, positions)[:, None] for column in (tokens, logprobs))
    ids = torch.empty(len(positions), kept, dtype=torch.int32, device=hidden.device)
    found = torch.empty(len(positions), kept, dtype=torch.float32, device=hidden.device)
    rows = rows_at_a_time(weight, chunk_elements)
    for start in range(0, len(positions), rows):
        part = slice(start, start + rows)
        logits = torch.nn.functional.linear(states[part], weight, bias)
        highest, which = top_of_blocks(logits, kept)
        ids[part] = which
        found[part] = squashed(highest) - squashed(logits.gather(1, targets[part])) + known[part].float()
    return scatter_to_mask(ids, mask, positions), scatter_to_mask(found, mask, positions)


def top_of_blocks(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`values.topk(count)` of each row, (N, V) -> (N, K), found in two levels.

    The highest K values are in the K blocks with the highest maxima, so one pass over all values is enough. The members
    of a block are `blocks` apart, so that neighbouring values belong to different blocks and memory is read in lines.
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
