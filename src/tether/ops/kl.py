"""KL divergences between policies, and the controllers of their weight.

Three log-probabilities must not be confused: *behavior* (what the engine said while sampling), *old* (the trainer's
log-probs of the policy that sampled, before the first update) and *ref* (the policy before any RL).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
MAX_LOG_RATIO = 20.0
"""Where the exponent of a probability ratio is clamped: exp(20) is 4.9e8, and float32 overflows at exp(88.8)."""


def log_ratio(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """min(log p - log q, MAX_LOG_RATIO): the exponent of a ratio p / q that stays finite; any shape.

    Beyond the bound the ratio is a constant, so its gradient is 0 and not infinity. Up to the bound, and for every
    negative exponent (which cannot overflow), values and gradients are those of the plain difference, to the bit.
    """
    return (logprobs - other_logprobs).clamp(max=MAX_LOG_RATIO)


def ratio_clamped(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Where `log_ratio` clamps; bool of any shape."""
    return logprobs - other_logprobs > MAX_LOG_RATIO


def kl_estimate(logprobs: Tensor, other_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """Per-token estimate of KL(p || q) from tokens drawn from p; any shape.

    With d = log p - log q of the sampled token (Schulman 2020, "Approximating KL divergence"):

        k1 = d                  unbiased, may be negative
        k2 = d^2 / 2            biased, never negative
        k3 = exp(-d) - 1 + d    unbiased, never negative

    k3 takes d no lower than -MAX_LOG_RATIO, where exp(-d) would leave the range of float32. It is then a large
    constant without a gradient. A large positive d needs no bound: k3 grows like d, and goes on pulling q towards p.
    """
    difference = logprobs - other_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference**2 / 2
    exponent = log_ratio(other_logprobs, logprobs)
    return torch.expm1(exponent) - exponent


def exact_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """(...,) KL(p || q) = sum_v p_v (log p_v - log q_v) from whole log-distributions (..., V)."""
    never = log_p == -torch.inf
    difference = torch.where(never, 0.0, log_p) - torch.where(never, 0.0, log_q)
    return (log_p.exp() * difference).sum(dim=-1)


class KLController(Protocol):
    """A weight and the rule that moves it. A value: `after` returns the next one."""

    @property
    def coef(self) -> float:
        """The weight now."""
        ...

    def after(self, kl: float, samples: int) -> KLController:
        """The controller once `kl` was measured over `samples` sequences."""
        ...


@dataclass(frozen=True)
class FixedKL:
    """A weight that stays."""

    coef: float

    def after(self, kl: float, samples: int) -> FixedKL:
        """Itself."""
        del kl, samples
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """The PPO paper's rule (Schulman et al. 2017, section 4): halve below target / 1.5, double above 1.5 * target."""

    coef: float
    target: float

    def after(self, kl: float, samples: int) -> AdaptiveKL:
        """Halved, doubled, or as it was; also where the KL is not a number."""
        del samples
        if kl < self.target / 1.5:
            return replace(self, coef=self.coef / 2)
        if kl > self.target * 1.5:
            return replace(self, coef=self.coef * 2)
        return self


@dataclass(frozen=True)
class ProportionalKL:
    """The RLHF papers' rule (Ziegler et al. 2019): coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon."""

    coef: float
    target: float
    horizon: float

    def after(self, kl: float, samples: int) -> ProportionalKL:
        """Moved in proportion to the error; as it was where the KL is not a number."""
        if not math.isfinite(kl):
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * samples / self.horizon))
