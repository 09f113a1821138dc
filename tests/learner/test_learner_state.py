"""A learner's state: everything comes back, bit for bit, and nothing that does not belong here is taken."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from learner_factory import made_up_batch, make_algorithm, make_experience, make_learner, make_roles

from tether.algorithms.algorithm import Coefficients
from tether.errors import StorageError
from tether.learner.learner import Learner, LearnerSettings
from tether.learner.learner_state import LearnerState

OBJECTIVE = make_algorithm().objective(Coefficients(0.0, 0.0))
OPTIMIZERS = {
    "adamw": None,
    "adamw, one by one": lambda groups: torch.optim.AdamW(groups, foreach=False, fused=False, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups),
    "asgd": lambda groups: torch.optim.ASGD(groups),
}
RATES = {"policy": 1e-3, "critic": 2e-3}


def new_learner(optimizer: str = "adamw", **settings) -> Learner:
    options = {"rates": RATES, "micro_batch_tokens": 64, **settings}
    return Learner(make_roles().actor, LearnerSettings(**options), make_optimizer=OPTIMIZERS[optimizer])


def train(learner: Learner, steps: int, seed: int = 0) -> None:
    experience = make_experience(make_roles(), make_algorithm(), made_up_batch(seed))
    for step in range(steps):
        learner.set_progress((step + 0.5) / 10)
        learner.backward(experience, OBJECTIVE)
        learner.step()


def through_disk(state: LearnerState) -> LearnerState:
    """As a checkpoint would have it: other tensors with the same bits, in another order, and numbers read from JSON."""
    tensors = {name: state.tensors[name].clone() for name in sorted(state.tensors)}
    return LearnerState(tensors, json.loads(json.dumps(state.numbers, allow_nan=False)))


def assert_same(one: LearnerState, other: LearnerState) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        assert torch.equal(tensor, other.tensors[name]), name
    assert json.dumps(one.numbers, sort_keys=True) == json.dumps(other.numbers, sort_keys=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restored_learner_goes_on_to_the_bit(optimizer):
    one = new_learner(optimizer)
    train(one, 3)
    saved = through_disk(one.state(copy=True))
    train(one, 2, seed=1)

    other = new_learner(optimizer)
    train(other, 1, seed=2)  # elsewhere: all of it has to be overwritten
    other.load_state(saved)
    assert_same(other.state(), saved)
    train(other, 2, seed=1)
    assert_same(other.state(), one.state())


def test_a_state_of_before_the_first_step_leaves_no_optimiser_state_behind():
    learner = new_learner()
    saved = through_disk(learner.state(copy=True))
    train(learner, 2)
    assert len(learner.optimizer.state) > 0
    learner.load_state(saved)
    assert len(learner.optimizer.state) == 0
    assert_same(learner.state(), saved)


def test_parameters_are_named_as_the_model_names_them():
    learner = new_learner()
    train(learner, 1)
    names = learner.state().tensors.keys()
    assert {"policy/policy.lm_head.weight", "critic/critic.head.bias"} <= names
    slots = {name.rsplit("/", 1)[1] for name in names if name.count("/") == 2}
    assert slots == {"exp_avg", "exp_avg_sq", "step"}
    assert len(names) == 4 * sum(len(parameters) for parameters in learner.groups.values())


def test_tensors_are_references_unless_copied():
    learner = new_learner()
    train(learner, 1)
    reference, copied = learner.state(), learner.state(copy=True)
    before = through_disk(reference)
    train(learner, 1)
    assert_same(copied, before)
    name = "policy/policy.lm_head.weight"
    assert not torch.equal(reference.tensors[name], before.tensors[name])
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in copied.tensors.values())


def test_counters_come_back():
    learner = new_learner()
    learner.skipped_in_a_row, learner.micro_batch_tokens = 3, 16
    other = new_learner()
    other.load_state(through_disk(learner.state()))
    assert (other.skipped_in_a_row, other.micro_batch_tokens) == (3, 16)


def test_a_setting_that_a_fork_changed_is_kept_and_the_others_come_back():
    parent = new_learner()
    parent.micro_batch_tokens = 16
    parent.optimizer.param_groups[1]["lr"] = 7.0
    saved = through_disk(parent.state())
    fork = new_learner(betas=(0.5, 0.6), micro_batch_tokens=32, rates={"policy": 5e-4, "critic": 2e-3})
    fork.load_state(saved)
    policy, critic = fork.optimizer.param_groups
    assert policy["betas"] == (0.5, 0.6)
    assert policy["lr"] == 5e-4
    assert critic["lr"] == 7.0
    assert fork.micro_batch_tokens == 32


@pytest.mark.parametrize("slot", ["", "/exp_avg", "/step"])
@pytest.mark.parametrize("damage", ["missing", "shape", "dtype"])
def test_a_tensor_that_is_missing_or_of_another_kind_is_named(slot, damage):
    learner = new_learner()
    train(learner, 1)
    saved = through_disk(learner.state())
    name = f"policy/policy.lm_head.weight{slot}"
    tensor = saved.tensors.pop(name)
    if damage != "missing":
        saved.tensors[name] = tensor.double() if damage == "dtype" else torch.cat([tensor.reshape(-1)] * 2)
    before = through_disk(learner.state())
    with pytest.raises(StorageError, match=f"damaged: {name} is"):
        learner.load_state(saved)
    assert_same(learner.state(), before)


def test_a_state_of_another_model_or_optimiser_is_refused():
    learner = new_learner()
    train(learner, 1)
    saved = through_disk(learner.state())
    headless = Learner(make_roles(critic=None).actor, LearnerSettings(rates=RATES, micro_batch_tokens=64))
    with pytest.raises(StorageError, match=r"another model: critic/.* is float32 .* where nothing was expected"):
        headless.load_state(saved)
    with pytest.raises(StorageError, match=r"another model: critic/.* is missing where float32"):
        learner.load_state(through_disk(headless.state()))
    with pytest.raises(StorageError, match="optimiser AdamW, but this learner's is SGD"):
        new_learner("sgd").load_state(saved)
    with pytest.raises(StorageError, match="lacks largest_norm"):
        numbers = {name: value for name, value in saved.numbers.items() if name != "largest_norm"}
        learner.load_state(dataclasses.replace(saved, numbers=numbers))


def test_a_gathered_gradient_is_not_silently_lost():
    learner = make_learner(make_roles())
    experience = make_experience(make_roles(), make_algorithm(), made_up_batch())
    learner.backward(experience, OBJECTIVE)
    with pytest.raises(AssertionError, match="gathered gradient"):
        learner.state()
    learner.discard()
    learner.state()
