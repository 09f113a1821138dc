"""Drawing from column-wise logits is drawing from rows, found by another search."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tether.ops.sampling import BLOCK, draw, draw_columns
from tether.protocols import Sampling


@settings(deadline=None, max_examples=60)
@example(count=1000, seed=15021, temperature=0.7, scale=18.78125, impossible=False)  # a token of probability 1e-43
@given(
    st.sampled_from([1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1000, 5000]),
    st.integers(0, 10**6),
    st.sampled_from([1.0, 0.7, 2.0]),
    st.floats(0.0, 20.0),
    st.booleans(),
)
def test_the_same_uniforms_give_the_same_tokens(
    count: int, seed: int, temperature: float, scale: float, impossible: bool
):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(16, count, generator=generator)
    if impossible and count > 1:
        logits[torch.rand(16, count, generator=generator) < 0.7] = -math.inf
        logits[:, count // 2] = 0.0
    uniforms = 1.0 - torch.rand(16, generator=generator, dtype=torch.float64)
    uniforms[0], uniforms[1] = 1.0, 2.0**-53
    rows = draw(logits, uniforms, Sampling(1, temperature=temperature))
    columns = draw_columns(logits.t().contiguous(), uniforms, Sampling(1, temperature=temperature))
    table = (logits.double() / temperature).log_softmax(-1)
    assert torch.allclose(
        columns.untruncated.double(), table.gather(1, columns.tokens[:, None])[:, 0], atol=1e-5, rtol=1e-6
    )
    assert torch.equal(columns.behavior, columns.untruncated)
    cdf = table.exp().cumsum(-1)
    for row in (rows.tokens != columns.tokens).nonzero()[:, 0].tolist():  # then the uniform is on a boundary
        between = sorted((int(rows.tokens[row]), int(columns.tokens[row])))
        assert abs(float(cdf[row, between[0]] - uniforms[row])) < 1e-6
        assert float(cdf[row, between[1] - 1] - cdf[row, between[0]]) < 1e-6


def test_nearly_all_tokens_are_the_very_same():
    logits = 3 * torch.randn(400, 49152, generator=torch.Generator().manual_seed(0))
    uniforms = torch.rand(400, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = draw(logits, uniforms, Sampling(1))
    columns = draw_columns(logits.t().contiguous(), uniforms, Sampling(1))
    assert int((rows.tokens != columns.tokens).sum()) <= 1
    same = rows.tokens == columns.tokens
    assert torch.allclose(rows.behavior[same], columns.behavior[same], atol=5e-6)
    exact = logits.double().log_softmax(-1).gather(1, rows.tokens[:, None])[:, 0]
    assert torch.allclose(rows.behavior.double(), exact, atol=5e-6, rtol=0.0)


@pytest.mark.parametrize(
    "sampling", [Sampling(1, temperature=0.0), Sampling(1, top_k=3), Sampling(1, top_p=0.6, temperature=0.7)]
)
def test_greedy_and_truncated_draws_are_those_of_rows(sampling: Sampling):
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    uniforms = torch.tensor([0.1, 0.3, 0.5, 0.8, 1.0], dtype=torch.float64)
    for found, expected in zip(
        draw_columns(logits.t().contiguous(), uniforms, sampling), draw(logits, uniforms, sampling), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 299])
def test_columns_without_a_distribution_are_reported(poison: float, place: int):
    logits = torch.zeros(300, 4)
    logits[place, 0] = poison
    logits[:, 2] = -math.inf
    tokens = draw_columns(logits, torch.full((4,), 0.5), Sampling(1)).tokens.tolist()
    assert tokens == [-1, 149, -1, 149]


def test_ids_of_probability_zero_are_never_drawn():
    logits = torch.full((2 * BLOCK + 10, 4), -math.inf)
    logits[[3, BLOCK + 7]] = 0.0
    uniforms = torch.tensor([1.0, 5e-324, 2.0**-53, 0.5], dtype=torch.float64)
    assert draw_columns(logits, uniforms, Sampling(1)).tokens.tolist() == [BLOCK + 7, 3, 3, 3]
