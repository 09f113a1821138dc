"""A learner that is told to train some of its groups leaves the others alone, whatever gradient reaches them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tether.learner.learner import Learner, LearnerSettings
from tether.learner.norms import read_norms, total_norm
from tether.types import Loss, Metrics, Sequences


class TwoGroups(nn.Module):
    """A backbone and a head in bf16, computed elementwise (a CPU may have no bf16 products); the loss reaches both."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> None:
        super().__init__()
        self.backbone = nn.Parameter(torch.linspace(-1.0, 1.0, 300, device=device).to(dtype))
        self.head = nn.Parameter(torch.linspace(1.0, 2.0, 300, device=device).to(dtype))

    def forward(self, batch: Sequences) -> torch.Tensor:
        return (self.backbone.float() * self.head.float() * (batch.tokens.sum() % 7 + 1.0)).sum()

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"policy": [self.backbone], "critic": [self.head]}


class Squared:
    def size(self, batch: Sequences) -> float:
        return float(len(batch))

    def __call__(self, outputs: torch.Tensor, batch: Sequences) -> Loss:
        del batch
        return Loss((outputs - 3.0) ** 2, Metrics())


def rows(seed: int) -> Sequences:
    tokens = torch.randint(0, 9, (2, 4), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    return Sequences(tokens=tokens, attention_mask=mask, response_mask=mask)


def make(state: str, master_weights: str, dtype: torch.dtype) -> Learner:
    rates = {"policy": 1e-2, "critic": 1e-2}
    return Learner(
        TwoGroups(dtype), LearnerSettings(rates, 8, weight_decay=0.1, optimizer=state, master_weights=master_weights)
    )


def step(learner: Learner, seed: int) -> Metrics:
    learner.backward(rows(seed), Squared())
    return learner.step()


@pytest.mark.parametrize("state", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize(("master_weights", "dtype"), [("auto", torch.bfloat16), ("none", torch.float32)])
def test_the_other_group_keeps_weights_masters_moments_and_step_count(
    state: str, master_weights: str, dtype: torch.dtype
):
    learner = make(state, master_weights, dtype)
    step(learner, 0)  # both have state
    before = learner.state(copy=True).tensors
    with learner.training_only("critic"):
        for seed in range(1, 4):
            found = step(learner, seed)
            assert found.counts["steps"] == 1 and "grad_norm/policy" not in found.weighted
    after = learner.state(copy=True).tensors
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == name.startswith("policy/"), name
    assert "grad_norm/policy" in step(learner, 4).weighted
    assert not torch.equal(after["policy/backbone"], learner.state().tensors["policy/backbone"])


def test_a_group_that_has_not_learned_yet_gets_no_state():
    learner = make("adamw_8bit", "auto", torch.bfloat16)
    with learner.training_only("critic"):
        step(learner, 0)
    assert [name for name in learner.state().tensors if name.startswith("policy/")] == ["policy/backbone"]


def test_a_fault_in_between_is_skipped_and_all_groups_learn_again_afterwards():
    learner = make("adamw", "auto", torch.bfloat16)
    before = learner.state(copy=True).tensors
    with pytest.raises(ZeroDivisionError), learner.training_only("critic"):
        learner.backward(rows(0), Squared())
        head = learner.named["critic/head"]
        assert head.grad is not None and learner.named["policy/backbone"].grad is None
        head.grad[0] = torch.nan
        assert learner.step().counts["skipped_steps"] == 1
        raise ZeroDivisionError
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.state().tensors.items())
    step(learner, 1)
    assert not torch.equal(before["policy/backbone"], learner.state().tensors["policy/backbone"])


def test_norms_are_on_the_device_of_the_weights_also_where_there_is_no_gradient():
    """Norms of all groups are stacked, and torch's own norm of nothing is a zero on the CPU."""
    model = TwoGroups(torch.float32, device="meta")
    learner = Learner(model, LearnerSettings({"policy": 1e-3, "critic": 1e-3}, 8), device="meta")
    model.head.grad = torch.ones_like(model.head)
    norms = learner._norms()
    assert {name: norm.device.type for name, norm in norms.items()} == {"policy": "meta", "critic": "meta"}
    assert torch.stack(list(norms.values())).device.type == "meta"
    assert read_norms({"none": total_norm([], "cpu")}) == {"none": 0.0}
