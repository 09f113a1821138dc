"""AdamW for weights in half precision: fp32 master weights, and 8-bit moments where memory is short.

A bf16 number has 8 significant bits: a step below 1/256 of a weight rounds to nothing, and with the learning rates of
RL most steps are that small. The optimiser therefore keeps each weight in fp32 (its master), steps the master, and
rounds it into the model. A master starts at a random number among those that round to its weight (`drawn_master`), so
that the model moves from the first step on.

8-bit moments are stored as codes in blocks. Codes are magnitudes 2^(n / 2^level) on a geometric ladder, so the error is
relative; evenly spaced codes would round a small running mean of squares to 0. Rounding is stochastic and unbiased:
between a < x < b, x becomes b with probability (x - a) / (b - a), so small changes survive on average. The rungs do not
depend on the block's range, so a number on a rung keeps its value when the range moves; a block uses the finest level
that spans its numbers. The draws follow from the optimiser's seed, the parameter's index, its step count and the
number's index, so no generator state is kept.

All state is plain tensors per parameter, so checkpoints hold it bit for bit: `step`, `master` for half-precision
weights, and `exp_avg` and `exp_avg_sq` or their codes and ranges. With codes a second step count, `rounded`, is kept
on the host: reading `step` off a device would make the host wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

BLOCK = 256  # numbers that share a range
PART = 2**23  # numbers at a time, whole blocks: several fp32 copies of them exist meanwhile
SMALLEST = torch.finfo(torch.float32).tiny
LEVEL_CODES = 8  # a block's range is kept as top * LEVEL_CODES + level
PLACES = 0x9E3779B1  # odd: different places have different products
MARGIN = 1.0  # octaves that must be left over before a block takes a finer level than it had


@dataclass(frozen=True)
class Codes:
    """How magnitudes become codes: 0 is 0, and code k in 1..steps is 2^((top - steps + k) / 2^level).

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
        # The rung below each number, and the number's position between it and the next, as a fraction.
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

HALF = (torch.bfloat16, torch.float16)
BUCKET = 2**26  # numbers whose fp32 copies exist at a time: 256 MiB each
LOST = {torch.bfloat16: 2**16, torch.float16: 2**13}  # fp32 numbers for one of theirs: bits that rounding takes away


class MixedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) computed in fp32 whatever the weights are.

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g²,  w = w - lr (decay w + (m / c1) / (sqrt(v / c2) + epsilon)),
    with c = 1 - b^step.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        master_weights: bool = True,
        eight_bit: bool = False,
        fused: bool = True,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "master_weights": master_weights,
        }
        super().__init__(params, defaults | {"eight_bit": eight_bit, "fused": fused})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._places = {parameter: place for place, parameter in enumerate(parameters)}
        self._seed = seed
        self.spans: dict[Tensor, tuple[int, int]] = {}  # of parts of weights: the first number's place, and how many
        # numbers the weight has

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of every parameter that has a gradient, a bucket of them at a time."""
        assert closure is None, "the gradient has been gathered by whoever calls"
        for group in self.param_groups:
            bucket: list[Tensor] = []
            size = 0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if bucket and size + parameter.numel() > BUCKET:
                    self._step_bucket(bucket, group)
                    bucket, size = [], 0
                bucket.append(parameter)
                size += parameter.numel()
            if bucket:
                self._step_bucket(bucket, group)

    def _step_bucket(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self._state(parameter, group) for parameter in parameters]
        weights = [
            state["master"] if "master" in state else parameter.float()
            for state, parameter in zip(states, parameters, strict=True)
        ]
        means = [_open(state, "exp_avg", weight) for state, weight in zip(states, weights, strict=True)]
        squares = [_open(state, "exp_avg_sq", weight) for state, weight in zip(states, weights, strict=True)]
        gradients: list[Tensor] = [p.grad.float() for p in parameters if p.grad is not None]
        adamw(
            weights, gradients, means, squares, [], [state["step"] for state in states],
            foreach=False, fused=group["fused"], amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1],
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        for parameter, state, weight, mean, square in zip(parameters, states, weights, means, squares, strict=True):
            if weight.data_ptr() != parameter.data_ptr():
                parameter.copy_(weight)
            if "rounded" in state:
                state["rounded"] += 1
                key = self._seed, self._places[parameter], state["rounded"]
                _close(state, "exp_avg", mean, SIGNED, mixed(*key, 0))
                _close(state, "exp_avg_sq", square, UNSIGNED, mixed(*key, 1))

    def _state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """What is kept of a parameter; at its first step, fresh."""
        state = self.state[parameter]
        if state:
            return state
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else "cpu")
        if group["master_weights"] and parameter.dtype in HALF:
            state["master"] = drawn_master(parameter, self._places[parameter], self.spans.get(parameter))
        for name, codes in (("exp_avg", SIGNED), ("exp_avg_sq", UNSIGNED)):
            zeros = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)
            if group["eight_bit"]:
                state["rounded"] = 0
                state[f"{name}_codes"], state[f"{name}_ranges"] = codes.close(zeros, key=0)
            else:
                state[name] = zeros
        return state


def drawn_master(weight: Tensor, seed: int, span: tuple[int, int] | None = None) -> Tensor:
    """fp32 numbers that round to the weights, drawn evenly from all that do; 0 stays 0.

    With a `span`, `(first place, numbers in all)`, the weights are part of a larger tensor, and so are the draws.

    A weight stands in the middle of the numbers that round to it. A master that starts there must move by half of the
    spacing (1/512 of a weight in bf16, or up to twice that) before the model sees any of it. With master weights drawn
    from the whole cell, a move by a tenth of the spacing changes one weight in ten, so on average the model moves as
    its master weights do. In fp32 read as integers, neighbours differ by 1, and every cell is `LOST` of them wide.
    """
    master = weight.detach().float().contiguous()
    most = LOST[weight.dtype] // 2
    draws = torch.Generator(device=weight.device).manual_seed(seed)
    flat = master.view(-1)
    first, count = (0, len(flat)) if span is None else span
    for start in range(0, count, BUCKET):
        shape = (min(BUCKET, count - start),)
        moves = torch.randint(1 - most, most, shape, generator=draws, device=flat.device, dtype=torch.int32)
        low, high = max(start, first), min(start + shape[0], first + len(flat))
        if low < high:
            part, own = flat[low - first : high - first], moves[low - start : high - start]
            part.view(torch.int32).add_(own.masked_fill_((part == 0) | ~part.isfinite(), 0))
    return master


def _open(state: dict[str, Any], name: str, like: Tensor) -> Tensor:
    """A running mean in fp32: the state's own, or read from its codes."""
    if name in state:
        return state[name]
    codes = SIGNED if name == "exp_avg" else UNSIGNED
    return codes.open(state[f"{name}_codes"], state[f"{name}_ranges"], like.shape)


def _close(state: dict[str, Any], name: str, mean: Tensor, codes: Codes, key: int) -> None:
    """Put a running mean back as codes."""
    before = state[f"{name}_ranges"]
    state[f"{name}_codes"], state[f"{name}_ranges"] = codes.close(mean, key, before)


def cannot_overflow(optimizer: torch.optim.Optimizer, largest_norm: float) -> bool:
    """True where AdamW's next step is sure to give finite weights and a finite state of its own.

    No gradient of this or an earlier step has a norm above G = `largest_norm`. The running means are convex, so
    |m| <= G and v <= G^2. The step is at most lr / (1 - beta1) * |m| / epsilon, and decay at most lr * decay * |p|:

        |p'| <= (1 + lr * decay) * max |p| + lr / (1 - beta1) * G / epsilon

    With the usual settings that is far below the largest number, and one reading of the weights settles it. Of another
    optimiser nothing is known, and the answer is False.
    """
    if type(optimizer) not in (torch.optim.AdamW, MixedAdamW):
        return False
    for group in optimizer.param_groups:
        parameters: list[nn.Parameter] = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            continue
        # The kernels compute in float32 or better, so a narrower type bounds only what is stored.
        largest = min(torch.finfo(p.dtype).max for p in parameters) / 4.0
        rate, (beta1, _), epsilon = float(group["lr"]), group["betas"], group["eps"]
        if not (math.isfinite(rate) and beta1 < 1.0 and epsilon > 0.0):
            return False
        weights = float(nn.utils.get_total_norm([p.detach() for p in parameters]))  # no less than the largest of them
        scale, shrink = abs(rate) / (1.0 - beta1), 1.0 + abs(rate * group["weight_decay"])
        bound = shrink * weights + scale * largest_norm / epsilon
        # The kernel's intermediate numbers have to fit as well: infinity times a weight of 0 is not a number, and the
        # rate may meet the mean before it is divided by what epsilon keeps from 0.
        steps_between = (scale, shrink, largest_norm**2, largest_norm / epsilon, scale * largest_norm)
        if not all(number <= largest for number in (bound, *steps_between)):  # False for what is not a number
            return False
    return True
