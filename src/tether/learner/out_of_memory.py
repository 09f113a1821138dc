"""Running out of memory: what it looks like, and how to try again in smaller parts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from tether.errors import StorageError
from tether.learner.batching import micro_batches
from tether.types import Sequences

T = TypeVar("T")
MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device said that it has no memory left; only CUDA has a class of its own for it."""
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
    now = _parts(batches, micro_batch_tokens)
    if now == sum(len(batch.row_groups()) for batch in batches):
        longest = max(int(batch.lengths().max()) for batch in batches)
        raise StorageError(
            f"out of memory with a single row, prompt or pair at a time (the longest row has {longest} tokens), so "
            "optimizer.micro_batch_tokens cannot be lowered further: make rows shorter (rollout.max_new_tokens, "
            "data.max_length, ptx.max_length), or share memory between the roles (roles.mode)"
        )
    smaller = micro_batch_tokens // 2
    while smaller > 1 and _parts(batches, smaller) == now:
        smaller //= 2
    return smaller


def _parts(batches: Sequence[Sequences], micro_batch_tokens: int) -> int:
    return sum(1 for batch in batches for _ in micro_batches(batch, micro_batch_tokens))
