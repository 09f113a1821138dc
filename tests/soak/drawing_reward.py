"""A reward with random numbers of its own, from every generator that a process shares."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy
import torch

from tether.types import Rollout, Score


def reward(rollouts: Sequence[Rollout]) -> list[Score]:
    """Nothing but noise."""
    return [Score(random.random() + float(numpy.random.rand()) + float(torch.rand(()))) for _ in rollouts]
