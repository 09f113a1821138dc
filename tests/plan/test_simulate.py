"""The simulator: a golden case worked by hand, what it conserves, and what can only help."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.errors import UsageError
from tether.plan.machine import Machine
from tether.plan.published import dense_shape
from tether.plan.simulate import (
    ClusterJob,
    Iteration,
    LengthModel,
    Trouble,
    decode,
    one_iteration,
    simulate,
    streamed,
    timeline,
)
from tether.plan.timing import Decoder, Pace, PassCosts, RowSums

# One operation and one byte a second count, so that the cases below can be worked by hand.
UNIT = Machine("cuda", "unit", 2**40, 1.0, 1.0, "by hand")
PACE = Pace(
    share=1.0, layer=0.0, weights_share=1.0, cache_share=1.0, step_share=1.0, step_layer=0.0, step_adapter=0.0,
    general_layer=0.0, call=0.0, reading_share=1.0, reading_layer=0.0,
)  # fmt: skip
SHAPE = dense_shape(
    {"layers": 1, "hidden": 2, "inner": 2, "heads": 1, "kv_heads": 1, "head_dim": 2, "vocabulary": 3, "tied": True}
)
STEPPER = Decoder(weights=10.0, cached=0.5, operations=2.0, layers=1, overhead=1.0)
PASSES = PassCosts(SHAPE, policy=True, critic=0.0, reference=False, rewards=0, epochs=1)


def job_of(**settings) -> ClusterJob:
    plain = {
        "machine": UNIT, "pace": PACE, "decoder": STEPPER, "passes": PASSES, "rows": 6, "samples": 1,
        "prompt_tokens": 4, "lengths": LengthModel("fixed", 3, 3), "minibatch": 6, "micro_batch_tokens": 100,
        "trainers": 1, "samplers": 0, "slots": 2,
    }  # fmt: skip
    return ClusterJob(**(plain | settings))


def test_a_step_by_hand():
    """Two slots: 10 bytes of weights against 4 operations, 8 tokens of context at 0.5 bytes, 1 second of overhead."""
    assert STEPPER.step(UNIT, PACE, 2, 8) == 10 + 4 + 1
    assert STEPPER.step(UNIT, PACE, 6, 0) == 12 + 1  # 12 operations take longer than 10 bytes
    assert STEPPER.step(UNIT, PACE, 2, 8, tensor=2) == 7 + 1


def test_continuous_batching_by_hand():
    """Answers of 1, 3 and 2 tokens in two slots; a pass over a prompt of no tokens takes no time.

    Step 1: answers of 1 and 3 tokens. Steps 2 and 3: the answer of 3, and the one of 2 in the freed slot. The context
    counts half of what a stretch of steps adds, and each answer leaves with its tokens.
    """
    found = decode(job_of(prompt_tokens=0), [1, 3, 2])
    first = 10 + 0.5 * (2 * 1 / 2) + 1  # both at length 0 to 1
    second = 10 + 0.5 * (1 + 2 * 2 / 2) + 1  # one answer has 1 token; both grow by 2
    assert found.seconds == pytest.approx(first + 2 * second)
    assert found.tokens == 6
    assert sorted(found.ends) == [(pytest.approx(first), 1), *[(pytest.approx(first + 2 * second), n) for n in (2, 3)]]


def test_a_forward_pass_by_hand():
    """4 matrices of 2 x 2 and 3 of 2 x 2 are 28 numbers: 56 operations a token, and 4 for each pair of tokens."""
    assert SHAPE.products == 28
    assert PASSES.forward(RowSums.alike(2, 5, 3, 1), UNIT, PACE) == 2 * (5 * 56 + 25 * 4)
    head = 2 * 3 * 2 * 6  # 6 answer tokens
    assert PASSES.evaluation(RowSums.alike(2, 5, 3, 1), UNIT, PACE) == 760 + head
    assert PASSES.update(RowSums.alike(2, 5, 3, 1), UNIT, PACE) == 3 * 760 + 4 * head


def iteration(rollout: float, training: float, handover: float = 0.0) -> Iteration:
    return Iteration(rollout, 0.0, 0.0, training, handover, 1, 1, 0, 1)


def test_the_timeline_by_hand():
    """Rollouts of 5 s and training of 3 s, 1 s to hand the weights over."""
    three = [iteration(5, 3, 1)] * 3
    assert timeline(job_of(), three) == [9, 18, 27]  # in turns
    assert timeline(job_of(samplers=1), three) == [8, 17, 26]  # lag 0: sampling waits for the new weights
    assert timeline(job_of(samplers=1, lag=1), three) == [8, 13, 18]  # the samplers never wait


def test_a_training_that_is_slower_hides_the_rollouts():
    """Rollouts of 9 s end at 9, 18 and, from the version that is there at 17 + 3, at 29."""
    assert timeline(job_of(samplers=1, lag=1), [iteration(2, 7)] * 4) == [9, 16, 23, 30]
    assert timeline(job_of(samplers=1, lag=1), [iteration(8, 9, 1)] * 3) == [17, 26, 35]
    assert timeline(job_of(samplers=1, lag=1), [iteration(9, 8, 3)] * 3) == [17, 26, 37]


JOBS = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 40),
        "samples": st.integers(1, 4),
        "minibatch": st.integers(1, 40),
        "trainers": st.integers(1, 6),
        "samplers": st.integers(0, 5),
        "slots": st.integers(1, 9),
        "lag": st.integers(0, 4),
        "handover": st.floats(0, 50),
        "gather": st.floats(0, 5),
        "sync": st.floats(0, 5),
        "lengths": st.builds(
            LengthModel, st.sampled_from(["fixed", "geometric", "lognormal"]), st.floats(1, 30), st.just(60)
        ),
    }
)


@settings(max_examples=40, deadline=None)
@given(JOBS, st.integers(0, 5))
def test_tokens_are_conserved_and_no_phase_outlasts_the_whole(fields, seed):
    found = simulate(job_of(**fields), steps=3, seed=seed)
    for each in found.iterations:
        assert each.decoded == each.answers and each.lost == 0
        assert each.trained == each.answers + fields["rows"] * 4
    assert found.makespan >= sum(each.rollout for each in found.iterations) * (1 - 1e-9)
    assert found.makespan >= sum(each.training for each in found.iterations) * (1 - 1e-9)
    assert list(found.ends) == sorted(found.ends)
    assert found.step_seconds >= found.iterations[-1].training / len(found.iterations)


@settings(max_examples=40, deadline=None)
@given(JOBS, st.integers(0, 5))
def test_more_lag_is_never_slower(fields, seed):
    fields["samplers"] += 1
    ends = [simulate(job_of(**fields | {"lag": lag}), steps=4, seed=seed).makespan for lag in range(4)]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(ends))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 8))
def test_every_answer_ends_once(lengths, slots):
    found = decode(job_of(slots=slots), lengths)
    assert sorted(length for _, length in found.ends) == sorted(lengths)
    assert [when for when, _ in found.ends] == sorted(when for when, _ in found.ends)
    assert found.seconds == pytest.approx(found.ends[-1][0])
    steps = max(lengths)
    assert found.seconds >= steps * STEPPER.step(UNIT, PACE, 1, 4) * (1 - 1e-9)


def test_a_seed_repeats_and_another_differs():
    job = job_of(lengths=LengthModel("lognormal", 20, 60), trouble=Trouble(0.5, 2.0))
    assert simulate(job, 3, seed=1) == simulate(job, 3, seed=1)
    assert simulate(job, 3, seed=1).ends != simulate(job, 3, seed=2).ends


@pytest.mark.parametrize("kind", ["fixed", "geometric", "lognormal"])
def test_lengths_have_the_mean_that_was_asked_for(kind):
    drawn = LengthModel(kind, 50, 100_000, 0.8).draw(20_000, random.Random(0))
    assert sum(drawn) / len(drawn) == pytest.approx(50, rel=0.03)
    assert min(drawn) >= 1
    assert max(LengthModel(kind, 50, 60).draw(500, random.Random(0))) <= 60


def test_stragglers_slow_every_step():
    job = job_of(trainers=2)
    slow = simulate(replace(job, trouble=Trouble(1.0, 3.0)), 2)
    plain = simulate(job, 2)
    assert slow.mean("rollout") == pytest.approx(3 * plain.mean("rollout"))
    assert slow.mean("update") == pytest.approx(3 * plain.mean("update"))


def test_a_failed_sampler_costs_time_and_tokens_and_loses_no_answer():
    job = job_of(rows=40, trainers=4, lengths=LengthModel("lognormal", 20, 60))
    failing = replace(job, trouble=Trouble(failures_per_hour=40.0, recovery=5000.0))
    runs = [(one_iteration(job, random.Random(n)), one_iteration(failing, random.Random(n))) for n in range(12)]
    assert any(failed.lost for _, failed in runs)
    for _, failed in runs:
        assert failed.decoded == failed.answers + failed.lost
        assert failed.lost >= 0
    assert sum(failed.rollout for _, failed in runs) > sum(plain.rollout for plain, _ in runs)


def test_partial_rollouts_do_not_wait_for_the_longest_answer():
    lengths = [2] * 15 + [60]
    assert streamed(job_of(slots=8), lengths).seconds < decode(job_of(slots=8), lengths).seconds
    assert streamed(job_of(), []).seconds == 0.0


def test_communication_is_hidden_behind_longer_passes_only():
    job = job_of()
    hidden = simulate(replace(job, gather=1e-6), 1).mean("update")
    assert hidden == simulate(job, 1).mean("update")
    assert simulate(replace(job, gather=1e6), 1).mean("update") == pytest.approx(3e6)


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"slots": 0}, {"lag": -1}, {"trainers": 0}])
def test_an_impossible_job_is_explained(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        job_of(**wrong)
