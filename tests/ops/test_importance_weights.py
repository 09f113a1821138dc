"""The three importance weights, against a recomputation token by token in float64, and what must hold of any input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tether.algorithms.algorithm import importance_weights
from tether.ops.losses import masked_importance, sequence_importance, truncated_importance
from tether.types import EvaluatedBatch, Metrics

OLD = [[-1.0, -2.0, -0.5, -3.0], [-0.1, -0.2, -4.0, -1.0]]
BEHAVIOR = [[-1.5, -2.0, -2.0, -3.0], [-0.3, -2.2, -0.5, -9.0]]
MASK = [[False, True, True, True], [False, True, True, False]]
CAP = 2.0


def expected(kind: str, old, behavior, mask, cap: float) -> list[list[float]]:
    """By the definitions, one number at a time."""
    rows = []
    for row in range(len(old)):
        ratios = [math.exp(a - b) for a, b in zip(old[row], behavior[row], strict=True)]
        whole = math.prod(ratio for ratio, inside in zip(ratios, mask[row], strict=True) if inside)
        if kind == "token":
            rows.append([min(ratio, cap) for ratio in ratios])
        elif kind == "sequence":
            rows.append([min(whole, cap)] * len(ratios))
        else:
            rows.append([ratio if 1 / cap <= ratio <= cap else 0.0 for ratio in ratios])
    return rows


def weights_of(kind: str, old: torch.Tensor, behavior: torch.Tensor, mask: torch.Tensor, cap: float) -> torch.Tensor:
    if kind == "sequence":
        return sequence_importance(old, behavior, mask, cap=cap)
    return {"token": truncated_importance, "masked": masked_importance}[kind](old, behavior, cap=cap)


@pytest.mark.parametrize("kind", ["token", "sequence", "masked"])
def test_the_weights_are_those_of_their_definitions(kind):
    old, behavior = (torch.tensor(rows, dtype=torch.float64) for rows in (OLD, BEHAVIOR))
    found = weights_of(kind, old, behavior, torch.tensor(MASK), CAP)
    torch.testing.assert_close(found, torch.tensor(expected(kind, OLD, BEHAVIOR, MASK, CAP), dtype=torch.float64))


def batch(old, behavior, mask) -> EvaluatedBatch:
    size = len(mask)
    return EvaluatedBatch(
        tokens=torch.zeros(mask.shape, dtype=torch.int64),
        attention_mask=torch.ones_like(mask),
        response_mask=mask,
        behavior_logprobs=behavior,
        untruncated_logprobs=behavior,
        scores=torch.zeros(size),
        group_ids=torch.arange(size),
        truncated=torch.zeros(size, dtype=torch.bool),
        old_logprobs=old,
        ref_logprobs=None,
        values=None,
        final_values=None,
    )


@pytest.mark.parametrize(
    ("kind", "name", "share", "mean"),
    [  # over five tokens: ratios 1, e^1.5, 1 and e^2, e^-3.5
        ("token", "importance/truncated", 2 / 5, (1 + 2 + 1 + 2 + math.exp(-3.5)) / 5),
        ("sequence", "importance/truncated", 3 / 5, (3 * 2 + 2 * math.exp(-1.5)) / 5),
        ("masked", "importance/masked", 3 / 5, 2 / 5),
    ],
)
def test_the_metrics_count_tokens(kind, name, share, mean):
    mask, metrics = torch.tensor(MASK), Metrics()
    advantages = torch.full(mask.shape, 3.0)
    weighted = importance_weights(
        advantages, batch(torch.tensor(OLD), torch.tensor(BEHAVIOR), mask), CAP, metrics, kind
    )
    values = metrics.values()
    assert values[name] == pytest.approx(share)
    assert values["importance/mean"] == pytest.approx(mean, rel=1e-6)
    assert float(weighted[mask].mean()) == pytest.approx(3 * mean, rel=1e-6)
    assert torch.equal(weighted[~mask], advantages[~mask])


logprobs = st.lists(st.floats(-30.0, 0.0), min_size=6, max_size=6)


@pytest.mark.parametrize("kind", ["token", "sequence", "masked"])
@given(old=logprobs, behavior=logprobs, cap=st.floats(1.0, 50.0))
def test_any_weight_is_between_0_and_the_cap_and_1_where_both_agree(kind, old, behavior, cap):
    a, b = (torch.tensor(row, dtype=torch.float64).view(2, 3) for row in (old, behavior))
    mask = torch.tensor([[False, True, True]] * 2)
    found = weights_of(kind, a, b, mask, cap)
    assert found.shape == a.shape
    assert bool(((found >= 0) & (found <= cap)).all())
    assert bool((weights_of(kind, a, a, mask, cap) == 1.0).all())
    if kind == "masked":
        assert bool(((found == 0) | (found >= (1 - 1e-12) / cap)).all())
    else:  # a larger cap never makes a weight smaller
        assert bool((weights_of(kind, a, b, mask, cap * 2) >= found).all())
