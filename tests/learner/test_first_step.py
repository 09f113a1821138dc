"""On the first minibatch of the first epoch old and new are the same policy, to the bit."""

from __future__ import annotations

import pytest
import torch
from conftest import WIDTH, made_up_batch, make_algorithm, make_experience, make_learner, make_roles

from tether.algorithms.algorithm import Coefficients
from tether.algorithms.objectives import PolicyObjective, Reinforce
from tether.learner.batching import minibatches


@pytest.mark.parametrize("critic", ["separate", "head"])
@pytest.mark.parametrize("minibatch_size", [8, 3])
def test_every_ratio_is_exactly_one(critic, minibatch_size):
    roles = make_roles(critic=critic)
    algorithm = make_algorithm(minibatch_size=minibatch_size)
    batch = made_up_batch(rows=12)
    batch.response_mask[5, -1] = batch.attention_mask[5, -1] = False  # rows of different length
    experience = make_experience(roles, algorithm, batch, micro_tokens=2 * WIDTH)
    learner = make_learner(roles, 2 * WIDTH)
    first = experience.select(next(minibatches(experience, minibatch_size)))
    compared = 0
    for micro in learner.micro_batches(first):
        ratio = torch.exp(roles.actor(micro).logprobs - micro.old_logprobs)[micro.response_mask]
        assert torch.equal(ratio, torch.ones_like(ratio))
        compared += ratio.numel()
    assert compared == int(first.response_mask.sum())


def test_ppo_gradient_is_reinforce_gradient():
    roles, algorithm = make_roles(), make_algorithm(entropy_coef=0.0, value_coef=0.0)
    experience = make_experience(roles, algorithm, made_up_batch())
    gradients = []
    for objective in (algorithm.objective(Coefficients(0.0, 0.0)), PolicyObjective(surrogate=Reinforce())):
        learner = make_learner(roles)
        learner.backward(experience, objective)
        gradients.append(learner.flat_gradient("policy"))
        learner.discard()
    assert float(gradients[0].norm()) > 0
    assert torch.equal(*gradients)


def test_a_ratio_is_not_one_after_a_step():
    """The test above can fail: one step later the same comparison does not hold."""
    roles, algorithm = make_roles(), make_algorithm()
    experience = make_experience(roles, algorithm, made_up_batch())
    learner = make_learner(roles)
    learner.backward(experience, algorithm.objective(Coefficients(0.0, 0.0)))
    learner.step()
    ratio = torch.exp(roles.actor(experience).logprobs - experience.old_logprobs)[experience.response_mask]
    assert not torch.equal(ratio, torch.ones_like(ratio))
