"""One learner for every method: gradients of a sum over micro-batches, divided by a size known beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tether.learner.batching import micro_batches
from tether.learner.schedule import Schedule, rate_factor
from tether.protocols import Objective, TrainedModel
from tether.types import Measures, Sequences


@dataclass(frozen=True)
class LearnerSettings:
    """How gradients become steps; rates are by parameter group."""

    rates: dict[str, float]
    micro_tokens: int
    max_grad_norm: float | None = 1.0
    schedule: Schedule = "constant"
    warmup: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def adamw(self, parameter_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimiser, unless the learner is given another; one pass over each parameter where the device can."""
        devices = {parameter.device.type for group in parameter_groups for parameter in group["params"]}
        return torch.optim.AdamW(
            parameter_groups,
            betas=self.betas,
            eps=self.epsilon,
            weight_decay=self.weight_decay,
            fused=devices <= {"cpu", "cuda"},
        )


class Learner:
    """Holds the optimiser. `backward` adds up a gradient, `step` applies it, `discard` throws it away.

    The sum that an objective returns is divided by its size over the *whole* step, so that splitting into micro-batches
    never changes the gradient. A loss or gradient that is not finite makes `step` skip the update and count it; the
    weights never become non-finite.
    """

    def __init__(
        self,
        model: TrainedModel,
        settings: LearnerSettings,
        device: torch.device | str = "cpu",
        make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.device = torch.device(device)
        self.groups = model.parameter_groups()
        missing = sorted(self.groups.keys() - settings.rates.keys())
        assert not missing, f"no learning rate for the parameter groups {missing}"
        parameter_groups = [
            {"params": parameters, "lr": settings.rates[name], "name": name} for name, parameters in self.groups.items()
        ]
        self.optimizer = make_optimizer(parameter_groups) if make_optimizer else settings.adamw(parameter_groups)
        self.skipped_in_a_row = 0
        self._finite = True

    def micro_batches(self, batch: Sequences) -> Iterator[Any]:
        """The batch in parts that fit in memory, trimmed of needless padding, on the learner's device."""
        for rows in micro_batches(batch, self.settings.micro_tokens):
            yield batch.select(rows).trimmed().to(self.device)

    def backward(self, batch: Sequences, objective: Objective[Any, Any]) -> Measures:
        """Add the gradient of `objective` over the whole of `batch`, and report what it measured."""
        return self._sum(batch, objective, self._add_gradient)

    @torch.no_grad()
    def measure(self, batch: Sequences, objective: Objective[Any, Any]) -> Measures:
        """What `objective` measures over `batch`, without a gradient."""
        return self._sum(batch, objective, lambda _: None)

    def _sum(self, batch: Sequences, objective: Objective[Any, Any], visit: Callable[[Tensor], None]) -> Measures:
        size = objective.size(batch)
        if not size > 0:
            raise ValueError("the batch is empty: it has no token, sequence or pair to learn from")
        measures = Measures()
        total = torch.zeros((), dtype=torch.float64)
        for micro in self.micro_batches(batch):
            loss = objective(self.model(micro), micro)
            visit(loss.total / size)
            measures.merge(loss.measures)
            total += loss.total.detach().double().cpu()
        measures.add("loss", total, size)
        return measures

    def _add_gradient(self, loss: Tensor) -> None:
        if bool(torch.isfinite(loss)):
            loss.backward()
        else:
            self._finite = False

    def step(self) -> Measures:
        """Clip each group's gradient, take the optimiser's step, clear the gradient.

        Groups are clipped apart: a separate critic whose loss is large must not shrink the policy's step. (A value head
        on the policy's trunk sends its gradient through the trunk, which is the policy's group.)
        """
        measures = Measures()
        for name, parameters in self.groups.items():
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            measures.add(f"grad_norm/{name}", float(norm))
            self._finite = self._finite and math.isfinite(float(norm))
            if self.settings.max_grad_norm is not None and self._finite:
                nn.utils.clip_grads_with_norm_(parameters, self.settings.max_grad_norm, norm)
        if self._finite:
            self.optimizer.step()
            self.skipped_in_a_row = 0
        else:
            self.skipped_in_a_row += 1
        measures.count("steps", float(self._finite))
        measures.count("skipped_steps", float(not self._finite))
        self.discard()
        return measures

    def discard(self) -> None:
        """Throw the gathered gradient away."""
        self.optimizer.zero_grad(set_to_none=True)
        self._finite = True

    def set_progress(self, progress: float) -> None:
        """Set the rates for this point in [0, 1] of the run."""
        factor = rate_factor(self.settings.schedule, progress, self.settings.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rates[group["name"]] * factor

    def flat_gradient(self, group: str) -> Tensor:
        """(P,) the gathered gradient of one group; a parameter that took no part counts as 0."""
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self.groups[group]])

    def flat_parameters(self, group: str) -> Tensor:
        """(P,) a copy of one group's parameters."""
        return torch.cat([p.detach().reshape(-1) for p in self.groups[group]])

    def set_flat_parameters(self, group: str, vector: Tensor) -> None:
        """Write a vector from `flat_parameters` back."""
        start = 0
        with torch.no_grad():
            for parameter in self.groups[group]:
                parameter.copy_(vector[start : start + parameter.numel()].view_as(parameter))
                start += parameter.numel()
