"""On the first minibatch of the first epoch old and new are the same policy, to the bit."""

from __future__ import annotations

import pytest
import torch
from learner_factory import WIDTH, made_up_batch, make_algorithm, make_experience, make_learner, make_roles

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
    experience = make_experience(roles, algorithm, batch, micro_batch_tokens=2 * WIDTH)
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


def gradient_of_first_step(roles, experience) -> tuple[torch.Tensor, torch.Tensor]:
    learner = make_learner(roles)
    learner.backward(experience, make_algorithm().objective(Coefficients(0.0, 0.0)))
    return learner.flat_gradient("policy"), learner.flat_gradient("critic")


@pytest.mark.parametrize("critic", ["separate", "head"])
def test_the_pass_that_evaluated_is_taken_up_by_the_first_step_to_the_bit(critic, monkeypatch):
    roles = make_roles(critic=critic)
    experience = make_experience(roles, make_algorithm(), made_up_batch())
    passes = []
    original = type(roles.actor)._pass
    monkeypatch.setattr(type(roles.actor), "_pass", lambda *given: passes.append(1) or original(*given))
    taken_up = gradient_of_first_step(roles, experience)
    assert passes == []
    for parameter in roles.actor.parameters():
        parameter.grad = None
    made_anew = gradient_of_first_step(roles, experience)
    assert passes == [1]
    for one, other in zip(taken_up, made_anew, strict=True):
        assert torch.equal(one, other)


def test_a_pass_is_not_taken_up_once_a_parameter_or_the_batch_has_changed():
    roles = make_roles()
    experience = make_experience(roles, make_algorithm(), made_up_batch())
    with torch.no_grad():
        next(roles.actor.parameters()).mul_(1.5)
    changed = roles.actor(experience).logprobs
    assert not torch.equal(changed[experience.response_mask], experience.old_logprobs[experience.response_mask])

    experience = make_experience(roles, make_algorithm(), made_up_batch())
    other = experience.select(torch.arange(len(experience)).flip(0))
    torch.testing.assert_close(roles.actor(other).logprobs, experience.old_logprobs.flip(0))
    assert roles.actor._ahead is None  # dropped: its memory is free again
