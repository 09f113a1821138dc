"""Numbers in 8 bits, a block of them at a time: for running means, which span many magnitudes and change by little.

Codes stand for magnitudes on a geometric ladder, so that the error is relative: a running mean of squares that is a
millionth of its neighbour's still has two digits, where evenly spaced codes would call it 0 and divide by nothing.

Two things keep a mean that moves by a thousandth a step from being frozen or blurred by rungs that are further apart:

- Rounding is stochastic and unbiased. Between the rungs a < x < b, x becomes b with probability (x - a) / (b - a), so
  that on average it is x. Rounded to the nearest, a step below half a rung would be lost, every time.
- Rungs are at 2^(n / 2^level) for whole n, whatever the block's largest number is. A number that stands on a rung stays
  there when the block's range moves, and the ladders of finer levels have all rungs of the coarser ones. Each block
  takes the finest level whose codes reach from its largest to its smallest number.

Plain torch, so that it runs wherever training does and needs no package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256  # numbers that share a range
PART = 2**23  # numbers at a time, whole blocks: on the way several fp32 copies of them exist
SMALLEST = torch.finfo(torch.float32).tiny
LEVEL_CODES = 8  # a block's range is kept as top * LEVEL_CODES + level
PLACES = 0x9E3779B1  # odd: different places have different products
MARGIN = 1.0  # octaves that must be left over before a block takes a finer level than it had


@dataclass(frozen=True)
class Codes:
    """How magnitudes become codes: 0 is 0, and code k in 1..steps stands for 2^((top - steps + k) / 2^level).

    A block's `top` and `level` are whole numbers. A magnitude is off by less than the factor 2^(1 / 2^level), and on
    average by nothing, where it is on the ladder. Below it, signed numbers become 0 or the lowest rung, on average
    themselves; others become the lowest rung.
    """

    signed: bool
    coarsest: int  # 2^level rungs to the octave
    finest: int

    @property
    def steps(self) -> int:
        """How many magnitudes there are."""
        return 127 if self.signed else 255

    def close(self, x: Tensor, key: int, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`(codes, ranges)` of x: int8 or uint8 (numbers,), and fp32 (blocks,), not finite where a block is not.

        How the number at place i is rounded depends on `key` and i alone. With the ranges that the blocks had `before`
        a finer level is taken only where it has room to spare, for to come back from it costs accuracy.
        """
        flat = x.reshape(-1)
        codes = torch.empty(len(flat), dtype=torch.int8 if self.signed else torch.uint8, device=x.device)
        ranges = torch.empty(-(-len(flat) // BLOCK), dtype=torch.float32, device=x.device)
        for start in range(0, len(flat), PART):
            numbers, blocks = slice(start, start + PART), slice(start // BLOCK, (start + PART) // BLOCK)
            old = None if before is None else before[blocks]
            codes[numbers], ranges[blocks] = self._close(flat[numbers], start, key, old)
        return codes, ranges

    def open(self, codes: Tensor, ranges: Tensor, shape: torch.Size) -> Tensor:
        """The numbers of these codes, fp32 in the given shape."""
        found = torch.empty(len(codes), dtype=torch.float32, device=codes.device)
        for start in range(0, len(codes), PART):
            numbers, blocks = slice(start, start + PART), slice(start // BLOCK, (start + PART) // BLOCK)
            found[numbers] = self._open(codes[numbers], ranges[blocks])
        return found.view(shape)

    def _close(self, flat: Tensor, start: int, key: int, before: Tensor | None) -> tuple[Tensor, Tensor]:
        blocks = _blocks(flat.float())
        size = blocks.abs()
        top, level = self._ranges(size, before)
        rungs, bottom = torch.exp2(level)[:, None], (top - (self.steps - 1))[:, None]
        # The rung below each number, and where between it and the next the number stands, as a share.
        below = torch.log2(size.clamp_min(SMALLEST)).mul_(rungs).floor_()
        rise = torch.exp2(below / rungs).reciprocal_().mul_(size).sub_(1.0).div_(torch.exp2(1.0 / rungs).sub_(1.0))
        step = below.add_(draws(start, len(flat), key, flat.device, size.shape).lt_(rise)).sub_(bottom).add_(1.0)
        lost = step < 1.0  # off the lower end of the ladder
        step.clamp_(1.0, float(self.steps))
        if self.signed:
            # In place of the lowest rung, 0: with the probability that leaves the mean as it is.
            share = torch.exp2(bottom / rungs).reciprocal().mul(size)
            step.masked_fill_(lost & (draws(start, len(flat), ~key, flat.device, size.shape) >= share), 0.0)
        step.masked_fill_(size == 0.0, 0.0)
        if self.signed:
            step.copysign_(blocks)
        codes = step.view(-1)[: len(flat)].to(torch.int8 if self.signed else torch.uint8)
        return codes, top * LEVEL_CODES + level

    def _ranges(self, size: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """`(top, level)` (blocks,) fp32: the finest level at which all codes but 0 reach over the block."""
        largest = size.amax(dim=1).clamp_min_(SMALLEST)
        smallest = torch.where(size == 0.0, largest[:, None], size).amin(dim=1).clamp_min_(SMALLEST)
        highest = torch.log2(largest)
        octaves = highest - torch.log2(smallest)
        level = self._level(octaves)
        if before is not None:
            level = torch.minimum(level, torch.maximum(self._level(octaves + MARGIN), before.remainder(LEVEL_CODES)))
        return torch.ceil(highest * torch.exp2(level)), level

    def _level(self, octaves: Tensor) -> Tensor:
        # One rung may be lost to rounding the top up, and one to rounding the lowest number down.
        return torch.log2((self.steps - 2) / octaves).floor_().clamp_(self.coarsest, self.finest)

    def _open(self, codes: Tensor, ranges: Tensor) -> Tensor:
        level = ranges.remainder(LEVEL_CODES)
        top = (ranges - level).div(LEVEL_CODES)
        step = _blocks(codes.float())
        size = step.abs()
        nothing = size == 0.0
        found = size.add_((top - self.steps)[:, None]).mul_(torch.exp2(-level)[:, None]).exp2_()
        found.masked_fill_(nothing, 0.0)
        if self.signed:
            found.copysign_(step)
        return found.view(-1)[: len(codes)]


def _blocks(flat: Tensor) -> Tensor:
    """(blocks, BLOCK), with zeros after the last number."""
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def draws(start: int, count: int, key: int, device: torch.device, shape: torch.Size) -> Tensor:
    """`shape` numbers in [0, 1), of which the i-th depends on `key` and `start` + i alone; 0 after the `count`-th.

    A hash of the place (Wellons 2018, lowbias32) in place of a generator: it holds no state, and numbers that are
    drawn in parts, or on another machine, are the same.
    """
    size = math.prod(shape)
    bits = torch.arange(size, dtype=torch.int32, device=device)  # products wrap around, as they should
    bits.mul_(_signed(PLACES)).add_(_signed(start * PLACES & 0xFFFFFFFF)).bitwise_xor_(_signed(mixed(key)))
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits.bitwise_xor_(bits.bitwise_right_shift(shift).bitwise_and_(2 ** (32 - shift) - 1)).mul_(_signed(multiplier))
    found = bits.bitwise_right_shift_(8).bitwise_and_(2**24 - 1).float().mul_(2.0**-24)
    found[count:] = 0.0
    return found.view(shape)


def mixed(*numbers: int) -> int:
    """A hash of whole numbers, in 0 .. 2^32 - 1: what a key is made of."""
    key = 0
    for number in numbers:
        key = (key ^ (number & 0xFFFFFFFF)) * PLACES + 0x7F4A7C15 & 0xFFFFFFFF
        for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            key = (key ^ (key >> shift)) * multiplier & 0xFFFFFFFF
    return key


def _signed(number: int) -> int:
    """The 32 bits of `number` as int32 has them."""
    return number - 2**32 if number >= 2**31 else number


SIGNED = Codes(signed=True, coarsest=3, finest=3)  # a ladder of 15.8 octaves, rungs 9 % apart
UNSIGNED = Codes(signed=False, coarsest=3, finest=7)  # from 31.8 octaves, rungs 9 % apart, to 2 octaves, 0.5 % apart
