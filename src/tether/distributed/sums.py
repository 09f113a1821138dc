"""Adding gradients over ranks: in the order of micro-batches, or by one all-reduce.

**Exact.** One process adds the gradients g_0, g_1, ... of its micro-batches to `.grad` in turn. With W ranks,
micro-batch i runs on rank i mod W, and after each round of W micro-batches

    s = ((s + g_{kW}) + g_{kW+1}) + ... + g_{kW+W-1}

is computed element by element: an all-to-all gives each rank its share of the elements of all W gradients, which it
adds in order. The order of additions is that of one process, so every bit is. At the end the shares are gathered.

-0.0 is the number that changes nothing when it is added (x + -0.0 is x, also for x = 0.0), so it stands for the
gradient of a parameter that a micro-batch does not use. A parameter that none uses keeps no gradient.

**Fast.** Each rank adds its own gradients, and one all-reduce adds the sums of ranks, in an order of its choosing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tether.distributed.group import ProcessGroup, is_agreed
from tether.learner.ranks import GRADIENT_BUFFER


@dataclass(frozen=True)
class FlatBuffer:
    """Parameters of one type that are exchanged together."""

    places: list[int]  # of the parameters
    sizes: list[int]
    padded: int  # numbers, a multiple of the number of ranks
    dtype: torch.dtype
    device: torch.device

    def flat(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """(padded,) the gradients side by side, -0.0 where there is none."""
        found = torch.full((self.padded,), -0.0, dtype=self.dtype, device=self.device)
        for place, part in zip(self.places, found.split([*self.sizes, self.padded - sum(self.sizes)]), strict=False):
            gradient = gradients[place]
            if gradient is not None:
                part.copy_(gradient.reshape(-1))
        return found


def flat_buffers(parameters: Sequence[nn.Parameter], ranks: int, most: int = GRADIENT_BUFFER) -> list[FlatBuffer]:
    """The parameters in buffers of at most `most` numbers, or of one parameter."""
    found: list[FlatBuffer] = []
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, parameter in enumerate(parameters):
        kinds.setdefault((parameter.dtype, parameter.device), []).append(place)
    for (dtype, device), places in kinds.items():
        current: list[int] = []
        size = 0
        for place in [*places, None]:
            if current and (place is None or size + parameters[place].numel() > most):
                sizes = [parameters[each].numel() for each in current]
                found.append(FlatBuffer(current, sizes, -(-size // ranks) * ranks, dtype, device))
                current, size = [], 0
            if place is not None:
                current.append(place)
                size += parameters[place].numel()
    return found


class GradientSums:
    """Of one batch: the gradients that its micro-batches add to `.grad`, over all ranks."""

    def __init__(self, group: ProcessGroup, parameters: Sequence[nn.Parameter]) -> None:
        self.group, self.parameters = group, parameters
        self.buffers = flat_buffers(parameters, group.count)
        self.used = torch.tensor([parameter.grad is not None for parameter in parameters])

    def taken(self) -> list[Tensor | None]:
        """The gradients, which are taken off the parameters."""
        found = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return found

    def agree_on_used(self, gradients: Sequence[Tensor | None]) -> None:
        """Note which parameters have a gradient on any rank."""
        mine = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
        with self.group.connected():
            dist.all_reduce(mine, dist.ReduceOp.MAX)
        self.used |= mine.bool()

    def put(self, buffer: FlatBuffer, whole: Tensor) -> None:
        """Write a buffer's sums (padded,) to `.grad`, in the layout of the parameters."""
        for place, part in zip(
            buffer.places, whole.split([*buffer.sizes, buffer.padded - sum(buffer.sizes)]), strict=False
        ):
            parameter = self.parameters[place]
            if self.used[place]:
                parameter.grad = torch.empty_like(parameter).copy_(part.view(parameter.shape))


class OrderedSums(GradientSums):
    """Sums in the order of micro-batches."""

    def __init__(self, group: ProcessGroup, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(group, parameters)
        before = self.taken()
        self.shares = [self._own(buffer.flat(before)).clone() for buffer in self.buffers]

    def _own(self, flat: Tensor) -> Tensor:
        return flat.view(self.group.count, -1)[self.group.index]

    def add_round(self) -> None:
        """Add what is in `.grad` of every rank, in the order of ranks."""
        gradients = self.taken()
        self.agree_on_used(gradients)
        for buffer, share in zip(self.buffers, self.shares, strict=True):
            sent = buffer.flat(gradients)
            received = torch.empty_like(sent)
            with self.group.connected():
                dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8))
            for part in received.view(self.group.count, -1):
                share += part

    def finish(self) -> None:
        """Gather the shares into `.grad` of every rank."""
        for buffer, share in zip(self.buffers, self.shares, strict=True):
            whole = torch.empty(buffer.padded, dtype=buffer.dtype, device=buffer.device)
            with self.group.connected():
                dist.all_gather(list(whole.view(torch.uint8).view(self.group.count, -1)), share.view(torch.uint8))
            self.put(buffer, whole)


class FastSums(GradientSums):
    """Sums of each rank's sum."""

    def __init__(self, group: ProcessGroup, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(group, parameters)
        self.before = self.taken()

    def finish(self) -> None:
        """Add up over ranks, and to what was there before."""
        gradients = self.taken()
        self.agree_on_used(gradients)
        for buffer in self.buffers:
            whole = buffer.flat(gradients)
            with self.group.connected():
                dist.all_reduce(whole)
            self.put(buffer, whole.add_(buffer.flat(self.before)))


@contextmanager
def exact_sums(
    group: ProcessGroup, parameters: Sequence[nn.Parameter], pieces: Callable[[], int]
) -> Iterator[Callable[[], None]]:
    """See `Ranks.summed`: every bit as if one process had run all micro-batches."""
    sums = OrderedSums(group, parameters)
    rounds = -(-pieces() // group.count)
    done = 0

    def part_done() -> None:
        nonlocal done
        done += 1
        group.check(None)
        sums.add_round()

    failed: Exception | None = None
    try:
        yield part_done
        while done < rounds:  # the last round has fewer micro-batches than ranks
            part_done()
    except Exception as error:
        if is_agreed(error):
            raise
        failed = error
    group.check(failed)  # the others check as well, before their next round or at the end
    sums.finish()


@contextmanager
def fast_sums(
    group: ProcessGroup, parameters: Sequence[nn.Parameter], pieces: Callable[[], int]
) -> Iterator[Callable[[], None]]:
    """See `Ranks.summed`: within rounding of what one process computes."""
    del pieces
    sums = FastSums(group, parameters)
    failed: Exception | None = None
    try:
        yield lambda: None
    except Exception as error:
        if is_agreed(error):
            raise
        failed = error
    group.check(failed)
    sums.finish()
