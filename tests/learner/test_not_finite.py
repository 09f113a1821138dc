"""Whatever is put in the way of a step, the weights stay finite, and a skipped step changes nothing at all."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from learner_factory import ROWS, WIDTH, made_up_batch, make_algorithm, make_experience, make_roles

from tether.algorithms.algorithm import Coefficients, MinibatchEpochs
from tether.learner.adamw import cannot_overflow
from tether.learner.batching import evaluate_tokens
from tether.learner.gradients import Fault, outputs_to_check, sound
from tether.learner.learner import Learner, LearnerSettings
from tether.types import Experience, Loss, Metrics, ScoreOutputs, TokenOutputs

MICRO_TOKENS = 2 * WIDTH  # four micro-batches in a step
MICRO_BATCHES = ROWS * WIDTH // MICRO_TOKENS
ALGORITHM = make_algorithm(minibatch_size=ROWS, epochs=1)
OBJECTIVE = ALGORITHM.objective(Coefficients(0.1, 0.0))
ROLES = make_roles()
START = {name: parameter.detach().clone() for name, parameter in ROLES.actor.named_parameters()}
CLEAN = make_experience(ROLES, ALGORITHM, made_up_batch(), MICRO_TOKENS)
NOT_FINITE = [math.nan, math.inf, -math.inf]
HUGE = [1e4, 1e10, 1e18, -2e19, 1e30, -3.4e38]


def fresh_learner(optimizer: str = "adamw", rate: float = 1e-3, **options) -> Learner:
    with torch.no_grad():
        for name, parameter in ROLES.actor.named_parameters():
            parameter.copy_(START[name])
    chosen = {"adamw": None, "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9)}[optimizer]
    rates = {"policy": rate, "critic": rate}
    return Learner(ROLES.actor, LearnerSettings(rates, MICRO_TOKENS, **options), make_optimizer=chosen)


class PoisonedObjective:
    """Multiplies the loss of one micro-batch."""

    def __init__(self, poison: float, which: int) -> None:
        self.poison, self.which, self.calls = poison, which, 0

    def size(self, batch: Experience) -> float:
        return OBJECTIVE.size(batch)

    def __call__(self, outputs: TokenOutputs, batch: Experience) -> Loss:
        loss = OBJECTIVE(outputs, batch)
        poisoned = self.calls == self.which
        self.calls += 1
        return dataclasses.replace(loss, total=loss.total * self.poison) if poisoned else loss


class PoisonedModel:
    """Adds to one number that the model says of one micro-batch."""

    def __init__(self, column: str, poison: float, which: int, place: int) -> None:
        self.column, self.poison, self.which, self.place, self.calls = column, poison, which, place, 0

    def parameter_groups(self):
        return ROLES.actor.parameter_groups()

    def __call__(self, batch: Experience) -> TokenOutputs:
        outputs = ROLES.actor(batch)
        poisoned = self.calls == self.which
        self.calls += 1
        if not poisoned:
            return outputs
        trained = batch.response_mask.nonzero()
        row, column = trained[self.place % len(trained)].tolist()
        extra = torch.zeros_like(outputs.logprobs)
        extra[row, column] = self.poison
        return dataclasses.replace(outputs, **{self.column: getattr(outputs, self.column) + extra})


def poisoned_column(name: str, poison: float, place: int) -> Experience:
    """An experience in which one number that the roles or the reward gave is another; credit is given after it."""
    evaluated = evaluate_tokens(
        made_up_batch(), ROLES, minibatch_size=ROWS, micro_batch_tokens=MICRO_TOKENS, device=torch.device("cpu")
    )
    column = getattr(evaluated, name).clone()
    if column.dim() == 1:
        column[place % ROWS] = poison
    else:
        trained = evaluated.response_mask.nonzero()
        row, token = trained[place % len(trained)].tolist()
        column[row, token] = poison
    return ALGORITHM.advantages(dataclasses.replace(evaluated, **{name: column}), 0.1)[0]


def update_with(learner: Learner, place: str, poison: float, which: int, index: int) -> Metrics:
    """One update of one step, with `poison` put in at `place`."""
    rule, generator = MinibatchEpochs(1, ROWS), torch.Generator()
    match place:
        case "loss":
            return rule(learner, CLEAN, PoisonedObjective(poison, which), generator)
        case "logprobs" | "values":
            learner.model = PoisonedModel(place, poison, which, index)
            metrics = rule(learner, CLEAN, OBJECTIVE, generator)
            learner.model = ROLES.actor
            return metrics
        case "gradient":
            learner.backward(CLEAN, OBJECTIVE)
            parameters = [p for p in learner.named.values() if p.grad is not None]
            gradient = parameters[index % len(parameters)].grad
            assert gradient is not None
            gradient.view(-1)[index % gradient.numel()] = poison
            return learner.step()
        case "extra":
            return rule(
                learner, CLEAN, OBJECTIVE, generator, lambda it: it.backward(CLEAN, PoisonedObjective(poison, 0))
            )
        case _:
            return rule(learner, poisoned_column(place.removeprefix("column "), poison, index), OBJECTIVE, generator)


PLACES = [
    *("loss", "logprobs", "values", "gradient", "extra"),
    *("column scores", "column old_logprobs", "column ref_logprobs", "column values"),
]


@settings(max_examples=80, deadline=None)
@given(
    place=st.sampled_from(PLACES),
    poison=st.sampled_from(NOT_FINITE + HUGE),
    which=st.integers(0, MICRO_BATCHES - 1),
    index=st.integers(0, 10_000),
    optimizer=st.sampled_from(["adamw", "sgd"]),
    max_grad_norm=st.sampled_from([None, 1.0]),
    rate=st.sampled_from([1e-3, 1e20, 1e38]),
    steps_before=st.integers(0, 1),
)
def test_weights_never_become_non_finite(place, poison, which, index, optimizer, max_grad_norm, rate, steps_before):
    learner = fresh_learner(optimizer, max_grad_norm=max_grad_norm)
    for _ in range(steps_before):
        learner.backward(CLEAN, OBJECTIVE)
        learner.step()
    learner.settings.rates.update(policy=rate, critic=rate)
    learner.set_progress(0.5)
    before, faults = learner.state(copy=True), []
    learner.on_fault = faults.append
    metrics = update_with(learner, place, poison, which, index)
    after = learner.state()
    skipped = metrics.counts["skipped_steps"]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in after.tensors.values())
    assert skipped + metrics.counts["steps"] == 1
    assert len(faults) == skipped == learner.skipped_in_a_row
    if not math.isfinite(poison):
        assert skipped == 1
    if skipped:
        assert after.tensors.keys() == before.tensors.keys()
        assert all(torch.equal(tensor, before.tensors[name]) for name, tensor in after.tensors.items())
        assert after.numbers["hyperparameters"] == before.numbers["hyperparameters"]
        assert all(parameter.grad is None for parameter in learner.named.values())


@pytest.mark.parametrize("place", PLACES)
def test_a_fault_says_which_tensor_and_where(place):
    faults: list[Fault] = []
    learner = fresh_learner()
    learner.on_fault = faults.append
    update_with(learner, place, math.inf, which=1, index=5)
    (fault,) = faults
    named = {finding.tensor: finding for finding in fault.findings}
    if place.startswith("column"):
        name = place.removeprefix("column ")
        assert name in named and "advantages" in named  # whitening has spread it
        assert name in fault.reason
        assert fault.norms == {}
    elif place == "gradient":
        (finding,) = fault.findings
        assert finding.tensor.startswith("gradient of ") and finding.count == 1 and finding.value == "inf"
        assert math.inf in fault.norms.values()
    else:
        # A log-prob that is not finite is a fault by itself: its ratio is clamped, so that the loss may well be finite.
        assert ("logprobs" if place == "logprobs" else "loss") in named
        assert fault.norms.keys() == {"policy", "critic"}
    assert len(fault.batches) == (2 if place == "extra" else 1)
    assert named["loss"].batch == 1 if place == "extra" else True
    assert torch.equal(fault.batches[0].tokens, CLEAN.tokens)


def test_places_are_rows_and_tokens_of_the_batch_and_not_of_the_micro_batch():
    """Rows of lengths 6 to 16, padded on the left: the longest come first, and padding is cut off."""
    batch = made_up_batch()
    for row in range(ROWS):
        batch.attention_mask[row, : 2 + row] = False
        batch.response_mask[row, : 4 + row] = False
    experience = make_experience(ROLES, ALGORITHM, batch, MICRO_TOKENS)
    learner, faults = fresh_learner(), []
    learner.on_fault = faults.append
    target = (6, 14)
    parts = [(part.rows.tolist(), part.first) for part in learner._parts.of(experience, learner.micro_batch_tokens)]
    which = next(index for index, (rows, _) in enumerate(parts) if target[0] in rows)
    assert parts[which][1] > 0  # the test would prove nothing otherwise
    micro = list(learner.micro_batches(experience))[which]
    trained = micro.response_mask.nonzero().tolist()
    place = trained.index([parts[which][0].index(target[0]), target[1] - parts[which][1]])
    learner.model = PoisonedModel("logprobs", math.nan, which, place)
    learner.backward(experience, OBJECTIVE)
    learner.step()
    assert faults[0].findings[0].tensor == "logprobs"
    assert faults[0].findings[0].places == (target,)


def test_a_batch_that_is_not_finite_is_one_skipped_update_however_many_steps_it_would_have_been():
    learner, faults = fresh_learner(), []
    learner.on_fault = faults.append
    experience = poisoned_column("scores", math.nan, 0)
    metrics = MinibatchEpochs(4, 2)(learner, experience, OBJECTIVE, torch.Generator())
    assert metrics.counts["skipped_steps"] == 1
    assert metrics.counts["steps"] == 0
    assert learner.skipped_in_a_row == len(faults) == 1
    assert faults[0].reason.startswith("not finite: scores, ")


def test_numbers_that_nothing_is_learned_from_do_not_matter():
    learner = fresh_learner()
    behavior = torch.full_like(CLEAN.behavior_logprobs, -math.inf)
    advantages = CLEAN.advantages.masked_fill(~CLEAN.response_mask, math.nan)
    experience = dataclasses.replace(CLEAN, behavior_logprobs=behavior, advantages=advantages)
    metrics = MinibatchEpochs(1, ROWS)(learner, experience, OBJECTIVE, torch.Generator())
    assert metrics.counts == {"steps": 1, "skipped_steps": 0, "early_stop": 0}


def test_a_minibatch_that_is_skipped_stays_out_of_the_means():
    learner = fresh_learner(rate=0.0)
    rule, generator = MinibatchEpochs(1, 2, max_kl=1.0), torch.Generator()
    metrics = rule(learner, CLEAN, PoisonedObjective(math.nan, 1), generator)
    assert metrics.counts == {"steps": 3, "skipped_steps": 1, "early_stop": 0}
    assert all(math.isfinite(value) for value in metrics.values().values())
    tokens = int(CLEAN.response_mask.sum() - CLEAN.response_mask[2:4].sum())
    assert float(metrics.weighted["entropy"][1]) == tokens


def test_an_infinite_kl_of_a_step_that_is_skipped_is_no_early_stop():
    learner = fresh_learner()
    learner.model = PoisonedModel("logprobs", math.inf, 0, 0)
    metrics = MinibatchEpochs(1, ROWS, max_kl=1e-6)(learner, CLEAN, OBJECTIVE, torch.Generator())
    assert metrics.counts == {"steps": 0, "skipped_steps": 1, "early_stop": 0}


def test_the_usual_step_needs_no_copy_and_an_unusual_one_gets_it(monkeypatch):
    copies = []
    capture = Learner._capture
    monkeypatch.setattr(Learner, "_capture", lambda self, copy: copies.append(copy) or capture(self, copy=copy))
    learner = fresh_learner()
    learner.backward(CLEAN, OBJECTIVE)
    learner.step()
    assert copies == []
    learner.settings.rates["policy"] = 1e38
    learner.set_progress(0.5)
    learner.backward(CLEAN, OBJECTIVE)
    learner.step()
    assert copies == [True, False]


@settings(max_examples=300, deadline=None)
@example(weight=0.0, gradients=[-7e7], rate=1.2e33, epsilon=1e8, decay=0.0, beta1=0.0)  # rate x mean, then / epsilon
@given(
    weight=st.floats(-3e38, 3e38),
    gradients=st.lists(st.floats(-1e20, 1e20), min_size=1, max_size=4),
    rate=st.floats(0.0, 1e38),
    epsilon=st.sampled_from([1e-8, 1e-30, 1e8]),
    decay=st.sampled_from([0.0, 0.1, 1e10]),
    beta1=st.sampled_from([0.0, 0.9, 0.999999]),
)
def test_a_step_that_is_said_not_to_overflow_does_not(weight, gradients, rate, epsilon, decay, beta1):
    parameter = torch.nn.Parameter(torch.tensor([weight]))
    optimizer = torch.optim.AdamW(
        [parameter], lr=rate, eps=epsilon, weight_decay=decay, betas=(beta1, 0.999), fused=True
    )
    largest = 0.0
    for gradient in gradients:
        parameter.grad = torch.tensor([gradient])
        largest = max(largest, abs(gradient))
        if not cannot_overflow(optimizer, largest):
            return
        optimizer.step()
        state = optimizer.state[parameter]
        assert all(bool(torch.isfinite(t).all()) for t in (parameter, state["exp_avg"], state["exp_avg_sq"]))


def test_of_an_unknown_optimiser_or_a_weight_that_is_not_a_number_nothing_is_sure():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    assert cannot_overflow(torch.optim.AdamW([parameter]), 1.0)
    assert not cannot_overflow(torch.optim.SGD([parameter]), 1.0)
    with torch.no_grad():
        parameter[0] = math.nan
    assert not cannot_overflow(torch.optim.AdamW([parameter]), 1.0)


def test_the_scores_of_a_reward_model_are_looked_at_as_well():
    scores = torch.zeros(len(CLEAN))
    assert sound(torch.zeros(()), outputs_to_check(ScoreOutputs(scores), CLEAN).values())
    scores[1] = math.nan
    assert not sound(torch.zeros(()), outputs_to_check(ScoreOutputs(scores), CLEAN).values())
