"""Distributions over one action: over a vocabulary or a set of actions, and over vectors of real numbers.

Everything is per row: (N,) for N distributions. KL divergences are exact, in closed form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.ops.kl import exact_kl
from tether.protocols import Distribution


@dataclass(frozen=True)
class Categorical:
    """Over V choices, by their normalised log-probabilities."""

    log_p: Tensor  # (N, V)

    def logprobs(self, actions: Tensor) -> Tensor:
        """log p_a; `actions` is (N,) int64."""
        return self.log_p.gather(1, actions[:, None])[:, 0]

    def entropy(self) -> Tensor:
        """-sum_v p_v log p_v."""
        return -(self.log_p.exp() * torch.where(self.log_p == -torch.inf, 0.0, self.log_p)).sum(dim=1)

    def kl(self, new: Distribution) -> Tensor:
        """sum_v p_v (log p_v - log q_v)."""
        assert isinstance(new, Categorical)
        return exact_kl(self.log_p, new.log_p)

    def detach(self) -> Categorical:
        """The same without gradients."""
        return Categorical(self.log_p.detach())


@dataclass(frozen=True)
class DiagonalGaussian:
    """Over vectors of A real numbers, independent of each other."""

    mean: Tensor  # (N, A)
    log_std: Tensor  # (N, A), or (A,) for all

    def logprobs(self, actions: Tensor) -> Tensor:
        """-sum_i ((a_i - m_i)^2 / (2 s_i^2) + log s_i + log(2 pi) / 2); `actions` is (N, A)."""
        scaled = (actions - self.mean) * torch.exp(-self.log_std)
        return -(scaled**2 / 2 + self.log_std + math.log(2.0 * math.pi) / 2).sum(dim=1)

    def entropy(self) -> Tensor:
        """sum_i (log s_i + (1 + log(2 pi)) / 2)."""
        return (self.log_std + (1.0 + math.log(2.0 * math.pi)) / 2).expand_as(self.mean).sum(dim=1)

    def kl(self, new: Distribution) -> Tensor:
        """sum_i (log t_i - log s_i + (s_i^2 + (m_i - n_i)^2) / (2 t_i^2) - 1/2), with n and t those of `new`."""
        assert isinstance(new, DiagonalGaussian)
        squares = torch.exp(2 * self.log_std) + (self.mean - new.mean) ** 2
        return (new.log_std - self.log_std + squares / (2 * torch.exp(2 * new.log_std)) - 0.5).sum(dim=1)

    def detach(self) -> DiagonalGaussian:
        """The same without gradients."""
        return DiagonalGaussian(self.mean.detach(), self.log_std.detach())


def as_distribution(found: Tensor | Distribution) -> Distribution:
    """A tensor (N, V) of log-probabilities as what it describes."""
    return Categorical(found) if isinstance(found, Tensor) else found
