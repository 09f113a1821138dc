"""A small real model and a batch of made-up rollouts for it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tether.algorithms.algorithm import Algorithm
from tether.algorithms.ppo import ppo
from tether.config.kl_settings import KLSettings
from tether.config.methods import PPOSettings
from tether.config.sections import RewardSettings
from tether.hub.tiny_model import tiny_model
from tether.learner.batching import evaluate_tokens
from tether.learner.learner import Learner, LearnerSettings
from tether.models.backbones import ScalarHead
from tether.models.roles import Roles
from tether.models.sharing import Separate
from tether.types import Experience, TokenBatch

ROWS, WIDTH = 8, 16


def made_up_batch(seed: int = 0, rows: int = ROWS, width: int = WIDTH) -> TokenBatch:
    """Rows of equal total length whose answers have different lengths."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, width - 3, (rows,), generator=generator)
    columns = torch.arange(width).expand(rows, width)
    zeros = torch.zeros(rows, width)
    return TokenBatch(
        tokens=torch.randint(0, 256, (rows, width), generator=generator),
        attention_mask=torch.ones(rows, width, dtype=torch.bool),
        response_mask=columns >= prompts[:, None],
        behavior_logprobs=zeros,
        untruncated_logprobs=zeros,
        scores=torch.randn(rows, generator=generator),
        group_ids=torch.arange(rows) // 2,
        truncated=torch.zeros(rows, dtype=torch.bool),
        temperature=0.7,
    )


def make_roles(dtype: torch.dtype = torch.float32, critic: str | None = "separate") -> Roles:
    policy = tiny_model(seed=1).to(dtype)
    roles = Roles.build(Separate(policy), critic=critic, with_reference=True, seed=2)
    generator = torch.Generator().manual_seed(3)
    with (
        torch.no_grad()
    ):  # a reference that differs from the policy, so that the KL is not zero, and a head that speaks
        assert roles.reference is not None
        for parameter in roles.reference.backbone.parameters():
            parameter.mul_(1.01)
        if roles.actor.critic is not None:
            head = roles.actor.critic if isinstance(roles.actor.critic, ScalarHead) else roles.actor.critic.head
            head.weight.copy_(0.1 * torch.randn(head.weight.shape, generator=generator))
    return roles


def make_learner(roles: Roles, micro_batch_tokens: int = ROWS * WIDTH, **options) -> Learner:
    rates = {"policy": 1e-3, "critic": 1e-3}
    return Learner(roles.actor, LearnerSettings(rates=rates, micro_batch_tokens=micro_batch_tokens, **options))


def make_algorithm(**settings) -> Algorithm:
    options = {"entropy_coef": 0.01, "minibatch_size": ROWS, "epochs": 2, **settings}
    return ppo(PPOSettings(**options), KLSettings(coef=0.1), RewardSettings())


def make_experience(
    roles: Roles, algorithm: Algorithm, batch: TokenBatch, micro_batch_tokens: int = ROWS * WIDTH
) -> Experience:
    dtype = next(roles.actor.parameters()).dtype
    batch = dataclasses.replace(batch, scores=batch.scores.to(dtype))
    evaluated = evaluate_tokens(
        batch, roles, minibatch_size=algorithm.minibatch_size, micro_batch_tokens=micro_batch_tokens, device="cpu"
    )
    return algorithm.advantages(evaluated, 0.1)[0]


@pytest.fixture
def batch() -> TokenBatch:
    return made_up_batch()
