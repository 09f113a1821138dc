"""`x[b, t]` is about token t: log-probs and values of a real model, against a plain pass and under perturbation."""

from __future__ import annotations

import pytest
import torch

from tether.hub.tiny_model import tiny_model
from tether.models.backbones import backbone_of
from tether.models.roles import Roles
from tether.models.sharing import Separate
from tether.types import Sequences


def batch(tokens: torch.Tensor) -> Sequences:
    everything = torch.ones_like(tokens, dtype=torch.bool)
    response = everything.clone()
    response[:, 0] = False
    return Sequences(tokens=tokens, attention_mask=everything, response_mask=response)


@pytest.fixture(params=["separate", "head"])
def roles(request) -> Roles:
    roles = Roles.build(Separate(tiny_model(seed=4)), critic=request.param, with_reference=False, seed=0)
    head = getattr(roles.actor.critic, "head", roles.actor.critic)
    torch.nn.init.normal_(head.weight)
    return roles


def test_logprobs_are_those_of_a_plain_pass(roles):
    tokens = torch.tensor([[5, 80, 3, 200, 7]])
    plain = torch.log_softmax(roles.actor.policy(tokens).logits, dim=-1)
    expected = torch.stack([plain[0, t - 1, tokens[0, t]] for t in range(1, 5)])
    torch.testing.assert_close(roles.actor(batch(tokens)).logprobs[0, 1:], expected, atol=1e-5, rtol=1e-5)


def test_values_are_of_the_tokens_before(roles):
    tokens = torch.tensor([[5, 80, 3, 200, 7]])
    changed = tokens.clone()
    changed[0, 3] = 11
    before, after = roles.evaluate(batch(tokens)), roles.evaluate(batch(changed))
    assert torch.equal(before.values[0, :4], after.values[0, :4])  # values[3] does not see token 3
    assert not torch.isclose(before.values[0, 4], after.values[0, 4])
    assert not torch.isclose(before.final_values, after.final_values)


def test_the_value_after_the_last_token_is_read_there(roles):
    tokens = torch.tensor([[5, 80, 3, 200, 7]])
    longer = torch.cat([tokens, torch.tensor([[9]])], dim=1)
    torch.testing.assert_close(
        roles.evaluate(batch(tokens)).final_values, roles.evaluate(batch(longer)).values[:, -1], atol=1e-5, rtol=1e-5
    )


def test_the_backbone_is_the_models_own(roles):
    assert backbone_of(roles.actor.policy) is roles.actor.backbone.model
