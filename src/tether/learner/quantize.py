"""Numbers in 8 bits, a block of them at a time, with one fp32 scale: for running means, which span many magnitudes.

A block's largest magnitude is its scale. Codes stand for magnitudes on a geometric ladder below it, so that the error
is relative: a running mean of squares that is a millionth of its neighbour's still has two digits, where evenly spaced
codes would call it 0 and divide by nothing. Plain torch, so that it runs wherever training does and needs no package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256  # numbers that share a scale
PART = 2**23  # numbers at a time, whole blocks: on the way several fp32 copies of them exist


@dataclass(frozen=True)
class Codes:
    """How magnitudes become codes: 0 is 0, and code k in 1..steps stands for scale * floor ** ((steps - k) / steps').

    With steps' = steps - 1: the last code is the scale itself, the first is floor times it. A magnitude is off by at
    most the factor `ratio` ** 0.5 where it is at least floor * scale, and by at most floor * scale below.
    """

    signed: bool
    floor: float  # the smallest magnitude, as a share of the scale

    @property
    def steps(self) -> int:
        """How many magnitudes there are."""
        return 127 if self.signed else 255

    @property
    def ratio(self) -> float:
        """From one magnitude to the next."""
        return self.floor ** (-1.0 / (self.steps - 1))

    def close(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`(codes, scales)` of x: int8 or uint8 (numbers,), and fp32 (blocks,)."""
        codes, scales = zip(*map(self._close, x.reshape(-1).split(PART)), strict=True)
        return torch.cat(codes), torch.cat(scales)

    def open(self, codes: Tensor, scales: Tensor, shape: torch.Size) -> Tensor:
        """The numbers of these codes, fp32 in the given shape."""
        found = torch.empty(len(codes), dtype=torch.float32, device=codes.device)
        parts = (found.split(PART), codes.split(PART), scales.split(PART // BLOCK))
        for part, own_codes, own_scales in zip(*parts, strict=True):
            part.copy_(self._open(own_codes, own_scales))
        return found.view(shape)

    def _close(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        flat = flat.float()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1)
        share = blocks.abs() / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        # log(0) is -inf, which the clamp takes to 0: the code of 0.
        step = torch.log(share).div_(math.log(self.ratio)).add_(self.steps).round_().clamp_(0, self.steps)
        # A mean nearer to 0 than to the smallest magnitude is 0. A mean of squares divides: unless it is 0 it must
        # not become 0, so it is rounded up, which makes a step shorter rather than endless.
        nothing = share < 0.5 * self.floor if self.signed else share == 0.0
        step = torch.where(nothing, torch.zeros_like(step), step.clamp_(min=1.0))
        if self.signed:
            step = torch.copysign(step, blocks)
        return step.view(-1)[: len(flat)].to(torch.int8 if self.signed else torch.uint8), scales

    def _open(self, codes: Tensor, scales: Tensor) -> Tensor:
        step = torch.nn.functional.pad(codes.float(), (0, -len(codes) % BLOCK)).view(-1, BLOCK)
        size = step.abs()
        magnitude = torch.exp((size - self.steps) * math.log(self.ratio)) * scales[:, None]
        found = torch.where(size == 0, torch.zeros_like(magnitude), magnitude)
        if self.signed:
            found = torch.copysign(found, step)
        return found.view(-1)[: len(codes)]


SIGNED = Codes(signed=True, floor=1e-5)
UNSIGNED = Codes(signed=False, floor=1e-9)
