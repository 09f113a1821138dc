"""AdamW for weights in half precision: fp32 master_weights, and a state of 8 bits where memory is short.

A bf16 number has 8 significant bits: a step below 1/256 of a weight rounds to nothing, and with rates of RL that is
most of them. So the optimiser keeps each weight in fp32 as well (its master), steps that, and rounds the result into
the model. Masters start anywhere among the numbers that round to their weight (`drawn_master`), so that the model moves
with them from the first step on. With 8-bit state the two running means are kept as codes (`quantize.py`) and exist in
fp32 only while their parameter is stepped. How they are rounded is drawn anew at every step, from the optimiser's seed,
the parameter's place, how often it was stepped and the number's place in it: not from the buckets, and not from a
generator whose state would have to be kept.

Everything it keeps is a plain tensor by parameter, as in torch's own optimisers, so checkpoints hold it bit for bit:
`step`, `master` where the weight is in half precision, and `exp_avg`, `exp_avg_sq`, or their codes and ranges. With
codes there is a second count of steps, `rounded`, on the host: reading the first off a device would make the host wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tether.learner.quantize import SIGNED, UNSIGNED, Codes, mixed

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
            state["master"] = drawn_master(parameter, seed=self._places[parameter])
        for name, codes in (("exp_avg", SIGNED), ("exp_avg_sq", UNSIGNED)):
            zeros = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)
            if group["eight_bit"]:
                state["rounded"] = 0
                state[f"{name}_codes"], state[f"{name}_ranges"] = codes.close(zeros, key=0)
            else:
                state[name] = zeros
        return state


def drawn_master(weight: Tensor, seed: int) -> Tensor:
    """fp32 numbers that round to the weights, drawn evenly from all that do; 0 stays 0.

    A weight stands in the middle of the numbers that round to it. A master that starts there must move by half of the
    spacing (1/512 of a weight in bf16, or up to twice that) before the model sees any of it. With master weights drawn
    from the whole cell, a move by a tenth of the spacing changes one weight in ten, so on average the model moves as
    its master weights do. In fp32 read as integers, neighbours differ by 1, and every cell is `LOST` of them wide.
    """
    master = weight.detach().float().contiguous()
    most = LOST[weight.dtype] // 2
    draws = torch.Generator(device=weight.device).manual_seed(seed)
    for part in master.view(-1).split(BUCKET):
        moves = torch.randint(1 - most, most, part.shape, generator=draws, device=part.device, dtype=torch.int32)
        part.view(torch.int32).add_(moves.masked_fill_((part == 0) | ~part.isfinite(), 0))
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
