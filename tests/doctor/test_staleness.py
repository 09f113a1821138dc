"""What the doctor says of asynchronous training: staleness is not a mismatch, and too much of it is reported."""

from __future__ import annotations

import pytest
from synthetic import STEPS, found, silent, synthetic, undecided

from tether.doctor.sampling import rollout_mismatch, stale_answers

AGE = [0.0, 1.0, *[2.0] * (STEPS - 2)]
LAG = {"rollout": {"lag": 2}}
CAPPED = {"rollout": {"lag": 2, "importance_sampling_cap": 2.0}}


def gaps(first: float, rest: float) -> list[float]:
    return [first, *[rest] * (STEPS - 1)]


def test_staleness_is_no_mismatch():
    run = synthetic(config=LAG, staleness=AGE, logprob_diff=gaps(1e-6, 0.3), logprob_diff_max=gaps(1e-5, 3.0))
    assert silent(rollout_mismatch(run))
    assert not silent(rollout_mismatch(synthetic(logprob_diff=gaps(1e-6, 0.3))))


def test_a_mismatch_is_found_where_the_current_policy_sampled():
    finding = found(rollout_mismatch(synthetic(config=LAG, staleness=AGE, logprob_diff=gaps(0.3, 0.3))))
    assert (finding.first_step, finding.last_step) == (0, 0)


@pytest.mark.parametrize(
    ("config", "gap", "cut", "said", "first"),
    [
        (LAG, 0.2, 0.0, "no importance weight corrects", "rollout.importance_sampling_cap: 2"),
        (CAPPED, 0.7, 0.0, "too far", "rollout.lag: lower it (it is 2)"),
        (CAPPED, 0.2, 0.2, "20 % of the tokens", "rollout.lag: lower it (it is 2)"),
    ],
)
def test_a_policy_that_moved_too_far_is_reported(config, gap, cut, said, first):
    run = synthetic(config=config, staleness=AGE, logprob_diff=gaps(1e-6, gap), importance__truncated=gaps(0.0, cut))
    finding = found(stale_answers(run))
    assert said in finding.saw and "up to 2 steps old" in finding.saw
    assert finding.change[0] == first
    assert (finding.first_step, finding.last_step) == (1, STEPS - 1)


def test_a_policy_that_moved_a_little_is_left_alone():
    assert silent(stale_answers(synthetic(config=LAG, staleness=AGE, logprob_diff=gaps(1e-6, 0.05))))
    capped = synthetic(
        config=CAPPED, staleness=AGE, logprob_diff=gaps(1e-6, 0.3), importance__truncated=gaps(0.0, 0.05)
    )
    assert silent(stale_answers(capped))
    assert undecided(stale_answers(synthetic(logprob_diff=0.3)))
