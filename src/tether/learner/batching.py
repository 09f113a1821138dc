"""Splitting a batch into minibatches and micro-batches, and evaluating it under every role before the first update.

A minibatch is one optimiser step; a micro-batch is what fits in memory. When memory runs out, the parts are made
smaller and tried again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from tether.device_transfer import brought
from tether.errors import StorageError
from tether.learner.ranks import ONE, Codec, Ranks
from tether.models.roles import TokenEvaluation, onto
from tether.types import EvaluatedBatch, Sequences, TokenBatch, extend


def minibatches(batch: Sequences, size: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
    """Row sets of `size` units each (the last may be smaller), in order, or shuffled by `generator`.

    The first epoch is read in order, which is also how the old log-probs were evaluated: the same rows in the same
    micro-batches give the same bits, so that on the first step every ratio is exactly 1.
    """
    groups = None if batch.rows_are_groups else batch.row_groups()
    count = len(batch) if groups is None else len(groups)
    order = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
    if groups is None:
        yield from order.split(size) if count else ()
        return
    for start in range(0, len(groups), size):
        yield torch.tensor([row for index in order[start : start + size].tolist() for row in groups[index]])


def micro_batches(batch: Sequences, max_tokens: int) -> Iterator[Tensor]:
    """Row sets whose padded size (rows x longest) stays within `max_tokens`; units are never split.

    Groups of similar length are put together to waste little on padding. A group that is larger than `max_tokens` by
    itself still goes, alone: the budget bounds memory, it does not drop data.
    """
    real = batch.attention_mask.cpu()
    if len(batch) and batch.rows_are_groups and bool(real.all()):  # the cuts below, without a look at each row
        yield from torch.arange(len(batch)).split(max(1, max_tokens // real.shape[1]))
        return
    lengths = real.sum(dim=1).tolist()
    firsts = real.int().argmax(dim=1).tolist()
    lasts = (real.shape[1] - real.flip(1).int().argmax(dim=1)).tolist()
    groups = batch.row_groups()
    longest = [max(lengths[row] for row in group) for group in groups]
    current: list[int] = []
    first, last = 0, 0
    for index in sorted(range(len(groups)), key=lambda index: -longest[index]):
        group = groups[index]
        low, high = min(firsts[row] for row in group), max(lasts[row] for row in group)
        if current and (len(current) + len(group)) * (max(last, high) - min(first, low)) > max_tokens:
            yield torch.tensor(current)
            current = []
        first, last = (min(first, low), max(last, high)) if current else (low, high)
        current += group
    if current:
        yield torch.tensor(current)


@dataclass(frozen=True)
class BatchPart:
    """A micro-batch, and its rows in the batch."""

    micro: Any  # a Sequences, of whatever stage
    rows: Tensor  # (B,) its rows' places in the batch
    first: int  # the batch's column that is its first
    number: int = 0  # its place among the batch's micro-batches


class Parts:
    """Cuts batches into parts that fit in memory, trimmed of needless padding, and puts these on a device.

    Parts are made one by one, each while the device is at work on those before. Only for the first one of a batch would
    it stand idle, so that one can be made beforehand.
    """

    def __init__(self, device: torch.device, wanted: Callable[[int], bool] = lambda number: True) -> None:  # noqa: ARG005
        """`wanted` says of a part's number whether the part is made."""
        self.device = device
        self.wanted = wanted
        self._begun: tuple[Sequences, int, Iterator[BatchPart]] | None = None

    def begin(self, batch: Sequences, max_tokens: int) -> None:
        """Prepare the first part of a batch that comes next."""
        self._begun = None
        parts = self._cut(batch, max_tokens)
        first = list(islice(parts, 1))
        self._begun = batch, max_tokens, chain(first, parts)

    def of(self, batch: Sequences, max_tokens: int) -> Iterator[BatchPart]:
        """The batch's parts of at most `max_tokens` tokens."""
        if self._begun is None or self._begun[0] is not batch:
            return self._cut(batch, max_tokens)
        (_, cut_for, parts), self._begun = self._begun, None
        return parts if cut_for == max_tokens else self._cut(batch, max_tokens)

    def _cut(self, batch: Sequences, max_tokens: int) -> Iterator[BatchPart]:
        for number, rows in enumerate(micro_batches(batch, max_tokens)):
            if self.wanted(number):
                whole = len(rows) == len(batch) and bool((rows[1:] > rows[:-1]).all())
                selected = batch if whole else batch.select(rows)
                yield BatchPart(onto(selected.trimmed(), self.device), rows, selected.span()[0], number)


