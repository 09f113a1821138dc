"""Tether passes its own suite, and a fault planted in its adapter is caught by the family that names it."""

from __future__ import annotations

import pytest
import torch

from tether.conformance.runner import run
from tether.conformance.tether_adapter import TetherAdapter, adapter
from tether.ops.losses import Aggregation


def test_tether_passes_every_case_in_both_precisions():
    report = run(adapter)
    assert report.failed == []
    assert report.not_claimed == []
    assert report.partly_claimed == []
    assert report.cases >= 150
    assert len(report.families) >= 20


class WhitensOverPadding(TetherAdapter):
    def whiten(self, x, mask, shift_mean, unbiased, epsilon):
        everywhere = [[True] * len(row) for row in mask]
        return super().whiten(x, everywhere, shift_mean, unbiased, epsilon)


class ScoresTheLastColumn(TetherAdapter):
    def token_rewards(self, scores, kl, mask, kl_coef):
        rewards = super().token_rewards([0.0] * len(scores), kl, mask, kl_coef)["rewards"]
        rewards[:, -1] += self.floats(scores)
        return {"rewards": rewards}


class TurnsTheKLAround(TetherAdapter):
    def kl_estimate(self, logprobs, other_logprobs, estimator):
        return super().kl_estimate(other_logprobs, logprobs, estimator)


class PaysTheKL(TetherAdapter):
    def token_rewards(self, scores, kl, mask, kl_coef):
        return super().token_rewards(scores, kl, mask, -kl_coef)


class ZeroesGaps(TetherAdapter):
    """The usual mistake: every token is a step, and values of tokens that were not sampled are set to zero."""

    def gae(self, rewards, values, mask, gamma, lam, final_values):
        sampled = torch.tensor(mask)
        last = sampled.long().cumsum(1).argmax(1)
        upto = torch.arange(sampled.shape[1]) <= last[:, None]
        first = sampled.long().argmax(1)
        inside = (upto & (torch.arange(sampled.shape[1]) >= first[:, None])).tolist()
        zeroed = [
            [v if m else 0.0 for v, m in zip(row, keep, strict=True)] for row, keep in zip(values, mask, strict=True)
        ]
        paid = [
            [r if m else 0.0 for r, m in zip(row, keep, strict=True)] for row, keep in zip(rewards, mask, strict=True)
        ]
        return super().gae(paid, zeroed, inside, gamma, lam, final_values)


class AveragesMicroBatchMeans(TetherAdapter):
    def aggregate_micro_batches(self, losses, mask, mode, fixed_length, micro_batches):
        mean, sampled, values = Aggregation(mode, fixed_length), torch.tensor(mask), self.floats(losses)
        parts = [mean.total(values[rows], sampled[rows]) / mean.size(sampled[rows]) for rows in micro_batches]
        return {"loss": torch.stack(parts).mean()}


FAULTS = [
    (WhitensOverPadding, "whitening"),
    (ScoresTheLastColumn, "reward_placement"),
    (TurnsTheKLAround, "kl_estimators"),
    (PaysTheKL, "kl_placement"),
    (ZeroesGaps, "gae_across_gaps"),
    (AveragesMicroBatchMeans, "micro_batches"),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("fault", "family"), FAULTS, ids=[family for _, family in FAULTS])
def test_a_planted_fault_is_caught_by_the_family_that_names_it(fault, family, dtype):
    report = run(lambda name: fault(getattr(torch, name)), dtypes=(dtype,))
    assert family in {failure.family for failure in report.failed}


def test_gae_without_gaps_does_not_blame_the_gaps_fault():
    """The planted gap fault is only wrong where there are gaps."""
    report = run(lambda name: ZeroesGaps(getattr(torch, name)), dtypes=("float64",), families=["gae"])
    assert report.failed == []
