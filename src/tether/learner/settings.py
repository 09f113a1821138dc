"""How gradients become steps: rates, clipping, the optimiser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from tether.learner.adamw import HALF, MixedAdamW
from tether.learner.schedule import Schedule


@dataclass(frozen=True)
class LearnerSettings:
    """How gradients become steps; rates are by parameter group."""

    rates: dict[str, float]
    micro_batch_tokens: int
    max_grad_norm: float | None = 1.0
    schedule: Schedule = "constant"
    warmup: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    master_weights: Literal["auto", "fp32", "none"] = (
        "auto"  # fp32 copies of weights in half precision; auto keeps them
    )
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    seed: int = 0  # of how 8-bit state is rounded

    def adamw(self, parameter_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimiser, unless the learner is given another; one pass over each parameter where the device can."""
        parameters = [parameter for group in parameter_groups for parameter in group["params"]]
        options: dict[str, Any] = {
            "betas": self.betas,
            "eps": self.epsilon,
            "weight_decay": self.weight_decay,
            "fused": {parameter.device.type for parameter in parameters} <= {"cpu", "cuda"},
        }
        master_weights = self.master_weights != "none" and any(parameter.dtype in HALF for parameter in parameters)
        if not master_weights and self.optimizer == "adamw":
            return torch.optim.AdamW(parameter_groups, **options)
        return MixedAdamW(
            parameter_groups,
            master_weights=master_weights,
            eight_bit=self.optimizer == "adamw_8bit",
            seed=self.seed,
            **options,
        )
