"""How gradients become steps: rates, clipping, the optimiser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tether.learner.schedule import Schedule


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
