"""The ranks that train together: what each of them runs, and how their results become one.

A rank is one process. Every rank holds the whole batch and runs the same steps; of each batch it runs its own
micro-batches. `Ranks` is the seam: here it is a process by itself, and `tether.distributed` has the implementation
for several. Whoever deals work over ranks writes it once, for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from tether.learner.learner_state import LearnerState
from tether.learner.norms import total_norm
from tether.types import Metrics

T = TypeVar("T")

GRADIENT_BUFFER = 2**25  # numbers of gradients that ranks exchange at a time

Packed = tuple[Any, dict[str, Tensor]]
"""A value as JSON and named tensors on the host."""


@dataclass(frozen=True)
class Codec(Generic[T]):
    """How a value travels from one rank to another: as JSON and tensors, without loss of a bit."""

    pack: Callable[[T], Packed]
    unpack: Callable[[Any, dict[str, Tensor]], T]


class Ranks:
    """The ranks of a run, as one of them sees them. All ranks make the same calls in the same order.

    This class is a process by itself: it runs everything, and exchanges nothing.
    """

    index = 0
    count = 1
    launch = ""  # the id of what started this process, and starts it again when a rank is lost; empty: nothing does
    fault = ""  # why it was started again, if it was

    def runs(self, number: int) -> bool:  # noqa: ARG002
        """Whether this rank runs the piece of work with this global number."""
        return True

    def merged(self, work: Callable[[], Sequence[tuple[int, T]]], codec: Codec[T]) -> list[T]:  # noqa: ARG002
        """The results of every rank's `work`, in the order of their global numbers.

        If `work` raises on one rank, every rank raises: an out-of-memory error is one on all ranks.
        """
        return [found for _, found in work()]

    def first(self, work: Callable[[], T], codec: Codec[T]) -> T:  # noqa: ARG002
        """What `work` returns on rank 0, which alone runs it."""
        return work()

    def summed(
        self,
        parameters: Sequence[nn.Parameter],  # noqa: ARG002
        pieces: Callable[[], int],  # noqa: ARG002
    ) -> AbstractContextManager[Callable[[], None]]:
        """While entered, gradients are added up over all ranks; `pieces` counts the batch's micro-batches.

        The function that it gives is called after the backward pass of each micro-batch. On leaving, `.grad` of each
        parameter is what it was plus the gradients of all micro-batches, on every rank.
        """
        return nullcontext(_nothing)  # backward passes add to `.grad` by themselves

    # -- weights that ranks share (`distributed.shard: full`); here they are whole ------------------------------------

    sharded = False

    def fills(self, pieces: int) -> bool:  # noqa: ARG002
        """Whether this rank repeats the last of this many pieces, for the others to gather weights in their last."""
        return False

    def norms(self, groups: Mapping[str, Sequence[nn.Parameter]], device: torch.device) -> dict[str, Tensor]:
        """The norm of each group's gradients, whole."""
        return {
            name: total_norm([p.grad for p in parameters if p.grad is not None], device)
            for name, parameters in groups.items()
        }

    def stored(self, state: LearnerState) -> LearnerState:
        """A learner's state as this rank writes it to a checkpoint."""
        return state

    def held(self, state: LearnerState) -> LearnerState:
        """The state of a checkpoint, as this rank's learner holds it."""
        return state

    def stepped(self) -> None:
        """The learner changed the weights that it holds."""

    def all_agree(self, here: bool) -> bool:
        """Whether it holds on every rank that has a part in the weights."""
        return here

    def gathered(self) -> AbstractContextManager[None]:
        """A context in which the trained model is whole on every rank; all ranks enter it."""
        return nullcontext()

    def whole(self) -> AbstractContextManager[None]:
        """The same between two steps, where only rank 0 is at work."""
        return nullcontext()

    def write_shares(self, folder: Path, checkpoint: T) -> T:  # noqa: ARG002
        """Have each rank write its share of a checkpoint; returns what is left to write."""
        return checkpoint

    # -- the run ------------------------------------------------------------------------------------------------------

    def join(self, training: T, recipe: Any) -> T:  # noqa: ARG002
        """Have the other ranks build the same training, and deal this one's work over all ranks."""
        return training

    def begin(self, training: Any, start: int) -> None:
        """Have the other ranks take over this one's state after `start` steps."""

    def asking(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """`stop`, with each step that is taken announced to the other ranks."""
        return stop


def _nothing() -> None:
    pass


ONE = Ranks()
_current: Ranks = ONE


def current_ranks() -> Ranks:
    """The ranks that this process trains with: by itself, unless it was started as one of several."""
    return _current


@contextmanager
def using_ranks(ranks: Ranks) -> Iterator[None]:
    """Have runs of this process train with these ranks."""
    global _current
    before, _current = _current, ranks
    try:
        yield
    finally:
        _current = before


# -- how values travel ------------------------------------------------------------------------------------------------


def pack_metrics(found: tuple[Metrics, Tensor]) -> Packed:
    """Metrics and a scalar; Python's JSON keeps every bit of a float64, and of what is not finite."""
    metrics, total = found
    pairs = {name: [float(of), float(weight)] for name, (of, weight) in metrics.weighted.items()}
    return {"weighted": pairs, "counts": metrics.counts}, {"total": total.detach().cpu()}


def unpack_metrics(value: Any, tensors: dict[str, Tensor]) -> tuple[Metrics, Tensor]:
    """What `pack_metrics` was given."""
    metrics = Metrics()
    for name, (total, weight) in value["weighted"].items():
        metrics.add(name, total, weight)
    for name, number in value["counts"].items():
        metrics.count(name, number)
    return metrics, tensors["total"]


METRICS = Codec(pack_metrics, unpack_metrics)