T = TypeVar("T")
MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device is out of memory; only CUDA has an error class for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MESSAGES)


def within_memory(attempt: Callable[[], T], make_room: Callable[[], object]) -> T:
    """What `attempt` returns, tried again after `make_room` as often as it runs out of memory.

    `make_room` raises once nothing more can be done. `attempt` must begin from the beginning each time.
    """
    while True:
        try:
            return attempt()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # Outside the handler: the exception holds the frames that failed, and those hold the memory.
        make_room()


def step_within_memory(optimizer: torch.optim.Optimizer) -> None:
    """Take the optimiser's step; a first step that has no room for the optimiser's state cannot be mended here."""
    try:
        optimizer.step()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise StorageError(
            "out of memory in the optimiser's step: its state does not fit. Train fewer weights (roles.mode lora "
            "or top, roles.critic head), or take a smaller model"
        ) from error


def free_cache(device: torch.device) -> None:
    """Give back what only looks used, so that smaller parts find a whole piece of memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def smaller_budget(batches: Sequence[Sequences], micro_batch_tokens: int) -> int:
    """`micro_batch_tokens` halved, and halved again until at least one of the batches is really cut into more parts."""
    now = count_parts(batches, micro_batch_tokens)
    if now == sum(len(batch.row_groups()) for batch in batches):
        longest = max(int(batch.lengths().max()) for batch in batches)
        raise StorageError(
            f"out of memory with a single row, prompt or pair at a time (the longest row has {longest} tokens), so "
            "optimizer.micro_batch_tokens cannot be lowered further: make rows shorter (rollout.max_new_tokens, "
            "data.max_length, ptx.max_length), or share memory between the roles (roles.mode)"
        )
    smaller = micro_batch_tokens // 2
    while smaller > 1 and count_parts(batches, smaller) == now:
        smaller //= 2
    return smaller


def count_parts(batches: Sequence[Sequences], micro_batch_tokens: int) -> int:
    """How many micro-batches these batches are cut into."""
    return sum(1 for batch in batches for _ in micro_batches(batch, micro_batch_tokens))


Elsewhere = Callable[[Any], object]
"""What a rank does with a micro-batch that another rank runs, such as keeping its shared backbone in step."""

EVALUATIONS = Codec[TokenEvaluation](
    lambda found: (None, {name: value.cpu() for name, value in vars(found).items() if value is not None}),
    lambda _, columns: TokenEvaluation(**{name: columns.get(name) for name in TokenEvaluation.__dataclass_fields__}),  # pyright: ignore[reportArgumentType]
)


class Evaluator(Protocol):
    """Whatever holds the roles of a run."""

    def present(self) -> AbstractContextManager[object]:
        """A context in which every role is on its device."""
        ...

    def evaluate(self, batch: Any, *, ahead: bool = False, top_tokens: int = 0) -> TokenEvaluation:
        """The roles' outputs for a micro-batch."""
        ...


ShrinkMicroBatch = Callable[[Sequence[Sequences]], int]
"""Makes the micro-batches of the given batches smaller, and returns their new maximum of tokens."""


