"""Out of memory: the step is gathered again in smaller parts, and comes out as if those had been asked for at first."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_factory import ROWS, WIDTH, made_up_batch, make_algorithm, make_experience, make_roles

from tether.algorithms.algorithm import Coefficients, MinibatchEpochs
from tether.errors import StorageError
from tether.learner import batching
from tether.learner.batching import evaluate_tokens, is_out_of_memory, smaller_budget, within_memory
from tether.learner.learner import Learner, LearnerSettings
from tether.models.roles import Roles
from tether.types import PairBatch

ALL = ROWS * WIDTH
ALGORITHM = make_algorithm(minibatch_size=ROWS)
OBJECTIVE = ALGORITHM.objective(Coefficients(0.0, 0.0))
ROLES = make_roles()  # for tests that leave the weights as they are
EXPERIENCE = make_experience(ROLES, ALGORITHM, made_up_batch(), ALL // 4)
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Device:
    """Runs out of memory at the calls whose numbers are given: in the forward pass, or the backward pass after it."""

    def __init__(self, roles: Roles, forward: set[int] = frozenset(), backward: set[int] = frozenset()) -> None:
        self.actor, self.forward, self.backward, self.calls = roles.actor, forward, backward, 0

    def parameter_groups(self):
        return self.actor.parameter_groups()

    def __call__(self, batch):
        call, self.calls = self.calls, self.calls + 1
        if call in self.forward:
            raise NO_MEMORY
        outputs = self.actor(batch)
        if call in self.backward:
            outputs.logprobs.register_hook(fail)
        return outputs


def fail(_):
    raise NO_MEMORY


def learner_of(model, micro_batch_tokens: int, rate: float = 1e-3) -> Learner:
    rates = {"policy": rate, "critic": rate}
    return Learner(model, LearnerSettings(rates=rates, micro_batch_tokens=micro_batch_tokens))


def gradients(learner: Learner) -> torch.Tensor:
    return torch.cat([learner.flat_gradient(name) for name in learner.groups])


def undisturbed(micro_batch_tokens: int, batches=(EXPERIENCE,)) -> tuple[torch.Tensor, dict[str, float]]:
    learner = learner_of(ROLES.actor, micro_batch_tokens)
    metrics = [learner.backward(batch, OBJECTIVE) for batch in batches][-1]
    gathered = gradients(learner)
    learner.discard()
    return gathered, metrics.values()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("call", range(4))
def test_the_gradient_is_that_of_a_learner_with_half_the_micro_tokens_to_the_bit(where, call):
    """Four micro-batches; memory runs out in one of them, with the gradient of those before it already gathered."""
    learner = learner_of(Device(ROLES, **{where: {call}}), ALL // 4)
    metrics = learner.backward(EXPERIENCE, OBJECTIVE)
    gathered = gradients(learner)
    learner.discard()
    expected, expected_measures = undisturbed(ALL // 8)
    assert torch.equal(gathered, expected)
    assert metrics.values() == expected_measures
    assert learner.micro_batch_tokens == ALL // 8
    assert not torch.equal(expected, undisturbed(ALL // 4)[0])  # the same up to rounding, and the rounding shows
    torch.testing.assert_close(expected, undisturbed(ALL // 4)[0])


@settings(max_examples=25, deadline=None)
@given(failing=st.sets(st.integers(0, 20), max_size=2), where=st.sampled_from(["forward", "backward"]))
def test_however_often_memory_runs_out_the_gradient_is_one_that_was_asked_for(failing, where):
    learner = learner_of(Device(ROLES, **{where: failing}), ALL // 2, rate=0.0)
    learner.backward(EXPERIENCE, OBJECTIVE)
    gathered, halvings = gradients(learner), learner.step().counts.get("out_of_memory", 0)
    assert torch.equal(gathered, undisturbed(learner.micro_batch_tokens)[0])
    assert learner.micro_batch_tokens == ALL // 2 // 2 ** int(halvings)


def test_what_was_gathered_before_for_the_same_step_is_gathered_again_too():
    """As for PPO-ptx, whose gradient is added to the one that is there."""
    other = make_experience(make_roles(), ALGORITHM, made_up_batch(seed=5), ALL)
    learner = learner_of(Device(make_roles(), backward={5}), ALL // 4)
    learner.backward(EXPERIENCE, OBJECTIVE)
    learner.backward(other, OBJECTIVE)
    assert learner.micro_batch_tokens == ALL // 8
    assert torch.equal(gradients(learner), undisturbed(ALL // 8, (EXPERIENCE, other))[0])


def test_it_is_reported_once_and_the_smaller_size_stays():
    learner = learner_of(Device(make_roles(), forward={1}), ALL // 4)
    seen = []
    for _ in range(2):
        learner.backward(EXPERIENCE, OBJECTIVE)
        seen.append(learner.step().values())
    assert seen[0]["out_of_memory"] == 1
    assert "out_of_memory" not in seen[1]
    assert [values["micro_batch_tokens"] for values in seen] == [ALL // 8, ALL // 8]
    undisturbed_learner = learner_of(make_roles().actor, ALL)
    undisturbed_learner.backward(EXPERIENCE, OBJECTIVE)
    assert undisturbed_learner.step().values().keys() & {"out_of_memory", "micro_batch_tokens"} == set()


def test_the_smaller_size_is_part_of_the_state():
    learner = learner_of(Device(make_roles(), forward={0}), ALL // 4)
    learner.measure(EXPERIENCE, OBJECTIVE)
    other = learner_of(Device(make_roles()), ALL // 4)
    other.load_state(learner.state())
    assert other.micro_batch_tokens == ALL // 8


def test_a_whole_update_goes_on():
    """One part a step at first; memory runs out in the third of four steps, and again in the measuring after them."""
    learner = learner_of(Device(make_roles(), forward={2, 9}), ALL // 2)
    metrics = MinibatchEpochs(2, ROWS // 2, measure_after=True)(learner, EXPERIENCE, OBJECTIVE, torch.Generator())
    assert metrics.counts == {"steps": 4, "skipped_steps": 0, "out_of_memory": 1, "early_stop": 0}
    assert metrics.weighted["approx_kl_after"][1] == EXPERIENCE.response_mask.sum()
    assert learner.micro_batch_tokens == ALL // 8
    learner.backward(EXPERIENCE, OBJECTIVE)
    assert learner.step().counts["out_of_memory"] == 1  # of the measuring: reported with the next step


@pytest.mark.parametrize("call", [0, 1, 3])
def test_measuring_starts_again_and_counts_nothing_twice(call):
    learner = learner_of(Device(make_roles(), forward={call}), ALL // 4)
    measured = learner.measure(EXPERIENCE, OBJECTIVE)
    plain = learner_of(make_roles().actor, ALL // 8).measure(EXPERIENCE, OBJECTIVE)
    assert measured.values() == plain.values()
    assert torch.equal(measured.weighted["entropy"][1], plain.weighted["entropy"][1])


def failing_evaluation(monkeypatch, roles: Roles, call: int) -> list[tuple[int, ...]]:
    """Makes the reference's pass number `call` run out of memory; the sizes of all passes are noted."""
    reference, shapes = roles.reference, []
    assert reference is not None
    plain = type(reference).logprobs

    def logprobs(self, batch):
        shapes.append(tuple(batch.tokens.shape))
        if len(shapes) - 1 == call:
            raise NO_MEMORY
        return plain(self, batch)

    monkeypatch.setattr(type(reference), "logprobs", logprobs)
    return shapes


