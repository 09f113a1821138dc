"""The chunked log-probs and entropies against torch's own log_softmax and its autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_grids import close, numbers, seeds
from torch import Tensor

from tether.ops.logprobs import chunked_logprobs

ROWS, HIDDEN, VOCABULARY = 5, 3, 7


def plain(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The documented formula, in whole tensors, through autograd."""
    y = scale * (states @ weight.T + (0.0 if bias is None else bias))
    z = (y if softcap is None else softcap * torch.tanh(y / softcap)) / temperature
    logs = torch.log_softmax(z, dim=-1)
    return logs[torch.arange(len(targets)), targets], -(logs.exp() * logs).sum(dim=-1)


def inputs(seed: int, rows: int = ROWS, spread: float = 2.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(states, weight, bias, targets), the first three with gradients."""
    states, weight, bias = (
        numbers(seed, rows, HIDDEN),
        spread * numbers(seed + 1, VOCABULARY, HIDDEN),
        numbers(seed + 2, 7),
    )
    targets = torch.randint(VOCABULARY, (rows,), generator=torch.Generator().manual_seed(seed))
    return states.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def test_golden():
    # One hidden unit of 1, weights log 1, log 2, log 5: probabilities 1/8, 2/8, 5/8.
    # log p(1) = log 0.25; entropy = 1/8 log 8 + 1/4 log 4 + 5/8 log 1.6 = 0.9002560843025158
    states, weight = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[1.0], [2.0], [5.0]]).double().log()
    logprobs, entropy = chunked_logprobs(states, weight, torch.tensor([1]))
    close(logprobs, [-1.3862943611198906])
    close(entropy, [math.log(8) / 8 + math.log(4) / 4 + 0.625 * math.log(1.6)])
    # At temperature 1/2 the odds are squared: 1, 4, 25 of 30.
    logprobs, _ = chunked_logprobs(states, weight, torch.tensor([1]), temperature=0.5)
    close(logprobs, [math.log(4 / 30)])


@settings(max_examples=40, deadline=None)
@given(
    seeds,
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([0.25, 1.0, 3.0]),
    st.sampled_from([None, 1.5, 30.0]),
    st.booleans(),
    st.sampled_from([1, 7, 14, 15, 28, 35, 10_000]),  # from one row a time (1 is less than a row) to all at once
    st.sampled_from(["both", "logprobs", "entropy"]),
)
def test_forward_and_gradients(seed, temperature, scale, softcap, with_bias, chunk_elements, upstream):
    states, weight, bias, targets = inputs(seed)
    leaves = (states, weight, bias) if with_bias else (states, weight)
    options = {"temperature": temperature, "bias": bias if with_bias else None, "scale": scale, "softcap": softcap}
    found = chunked_logprobs(states, weight, targets, chunk_elements=chunk_elements, **options)
    wanted = plain(states, weight, targets, **options)
    close(found[0].detach(), wanted[0].detach())
    close(found[1].detach(), wanted[1].detach())

    slopes = [numbers(seed + 5, ROWS), numbers(seed + 6, ROWS)]  # arbitrary upstream gradients
    chosen = {"both": [0, 1], "logprobs": [0], "entropy": [1]}[upstream]
    take = [slopes[k] for k in chosen]
    for ours, theirs in zip(
        torch.autograd.grad([found[k] for k in chosen], leaves, take),
        torch.autograd.grad([wanted[k] for k in chosen], leaves, take),
        strict=True,
    ):
        close(ours, theirs)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck(softcap: float | None):
    states, weight, bias, targets = inputs(3, rows=3)

    def both(states: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return chunked_logprobs(
            states, weight, targets, bias=bias, temperature=0.7, scale=1.3, softcap=softcap, chunk_elements=14
        )

    assert torch.autograd.gradcheck(both, (states, weight, bias))


@settings(max_examples=10, deadline=None)
@given(seeds)
def test_the_size_of_a_chunk_changes_nothing(seed):
    states, weight, bias, targets = inputs(seed)
    results = [chunked_logprobs(states, weight, targets, bias=bias, chunk_elements=size) for size in (1, 20, 10_000)]
    for logprobs, entropy in results[1:]:
        close(logprobs.detach(), results[0][0].detach())
        close(entropy.detach(), results[0][1].detach())


def test_gradients_only_where_they_are_wanted():
    states, weight, bias, targets = inputs(4)
    logprobs, _ = chunked_logprobs(states, weight.detach(), targets, bias=bias.detach())
    logprobs.sum().backward()
    assert states.grad is not None and weight.grad is None and bias.grad is None
    logprobs, _ = chunked_logprobs(states.detach(), weight, targets)
    logprobs.sum().backward()
    assert weight.grad is not None
    frozen, entropy = chunked_logprobs(states.detach(), weight.detach(), targets)
    assert not frozen.requires_grad and not entropy.requires_grad


def test_the_inputs_are_left_as_they_were():
    states, weight, bias, targets = inputs(5)
    before = [x.detach().clone() for x in (states, weight, bias)]
    logprobs, entropy = chunked_logprobs(states, weight, targets, bias=bias)
    values = logprobs.detach().clone(), entropy.detach().clone()
    (logprobs.sum() + entropy.sum()).backward(retain_graph=True)
    first = states.grad.clone()  # type: ignore[union-attr]
    (logprobs.sum() + entropy.sum()).backward()
    close(states.grad, 2.0 * first)  # type: ignore[arg-type]  # a second pass gives the same gradient again
    for now, then in zip((states, weight, bias, logprobs, entropy), (*before, *values), strict=True):
        assert torch.equal(now.detach(), then)


def test_no_tokens():
    states, weight, bias, _ = inputs(6)
    logprobs, entropy = chunked_logprobs(states[:0], weight, torch.zeros(0, dtype=torch.long), bias=bias)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None and not weight.grad.any()
    assert bias.grad is not None and not bias.grad.any()


def test_states_and_targets_must_be_of_one_length():
    states, weight, _, targets = inputs(7)
    for size in (1, 10_000):
        with pytest.raises((RuntimeError, IndexError)):
            chunked_logprobs(states[:-1], weight, targets, chunk_elements=size)


def test_a_second_derivative_is_refused_and_not_wrong():
    # A backbone with curvature of its own: states = knob^2 * x. Its second derivative through the softmax must be right
    # or refused; one that leaves the softmax's part out would give TRPO a wrong Fisher matrix without a word.
    states, weight, _, targets = inputs(8)
    knob = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)

    def second(compute) -> Tensor:
        total = compute(knob**2 * states.detach(), weight.detach(), targets)[0].sum()
        (slope,) = torch.autograd.grad(total, knob, create_graph=True)
        return torch.autograd.grad(slope, knob)[0]

    right = second(plain)
    try:
        found = second(chunked_logprobs)
    except RuntimeError:
        return
    close(found, right)


@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_single_precision_stays_close_to_double(spread: float):
    states, weight, bias, targets = (x.detach() for x in inputs(9, rows=64, spread=spread))
    wanted = plain(states, weight, targets, bias=bias)
    logprobs, entropy = chunked_logprobs(states.float(), weight.float(), targets, bias=bias.float(), chunk_elements=70)
    assert logprobs.dtype == entropy.dtype == torch.float32
    close(logprobs.double(), wanted[0], 1e-5 * spread)
    close(entropy.double(), wanted[1], 1e-5 * spread)
    assert (logprobs <= 0.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_logits_overflow_nothing(dtype: torch.dtype):
    states, weight = torch.ones(1, 1, dtype=dtype), torch.tensor([[1e4], [-1e4], [0.0]], dtype=dtype).requires_grad_()
    logprobs, entropy = chunked_logprobs(states, weight, torch.tensor([0]))
    assert logprobs.item() == 0.0 and entropy.item() == 0.0
    (logprobs + entropy).sum().backward()
    assert weight.grad is not None and torch.isfinite(weight.grad).all()


def test_entropy_is_between_0_and_log_of_the_vocabulary():
    states, weight, bias, targets = (x.detach() for x in inputs(10, rows=200, spread=1.0))
    _, entropy = chunked_logprobs(states, weight, targets, bias=bias)
    assert (entropy > 0.0).all() and (entropy < math.log(VOCABULARY)).all()
    _, uniform = chunked_logprobs(states, torch.zeros_like(weight), targets)
    close(uniform, [math.log(VOCABULARY)] * 200)


def test_entropy_of_a_near_certain_token_is_never_negative_in_single_precision():
    # Logits near 50, as trained models give them: lse - sum p z is a difference of two numbers near 50.
    gaps = torch.linspace(5.0, 25.0, 200)
    states = torch.stack([torch.full_like(gaps, 50.3), 50.3 - gaps], dim=1)
    logprobs, entropy = chunked_logprobs(states, torch.eye(2), torch.zeros(200, dtype=torch.long))
    exact_logprobs, exact = plain(states.double(), torch.eye(2).double(), torch.zeros(200, dtype=torch.long))
    assert (entropy >= 0.0).all()
    close(entropy.double(), exact, 1e-6)
    close(logprobs.double(), exact_logprobs, 1e-6)


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from([1, 2, 3, 100]), st.booleans(), st.sampled_from([(1.0, 1.0), (0.7, 2.0)]))
def test_a_frozen_output_layer_gives_the_same_gradient(
    seed: int, rows: int, entropic: bool, factors: tuple[float, float]
):
    states, weight, bias, targets = inputs(seed)
    weight, bias = weight.detach(), bias.detach()
    options = {"temperature": factors[0], "scale": factors[1], "bias": bias}
    slopes = numbers(seed + 3, 2, ROWS)
    found = []
    for compute in (
        lambda: plain(states, weight, targets, **options),
        lambda: chunked_logprobs(states, weight, targets, chunk_elements=rows * VOCABULARY, **options),
    ):
        logprobs, entropy = compute()
        total = (slopes[0] * logprobs).sum() + (slopes[1] * entropy).sum() * float(entropic)
        found.append((logprobs, entropy, *torch.autograd.grad(total, states)))
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)
