"""The sampling functions against slow, independent definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tether.ops.sampling import check_sampling, draw, inverse_cdf, log_softmax, sample_uniforms, truncate
from tether.protocols import Sampling
from tether.seeds import derive_seed

logit_rows = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12)


def truncated_by_definition(probabilities: list[float], top_k: int, top_p: float) -> list[float]:
    """Top-k then top-p, one id at a time in double precision, straight from the two rules."""
    kept = [p if not top_k or sum(other > p for other in probabilities) < top_k else 0.0 for p in probabilities]
    mass = math.fsum(kept)
    kept = [p if top_p >= 1.0 or math.fsum(o for o in kept if o > p) < top_p * mass else 0.0 for p in kept]
    mass = math.fsum(kept)
    return [p / mass for p in kept]


def clear_of_rounding(probabilities: list[float], top_k: int, top_p: float) -> bool:
    """Whether no sum of probabilities falls so near to top_p that rounding decides."""
    kept = [p for p in truncated_by_definition(probabilities, top_k, 1.0) if p]
    return all(abs(math.fsum(other for other in kept if other > p) - top_p) > 1e-5 for p in kept)


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    top = max(logits)
    heights = [math.exp((z - top) / temperature) for z in logits]
    return [height / math.fsum(heights) for height in heights]


@settings(deadline=None)
@given(logit_rows, st.integers(0, 14), st.floats(0.05, 1.0))
def test_truncation_is_what_its_rules_say(logits: list[float], top_k: int, top_p: float):
    logprobs = torch.tensor([logits]).log_softmax(-1)
    values = [math.exp(x) for x in logprobs[0].tolist()]  # as the code sees them, so that ties are the same ties
    assume(clear_of_rounding(values, top_k, top_p))
    found = truncate(logprobs, top_k=top_k, top_p=top_p).exp()[0].tolist()
    assert found == pytest.approx(truncated_by_definition(values, top_k, top_p), abs=1e-6)


@settings(deadline=None)
@given(logit_rows, st.integers(0, 14), st.floats(0.05, 1.0), st.randoms(use_true_random=False))
def test_truncation_does_not_care_how_ids_are_ordered(logits: list[float], top_k: int, top_p: float, random):
    logprobs = torch.tensor([logits]).log_softmax(-1)
    assume(clear_of_rounding(logprobs[0].exp().tolist(), top_k, top_p))
    order = list(range(len(logits)))
    random.shuffle(order)
    shuffled = truncate(logprobs[:, order], top_k=top_k, top_p=top_p)
    kept, kept_shuffled = truncate(logprobs, top_k=top_k, top_p=top_p).isfinite(), shuffled.isfinite()
    assert torch.equal(kept[:, order], kept_shuffled)
    assert kept[0, int(logprobs.argmax())], "the most likely id always stays"


def test_truncation_by_hand():
    logprobs = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    half = truncate(logprobs, top_k=0, top_p=0.5)
    assert half.exp().tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert truncate(logprobs, top_k=2, top_p=1.0).exp()[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert truncate(logprobs, top_k=3, top_p=1.0).isfinite().all(), "the third and fourth are equally likely"
    # top-p is a share of what top-k left: 0.5 / 0.75 = 2/3 of the mass is above the second id
    assert truncate(logprobs, top_k=2, top_p=0.6).exp()[0].tolist() == pytest.approx([1, 0, 0, 0])
    assert truncate(logprobs, top_k=2, top_p=0.7).exp()[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert truncate(logprobs, top_k=0, top_p=1.0) is logprobs
    assert truncate(logprobs, top_k=9, top_p=1.0) is logprobs


@settings(deadline=None)
@given(logit_rows, st.floats(0.0, 1.0, exclude_min=True), st.sets(st.integers(0, 11)))
def test_the_drawn_id_is_the_first_whose_cumulative_probability_reaches_u(
    logits: list[float], uniform: float, impossible: set[int]
):
    row = [-math.inf if id in impossible else z for id, z in enumerate(logits)]
    assume(max(row) > -math.inf)
    logprobs = torch.tensor([row]).log_softmax(-1)
    drawn = int(inverse_cdf(logprobs, torch.tensor([uniform], dtype=torch.float64)))
    probabilities = logprobs.exp()[0].tolist()
    assert probabilities[drawn] > 0
    before, upto = math.fsum(probabilities[:drawn]), math.fsum(probabilities[: drawn + 1])
    total = math.fsum(probabilities)
    assert before / total - 1e-9 <= uniform <= upto / total + 1e-9


def test_a_uniform_on_the_boundary_belongs_to_the_id_before_it():
    even = torch.zeros(3, 4).log_softmax(-1)
    assert inverse_cdf(even, torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)).tolist() == [0, 1, 3]


@pytest.mark.parametrize("uniform", [1.0, 5e-324, 2.0**-53, 0.5])
def test_ids_of_probability_zero_are_never_drawn(uniform: float):
    logprobs = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf]).log_softmax(-1)[None]
    assert int(inverse_cdf(logprobs, torch.tensor([uniform], dtype=torch.float64))) in (1, 3)


def test_evenly_spread_uniforms_hit_each_id_in_proportion():
    probabilities = torch.tensor([0.1, 0.0, 0.25, 0.05, 0.6])
    count = 1000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = inverse_cdf(probabilities.log().expand(count, -1).contiguous(), uniforms)
    assert (drawn.bincount(minlength=5) - probabilities * count).abs().max() <= 1.0


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    return float((((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum())


def test_frequencies_follow_the_truncated_distribution():
    torch.manual_seed(0)
    logits = 2 * torch.randn(12)
    sampling = Sampling(1, temperature=0.7, top_k=9, top_p=0.97)
    expected = truncated_by_definition(softmax(logits.tolist(), 0.7), 9, 0.97)
    count = 100_000
    uniforms = torch.cat([sample_uniforms(0, f"prompt {i}", i, count // 100) for i in range(100)])
    drawn = draw(logits.expand(count, -1), uniforms, sampling)
    counts = drawn.tokens.bincount(minlength=12).double()
    kept = torch.tensor(expected, dtype=torch.float64)
    assert counts[kept == 0].sum() == 0
    assert chi_square(counts, kept) < 30, "beyond the 0.9999 quantile of chi-square with at most 8 degrees of freedom"
    assert torch.allclose(drawn.behavior.double(), kept.log()[drawn.tokens], atol=1e-5)


@settings(deadline=None)
@given(logit_rows, st.floats(0.2, 3.0), st.floats(0.001, 1.0))
def test_temperature_and_both_logprobs(logits: list[float], temperature: float, uniform: float):
    whole = softmax(logits, temperature)
    drawn = draw(torch.tensor([logits]), torch.tensor([uniform]), Sampling(1, temperature=temperature))
    assert float(drawn.untruncated) == pytest.approx(math.log(whole[int(drawn.tokens)]), abs=1e-4)
    assert torch.equal(drawn.behavior, drawn.untruncated)
    cut = draw(torch.tensor([logits]), torch.tensor([uniform]), Sampling(1, temperature=temperature, top_k=1))
    logprobs = log_softmax(torch.tensor([logits]) / temperature)  # in which rounding may make ties of neighbours
    ties = int((logprobs == logprobs.max()).sum())
    assert float(cut.untruncated) == pytest.approx(math.log(max(whole)), abs=1e-4)
    assert float(cut.behavior) == pytest.approx(-math.log(ties), abs=1e-6)


def test_temperature_zero_is_greedy_with_logprobs_at_temperature_one():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    drawn = draw(logits, torch.tensor([0.01, 0.99]), Sampling(1, temperature=0.0, top_k=1, top_p=0.5))
    assert drawn.tokens.tolist() == [1, 0]
    expected = logits.double().log_softmax(-1).amax(-1)
    assert torch.equal(drawn.behavior, drawn.untruncated)
    assert torch.allclose(drawn.untruncated.double(), expected, atol=1e-7, rtol=0.0)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, temperature=0.0), Sampling(1, top_k=2, top_p=0.5)])
def test_rows_without_a_distribution_are_reported(poison: float, sampling: Sampling):
    logits = torch.tensor([[1.0, poison, 0.0], [1.0, 2.0, -math.inf], [-math.inf] * 3])
    tokens = draw(logits, torch.tensor([0.5, 0.9, 0.5]), sampling).tokens.tolist()
    assert tokens == [-1, 1, -1]


def test_half_precision_logits_are_widened_first():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    drawn = draw(logits, torch.tensor([0.4]), Sampling(1, temperature=0.9))
    assert drawn.behavior.dtype == torch.float32
    expected = (logits.double() / 0.9).log_softmax(-1)[0, int(drawn.tokens)]
    assert float(drawn.behavior) == pytest.approx(float(expected), abs=1e-6)


def test_streams_are_stable_distinct_and_extend():
    assert derive_seed(0, 0, "p") == 142303104689224317  # printf 0/0/p | b2sum -l 64, without its last bit
    names = [(seed, sample, id) for seed in (0, 1, 11) for id in ("p", "1/p", "q") for sample in (0, 1, 11)]
    assert len({derive_seed(*name) for name in names}) == len(names)
    assert all(0 <= derive_seed(*name) < 2**63 for name in names)
    stream = torch.Generator().manual_seed(derive_seed(3, 1, "p"))
    assert torch.equal(sample_uniforms(3, "p", 1, 4), 1 - torch.rand(4, generator=stream, dtype=torch.float64))
    long = sample_uniforms(3, "p", 1, 500)
    assert torch.equal(sample_uniforms(3, "p", 1, 7), long[:7])
    assert float(long.min()) > 0 and float(long.max()) <= 1
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    sample_uniforms(3, "p", 1, 5)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("max_new_tokens", Sampling(0)),
        ("temperature", Sampling(1, temperature=-0.1)),
        ("temperature", Sampling(1, temperature=math.nan)),
        ("temperature", Sampling(1, temperature=math.inf)),
        ("top_p", Sampling(1, top_p=0.0)),
        ("top_p", Sampling(1, top_p=1.1)),
        ("top_k", Sampling(1, top_k=-1)),
    ],
)
def test_settings_that_describe_no_distribution(field: str, sampling: Sampling):
    with pytest.raises(ValueError, match=rf"sampling\.{field} is"):
        check_sampling(sampling)