@pytest.mark.parametrize(("micro_batch_tokens", "call"), [(ALL, 0), (ALL // 4, 0), (ALL // 4, 2)])
def test_evaluating_starts_again_in_the_learners_smaller_parts(monkeypatch, micro_batch_tokens, call):
    batch, roles = made_up_batch(), make_roles()
    smaller = (
        min(micro_batch_tokens, ALL // 2) // 2
    )  # minibatches are half the batch: only below that there are more parts
    expected = evaluate_tokens(batch, roles, minibatch_size=4, micro_batch_tokens=smaller, device="cpu")
    learner = learner_of(roles.actor, micro_batch_tokens)
    shapes = failing_evaluation(monkeypatch, roles, call)
    found = evaluate_tokens(
        batch,
        roles,
        minibatch_size=4,
        micro_batch_tokens=micro_batch_tokens,
        device="cpu",
        shrink_micro_batch=learner.shrink_micro_batch,
    )
    assert learner.micro_batch_tokens == smaller
    assert shapes[-1] == (learner.micro_batch_tokens // WIDTH, WIDTH)
    for name in ("old_logprobs", "ref_logprobs", "values", "final_values"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


def test_a_pass_kept_ahead_is_never_half_used():
    """The pass that evaluated is kept for the first step. Memory then runs out in that step's backward pass."""
    roles = make_roles()
    experience = make_experience(roles, ALGORITHM, made_up_batch(), ALL)
    assert roles.actor._ahead is not None
    learner = learner_of(Device(roles, backward={0}), ALL)
    learner.backward(experience, OBJECTIVE)
    clean = learner_of(make_roles().actor, ALL // 2)
    clean.backward(experience, OBJECTIVE)
    assert learner.micro_batch_tokens == ALL // 2
    assert torch.equal(gradients(learner), gradients(clean))
    assert roles.actor._ahead is None


def test_a_batch_that_cannot_be_begun_for_want_of_memory_is_begun_later(monkeypatch):
    learner, clean, plain = learner_of(make_roles().actor, ALL), learner_of(make_roles().actor, ALL), batching.onto

    def full(*_: object) -> None:
        raise NO_MEMORY

    learner.begin(EXPERIENCE)
    monkeypatch.setattr(batching, "onto", full)
    learner.begin(EXPERIENCE)
    monkeypatch.setattr(batching, "onto", plain)
    learner.backward(EXPERIENCE, OBJECTIVE)
    clean.backward(EXPERIENCE, OBJECTIVE)
    assert torch.equal(gradients(learner), gradients(clean))


def test_a_single_row_that_does_not_fit_is_a_clear_error():
    learner = learner_of(Device(make_roles(), forward=set(range(100))), ALL)
    with pytest.raises(
        StorageError, match=rf"longest row has {WIDTH} tokens.*optimizer\.micro_batch_tokens.*max_new_tokens"
    ):
        learner.backward(EXPERIENCE, OBJECTIVE)
    assert learner.micro_batch_tokens == WIDTH


def test_another_error_is_not_taken_for_it():
    def broken():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        within_memory(broken, lambda: pytest.fail("there is memory"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(KeyError("out of memory"))


def test_memory_is_let_go_before_the_next_try():
    """The exception holds the frames that failed and so their tensors: it has to be gone when room is made."""
    alive: list[weakref.ref] = []
    left: list[bool] = []

    def attempt() -> str:
        large = torch.zeros(1000)
        alive.append(weakref.ref(large))
        if len(alive) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"

    assert within_memory(attempt, lambda: left.append(alive[0]() is not None)) == "done"
    assert left == [False]


def test_halving_goes_on_until_it_makes_a_difference():
    """Eight rows of 16 are one part of 128 tokens: 8192 has to come down to 64 before they are two."""
    assert smaller_budget([EXPERIENCE], 8192) == 64
    assert smaller_budget([EXPERIENCE], 64) == 32


def test_the_rows_of_a_pair_are_not_parted():
    pairs = PairBatch(
        tokens=EXPERIENCE.tokens,
        attention_mask=EXPERIENCE.attention_mask,
        response_mask=EXPERIENCE.response_mask,
        pair_ids=torch.arange(ROWS) // 2,
        chosen=torch.arange(ROWS) % 2 == 0,
        ref_logprobs=EXPERIENCE.old_logprobs,
    )
    assert smaller_budget([pairs], 4 * WIDTH) == 2 * WIDTH
    with pytest.raises(StorageError, match="prompt or pair"):
        smaller_budget([pairs], 2 * WIDTH)


def test_no_room_for_the_optimisers_state_is_a_clear_error(monkeypatch):
    learner = learner_of(make_roles().actor, ALL)
    learner.backward(EXPERIENCE, OBJECTIVE)
    monkeypatch.setattr(learner.optimizer, "step", lambda: fail(None))
    with pytest.raises(StorageError, match="optimiser's step"):
        learner.step()