def evaluate_tokens(
    batch: TokenBatch,
    roles: Evaluator,
    *,
    minibatch_size: int,
    micro_batch_tokens: int,
    device: torch.device | str,
    shrink_micro_batch: ShrinkMicroBatch | None = None,
    top_tokens: int = 0,
    ranks: Ranks = ONE,
    elsewhere: Elsewhere | None = None,
) -> EvaluatedBatch:
    """Old and reference log-probs and values, in the very micro-batches that the first epoch will train on.

    With `top_tokens`, also that many of the policy's most likely tokens at each position. Micro-batches are dealt over
    `ranks`, and every rank gets all columns; `elsewhere` is called with the micro-batches that other ranks run.

    The same rows in the same shapes go through the same kernels, so that on the first step old and new log-probs are
    equal to the bit and every ratio is exactly 1.

    When memory runs out, `shrink_micro_batch` gives a smaller `micro_batch_tokens` and all is run again. Should
    memory run out later, in the update, its micro-batches are no longer those of this evaluation, and for that one
    iteration the first ratios are 1 only up to rounding.
    """
    steps = list(minibatches(batch, minibatch_size))

    def attempt() -> EvaluatedBatch:
        parts = [
            minibatch[rows]
            for minibatch in steps
            for rows in micro_batches(batch.select(minibatch), micro_batch_tokens)
        ]
        return _evaluate(batch, roles, parts, device, top_tokens, ranks, elsewhere)

    def make_room() -> None:
        nonlocal micro_batch_tokens
        assert shrink_micro_batch is not None
        micro_batch_tokens = shrink_micro_batch([batch.select(minibatch) for minibatch in steps])

    return attempt() if shrink_micro_batch is None else within_memory(attempt, make_room)


def _evaluate(
    batch: TokenBatch,
    roles: Evaluator,
    parts: Sequence[Tensor],
    device: torch.device | str,
    top_tokens: int,
    ranks: Ranks,
    elsewhere: Elsewhere | None,
) -> EvaluatedBatch:
    """Evaluate each part separately, and gather the columns of the batch after all parts are queued."""
    spans: list[slice] = []

    def evaluate_own() -> list[tuple[int, TokenEvaluation]]:
        found: list[tuple[int, TokenEvaluation]] = []
        with roles.present():
            for number, places in enumerate(parts):
                micro = batch.select(places)
                spans.append(slice(*micro.span()))
                if ranks.runs(number):
                    rows = onto(micro.trimmed(), device)
                    ahead = len(parts) == 1 and not ranks.sharded  # its graph would outlive the gathered weights
                    found.append((number, roles.evaluate(rows, ahead=ahead, top_tokens=top_tokens)))
                elif elsewhere is not None:
                    elsewhere(onto(micro.trimmed(), device))
            if ranks.fills(len(parts)):
                roles.evaluate(onto(batch.select(parts[-1]).trimmed(), device), top_tokens=top_tokens)
        return found

    evaluations = ranks.merged(evaluate_own, EVALUATIONS)
    found = list(zip(parts, spans, evaluations, strict=True))
    columns = {
        name: _column(batch, [(places, span, getattr(evaluation, name)) for places, span, evaluation in found])
        for name in TokenEvaluation.__dataclass_fields__
    }
    return extend(batch, EvaluatedBatch, **columns)


def _column(batch: TokenBatch, found: Sequence[tuple[Tensor, slice, Tensor | None]]) -> Tensor | None:
    """(B, ...) or (B, T, ...) of what was found of each part's rows and columns; 0 elsewhere."""
    parts = brought([part for _, _, part in found if part is not None])  # every part has the column, or none
    if not parts:
        return None
    by_token = parts[0].dim() >= 2
    shape = (*batch.response_mask.shape, *parts[0].shape[2:]) if by_token else (len(batch),)
    column = torch.zeros(shape, dtype=parts[0].dtype)
    for (places, span, _), part in zip(found, parts, strict=True):
        column[(places, span) if by_token else places] = part
    return column
