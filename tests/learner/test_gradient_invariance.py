"""Micro-batches, padding and the order of rows never change the gradient of a PPO step."""

from __future__ import annotations

import pytest
import torch
from learner_factory import ROWS, WIDTH, made_up_batch, make_algorithm, make_experience, make_learner, make_roles
from torch import Tensor

from tether.algorithms.algorithm import Coefficients
from tether.types import Experience

TOLERANCES = [(torch.float32, 1e-6), (torch.float64, 1e-12)]


def gradient(roles, experience: Experience, micro_batch_tokens: int, over: dict | None = None) -> Tensor:
    learner = make_learner(roles, micro_batch_tokens)
    objective = make_algorithm(**({"aggregation": over} if over else {})).objective(Coefficients(0.0, 0.0))
    learner.backward(experience, objective)
    whole = torch.cat([learner.flat_gradient(name) for name in learner.groups])
    learner.discard()
    return whole


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def moved_policy(roles) -> None:
    """Take the policy off the point where it sampled, so that ratios are not 1 and some are clipped."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in roles.actor.policy.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


@pytest.fixture(params=TOLERANCES, ids=["fp32", "fp64"], scope="module")
def case(request):
    dtype, tolerance = request.param
    roles = make_roles(dtype)
    experience = make_experience(roles, make_algorithm(), made_up_batch())
    moved_policy(roles)
    return roles, experience, tolerance


@pytest.mark.parametrize("over", [{"over": "token"}, {"over": "sequence"}, {"over": "fixed", "fixed_length": 20}])
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_micro_batches(case, rows, over):
    roles, experience, tolerance = case
    whole = gradient(roles, experience, ROWS * WIDTH, over)
    assert float(whole.norm()) > 0
    assert relative_error(gradient(roles, experience, rows * WIDTH, over), whole) <= tolerance


@pytest.mark.parametrize(("left", "right"), [(5, 0), (0, 5), (3, 4)])
def test_extra_padding(case, left, right):
    roles, experience, tolerance = case
    whole = gradient(roles, experience, ROWS * WIDTH)
    padded = experience.map_tensors(
        lambda column: torch.nn.functional.pad(column, (left, right)) if column.dim() == 2 else column
    )
    assert padded.tokens.shape[1] == WIDTH + left + right
    assert relative_error(gradient(roles, padded, 4 * WIDTH), whole) <= tolerance


@pytest.mark.parametrize(("left", "right"), [(5, 0), (0, 5), (3, 4)])
def test_padding_that_is_not_trimmed(case, left, right):
    """One long row keeps the columns of the padding: positions and attention must then skip it."""
    roles, experience, tolerance = case
    short = experience.select(torch.arange(ROWS - 1))
    whole = gradient(roles, short, ROWS * WIDTH)
    padded = short.map_tensors(
        lambda column: torch.nn.functional.pad(column, (left, right)) if column.dim() == 2 else column
    )
    learner = make_learner(roles)
    objective = make_algorithm().objective(Coefficients(0.0, 0.0))
    (objective(roles.actor(padded), padded).total / objective.size(padded)).backward()  # past the learner's trimming
    found = torch.cat([learner.flat_gradient(name) for name in learner.groups])
    learner.discard()
    assert relative_error(found, whole) <= tolerance


def test_permuted_rows(case):
    roles, experience, tolerance = case
    whole = gradient(roles, experience, ROWS * WIDTH)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(4))
    assert relative_error(gradient(roles, experience.select(order), 4 * WIDTH), whole) <= tolerance
