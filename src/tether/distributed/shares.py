"""What a learner holds where ranks share its weights: this rank's rows of each trained parameter.

Everything that a step does to single numbers is done on the shares. What reads a whole tensor is done here:

- **Norms.** A norm's bits depend on the order of additions within a tensor. Each gradient is put together on one rank,
  in turn, which takes its norm as one process would.
- **The optimizer's step.** torch's AdamW on a CPU rounds the last numbers of a tensor, those that do not fill a vector,
  differently. A share that does not begin and end with a whole line of `LINE` numbers is held as a `window` of whole
  lines, so that a number is in a vector if and only if it is in the whole tensor.
- **State.** Checkpoints hold shares, and name the whole tensors' types and shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tether.distributed.copies import Copies
from tether.distributed.fsdp import ShardedModels
from tether.distributed.group import ProcessGroup
from tether.learner.learner_state import LearnerState, kind
from tether.learner.norms import HALF, norm_of_norms, tensor_norms

LINE = 16  # numbers: no CPU's vectors hold more of them
BUFFER = 2**23  # numbers of whole gradients that are put together at a time


class Share:
    """One rank's rows of a parameter."""

    def __init__(self, share: Any, copies: Copies) -> None:
        self.share = share  # FSDP's, a DTensor
        with torch.no_grad():
            self.local: Tensor = share.to_local()
        self.shape: torch.Size = share.shape
        rows, self.inner = self.shape[0], math.prod(self.shape[1:])
        most = -(-rows // copies.size)
        ends = [min(rows, most * place) * self.inner for place in range(copies.size + 1)]
        self.sizes = [stop - start for start, stop in itertools.pairwise(ends)]  # of each share
        self.start, self.stop = ends[copies.place], ends[copies.place + 1]
        whole = rows * self.inner
        self.first = self.start // LINE * LINE
        last = min(whole, -(-self.stop // LINE) * LINE)
        self.aligned = (self.first, last) == (self.start, self.stop) or self.start == self.stop
        self.held = nn.Parameter(self.local if self.aligned else self._window(self.local, last))

    def _window(self, local: Tensor, last: int) -> Tensor:
        found = local.new_zeros(last - self.first)
        self.own(found).copy_(local.reshape(-1))
        return found

    def own(self, held: Tensor) -> Tensor:
        """This rank's numbers of a tensor that is as long as `held`, flat."""
        if self.aligned:
            return held.reshape(-1)
        return held[self.start - self.first : self.stop - self.first]

    def cut(self, whole: Tensor) -> Tensor:
        """What this rank holds of a whole tensor of the parameter's shape."""
        own = whole.reshape(-1)[self.start : self.stop]
        if self.aligned:
            return own.view(self.local.shape)
        found = own.new_zeros(len(self.held))
        self.own(found).copy_(own)
        return found

    def take_gradient(self) -> None:
        """Hold the gradient that FSDP left."""
        gradient = None if self.share.grad is None or self.start == self.stop else self.share.grad.to_local()
        if gradient is not None and not self.aligned:
            gradient = self._window(gradient, self.first + len(self.held))
        self.held.grad = gradient

    def publish(self) -> None:
        """Write what is held into FSDP's share."""
        if not self.aligned:
            with torch.no_grad():
                self.local.view(-1).copy_(self.own(self.held))


class Shares:
    """The shares of all trained parameters, by the learner's names."""

    def __init__(
        self,
        group: ProcessGroup,
        copies: Copies,
        models: ShardedModels,
        named: Mapping[str, nn.Parameter],
        *,
        exact: bool,
    ) -> None:
        self.group, self.copies, self.models, self.exact = group, copies, models, exact
        self.by_name = {name: Share(models.shares[parameter], copies) for name, parameter in named.items()}
        self.of_held = {each.held: each for each in self.by_name.values()}
        models.shares.clear()

    @contextmanager
    def summed(self, own_pieces: int) -> Iterator[Callable[[], None]]:
        """See `Ranks.summed`: FSDP adds the gradients up, within the backward passes."""
        used = {id(each.share) for each in self.by_name.values() if each.held.grad is not None}
        for unit in self.models.units:
            if not any(id(share) in used for share in unit.shares):
                unit.forget_gradients()
        done = 0
        earlier = self._set_apart()
        self.models.filling = own_pieces == 0

        def part_done() -> None:
            nonlocal done
            done += 1
            self.models.filling = done >= own_pieces

        try:
            yield part_done
        finally:
            self.models.filling = False
        self._add_copies(earlier)
        for each in self.by_name.values():
            each.take_gradient()

    def _set_apart(self) -> dict[int, Tensor]:
        """With `fast` and several copies: what earlier passes of the step left, which is summed already."""
        if self.copies.count == 1 or self.exact:
            return {}
        found = {id(share): share.grad for share in self._trained() if share.grad is not None}
        for share in self._trained():
            share.grad = None
        return found

    def _add_copies(self, earlier: Mapping[int, Tensor]) -> None:
        """With `fast` and several copies: FSDP added gradients within each, and this adds those of all."""
        if self.copies.count == 1 or self.exact:
            return
        for share in self._trained():
            if share.grad is not None:
                with self.group.connected():
                    self.copies.add(share.grad.to_local())
            if id(share) in earlier:
                share.grad = earlier[id(share)] if share.grad is None else share.grad + earlier[id(share)]

    def _trained(self) -> list[Any]:
        """FSDP's shares of what is trained."""
        return [each.share for each in self.by_name.values()]

    def stepped(self) -> None:
        """The learner changed what it holds; its gradient has been used."""
        for each in self.by_name.values():
            each.publish()
        for unit in self.models.units:
            unit.forget_gradients()

    # -- norms --------------------------------------------------------------------------------------------------------

    def exact_norm(self, parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
        """The norm of whole gradients, with the bits of one process."""
        used = self._used(parameters)
        norms = torch.zeros(len(used), dtype=torch.float64, device=device)
        for places in _portions(used):
            for place, whole in self._put_together(used, places):
                norms[place] = tensor_norms([whole])[0].double()
        with self.group.connected():
            dist.all_reduce(norms, group=self.copies.sharing)  # each is 0 on all of these ranks but one
        halves = [each.local.dtype in HALF for each in used]
        wide = torch.promote_types(used[0].local.dtype, torch.float32) if used else torch.float32
        return norm_of_norms(list(norms.to(wide)), halves, device)

    def fast_norm(self, parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
        """The norm from the squares of every rank's share."""
        own = [each.own(each.held.grad) for each in self._used(parameters) if each.held.grad is not None]
        squares = torch.stack([*tensor_norms(own), torch.zeros((), device=device)]).double().square().sum()
        with self.group.connected():
            dist.all_reduce(squares, group=self.copies.sharing)
        return squares.sqrt().float()

    def _used(self, parameters: Sequence[nn.Parameter]) -> list[Share]:
        """The shares with a gradient; one whose parameter has no rows here goes with those of its unit."""
        used = [self.of_held[each] for each in parameters]
        return [each for each in used if each.share.grad is not None]

    def _put_together(self, used: Sequence[Share], places: Sequence[int]) -> list[tuple[int, Tensor]]:
        """The whole gradients that fall to this rank, out of these."""
        count, index = self.copies.size, self.copies.place
        mine = [place for place in places if place % count == index]
        sent: list[Tensor] = []
        for rank in range(count):
            sent += [self._gradient(used[place]) for place in places if place % count == rank]
        sizes = [sum(used[p].sizes[index] for p in places if p % count == rank) for rank in range(count)]
        parts = [sum(used[p].sizes[rank] for p in mine) for rank in range(count)]
        flat = torch.cat(sent)
        received = flat.new_empty(sum(parts))
        width = flat.element_size()
        with self.group.connected():
            dist.all_to_all_single(
                received.view(torch.uint8),
                flat.view(torch.uint8),
                [part * width for part in parts],
                [size * width for size in sizes],
                group=self.copies.sharing,
            )
        rest = list(received.split(parts))
        found: list[tuple[int, Tensor]] = []
        for place in mine:
            own = [part[: used[place].sizes[rank]] for rank, part in enumerate(rest)]
            rest = [part[used[place].sizes[rank] :] for rank, part in enumerate(rest)]
            found.append((place, torch.cat(own).view(used[place].shape)))
        return found

    def _gradient(self, share: Share) -> Tensor:
        gradient = share.held.grad
        return share.local.new_empty(0) if gradient is None else share.own(gradient)

    # -- state --------------------------------------------------------------------------------------------------------

    def stored(self, state: LearnerState) -> LearnerState:
        """This rank's numbers of each tensor, flat, in the first copy; the kinds are those of the whole tensors."""
        tensors: dict[str, Tensor] = {}
        kinds: dict[str, str] = {}
        for name, tensor in state.tensors.items():
            share = self._share(name)
            if tensor.dim() == 0:
                kinds[name] = kind(tensor)
                if self.group.index == 0:
                    tensors[name] = tensor
                continue
            kinds[name] = _kind(tensor, share.shape)
            if share.start < share.stop and self.copies.copy == 0:
                tensors[name] = share.own(tensor)
        return LearnerState(tensors, state.numbers | {"kinds": kinds})

    def held(self, state: LearnerState) -> LearnerState:
        """What this rank holds of a state of whole tensors, one by one."""
        names = state.numbers["kinds"]
        tensors = {}
        for name in names:
            whole = state.tensors[name]
            tensors[name] = whole if whole.dim() == 0 else self._share(name).cut(whole).clone()
        return replace(state, tensors=tensors)

    def _share(self, name: str) -> Share:
        return self.by_name[name if name in self.by_name else name.rpartition("/")[0]]


def _kind(tensor: Tensor, shape: torch.Size) -> str:
    return kind(torch.empty(shape, dtype=tensor.dtype, device="meta"))


def _portions(used: Sequence[Share]) -> Iterator[list[int]]:
    """Places of the gradients that are put together at a time: of one type, and not too many."""
    portion: list[int] = []
    size = 0
    for place, share in enumerate(used):
        numbers = math.prod(share.shape)
        if portion and (size + numbers > BUFFER or used[portion[0]].local.dtype != share.local.dtype):
            yield portion
            portion, size = [], 0
        portion.append(place)
        size += numbers
    if portion:
        yield portion
