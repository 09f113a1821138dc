"""Steps, clipping, skipped updates, early stop, schedules and dropout."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from learner_factory import ROWS, WIDTH, made_up_batch, make_algorithm, make_experience, make_learner, make_roles

from tether.algorithms.algorithm import Coefficients, MinibatchEpochs
from tether.models.load import disable_dropout
from tether.models.roles import Roles
from tether.models.sharing import Separate

NO_KL = Coefficients(0.0, 0.0)


@pytest.fixture
def prepared():
    roles, algorithm = make_roles(), make_algorithm()
    return roles, algorithm, make_experience(roles, algorithm, made_up_batch())


def weights(roles) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in roles.actor.parameters()])


def test_groups_have_rates_and_norms_of_their_own(prepared):
    roles, algorithm, experience = prepared
    learner = make_learner(roles, max_grad_norm=1e-3)
    learner.settings.rates["critic"] = 0.0
    learner.set_progress(0.5)
    before = {name: learner.flat_parameters(name) for name in learner.groups}
    learner.backward(experience, algorithm.objective(NO_KL))
    reported = learner.step().values()
    assert reported["grad_norm/policy"] != reported["grad_norm/critic"]
    assert not torch.equal(learner.flat_parameters("policy"), before["policy"])
    assert torch.equal(learner.flat_parameters("critic"), before["critic"])


def test_clipping_scales_to_the_norm(prepared):
    roles, algorithm, experience = prepared
    learner = make_learner(roles, max_grad_norm=1e-3)
    seen = {}
    learner.optimizer.register_step_pre_hook(
        lambda *_: seen.update({name: float(learner.flat_gradient(name).norm()) for name in learner.groups})
    )
    learner.backward(experience, algorithm.objective(NO_KL))
    learner.step()
    assert seen == {"policy": pytest.approx(1e-3, rel=1e-3), "critic": pytest.approx(1e-3, rel=1e-3)}


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_skips_the_step_and_is_counted(prepared, poison):
    roles, algorithm, experience = prepared
    advantages = experience.advantages.clone()
    advantages[0, -1] = poison
    learner, before = make_learner(roles), weights(roles)
    learner.backward(dataclasses.replace(experience, advantages=advantages), algorithm.objective(NO_KL))
    assert learner.step().values()["skipped_steps"] == 1
    assert learner.skipped_in_a_row == 1
    assert torch.equal(weights(roles), before)
    learner.backward(experience, algorithm.objective(NO_KL))
    assert learner.step().values()["skipped_steps"] == 0
    assert learner.skipped_in_a_row == 0
    assert bool(torch.isfinite(weights(roles)).all())


def test_a_gradient_that_is_not_finite_skips_the_step(prepared):
    roles, algorithm, experience = prepared
    learner, before = make_learner(roles), weights(roles)
    learner.backward(experience, algorithm.objective(NO_KL))
    learner.groups["policy"][0].grad[0, 0] = float("nan")
    assert learner.step().values()["skipped_steps"] == 1
    assert torch.equal(weights(roles), before)


def test_early_stop_ends_before_a_step_past_the_limit(prepared):
    roles, algorithm, experience = prepared
    objective = algorithm.objective(NO_KL)
    unlimited = MinibatchEpochs(6, ROWS // 2)(
        make_learner(make_roles()), experience, objective, torch.Generator().manual_seed(0)
    ).values()
    assert unlimited["steps"] == 12
    assert unlimited["early_stop"] == 0
    learner = make_learner(roles)
    limited = MinibatchEpochs(6, ROWS // 2, max_kl=0.01)(
        learner, experience, objective, torch.Generator().manual_seed(0)
    ).values()
    assert 0 < limited["steps"] < 12
    assert limited["early_stop"] == 1
    assert all(parameter.grad is None for parameter in learner.groups["policy"])  # the refused gradient is gone


def test_an_empty_batch_is_an_error(prepared):
    roles, algorithm, experience = prepared
    nothing = dataclasses.replace(experience, response_mask=torch.zeros_like(experience.response_mask))
    with pytest.raises(ValueError, match="empty"):
        make_learner(roles).backward(nothing, algorithm.objective(NO_KL))


def test_schedule_reaches_the_optimizer(prepared):
    learner = make_learner(prepared[0], schedule="linear", warmup=0.2)
    seen = []
    for progress in (0.0, 0.1, 0.2, 0.6, 1.0):
        learner.set_progress(progress)
        seen.append(learner.optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([0.0, 5e-4, 1e-3, 5e-4, 0.0])


def test_dropout_is_off_in_every_role_even_in_training_mode():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=258, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.5
    model = GPT2LMHeadModel(config)
    noisy = GPT2LMHeadModel(config).train()
    tokens = torch.arange(16)[None]
    assert not torch.equal(noisy(tokens).logits, noisy(tokens).logits)  # the danger is real
    disable_dropout(model)
    roles = Roles.build(Separate(model), critic="separate", with_reference=True, seed=0)
    torch.nn.init.ones_(roles.actor.critic.head.weight)
    roles.actor.train()
    assert roles.reference is not None
    roles.reference.backbone.train()
    batch = made_up_batch(rows=2, width=WIDTH)
    for look in (
        lambda: roles.actor(batch).logprobs,
        lambda: roles.actor(batch).values,
        lambda: roles.reference.logprobs(batch),
    ):
        assert torch.equal(look(), look())
