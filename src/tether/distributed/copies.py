"""Copies of the weights, each shared by some ranks (`distributed.shard`): which rank has which share of which copy.

With `full` all ranks share one copy. With `hybrid`, W ranks are G groups of S that follow each other: rank g S + s has
share s of copy g. Weights are gathered within a copy, so that they stay in a machine. Gradients cross copies: each
number of the sum has to hear from every rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tether.config.sections import DistributedSettings
from tether.distributed.group import PATIENCE, ProcessGroup
from tether.processes import ranks_of_machine


class Copies:
    """The copies, as one rank sees them."""

    def __init__(self, group: ProcessGroup, size: int) -> None:
        self.ranks, self.size, self.count = group.count, size, group.count // size
        self.copy, self.place = divmod(group.index, size)
        self.sharing: Any = dist.group.WORLD  # the ranks of this copy
        self.holding: Any = None  # the ranks that hold this share, one of each copy
        if self.count > 1:
            of_copy = [[copy * size + place for place in range(size)] for copy in range(self.count)]
            of_share = [list(found) for found in zip(*of_copy, strict=True)]
            self.sharing, _ = dist.new_subgroups_by_enumeration(of_copy, timeout=PATIENCE)
            self.holding, _ = dist.new_subgroups_by_enumeration(of_share, timeout=PATIENCE)

    def mesh(self, device: str) -> DeviceMesh:
        """The ranks of this copy, for FSDP."""
        return DeviceMesh.from_group(self.sharing, device)

    def dealt(self, shares: Tensor) -> Tensor:
        """(S x n,) numbers by share as (W x m,) numbers by rank, where each copy is sent its part of each share."""
        if self.count == 1:
            return shares
        by_share = shares.view(self.size, -1)
        length = by_share.shape[1]
        part = -(-length // self.count)
        padded = torch.full((self.size, self.count * part), -0.0, dtype=shares.dtype, device=shares.device)
        padded[:, :length] = by_share
        return padded.view(self.size, self.count, part).transpose(0, 1).reshape(-1)

    def joined(self, part: Tensor, length: int) -> Tensor:
        """(n,) the share, of which every copy has added up one part."""
        whole = part.new_empty(self.count * len(part))
        dist.all_gather(list(whole.view(torch.uint8).view(self.count, -1)), part.view(torch.uint8), group=self.holding)
        return whole[:length]

    def add(self, numbers: Tensor) -> None:
        """Add up what each copy has, in place, in an order of the library's choosing."""
        dist.all_reduce(numbers, group=self.holding)


def copies_of(settings: DistributedSettings, group: ProcessGroup) -> tuple[Copies, tuple[str, ...]]:
    """The copies that the settings ask for, and what there is to say about them."""
    (machines,) = group.all_numbers(ranks_of_machine(group.count))
    alike = len(set(machines)) == 1
    size = settings.sharing(group.count, machines[0] if alike else group.count)
    notice: tuple[str, ...] = ()
    if settings.shard == "hybrid" and settings.shard_ranks not in (0, size):
        notice = (
            f"distributed.shard_ranks is {settings.shard_ranks}, which does not divide {group.count} ranks: all of "
            "them share one copy of the weights",
        )
    elif settings.shard == "hybrid" and not settings.shard_ranks and not alike:
        notice = ("machines have different numbers of ranks: all ranks share one copy of the weights",)
    return Copies(group, size), notice
