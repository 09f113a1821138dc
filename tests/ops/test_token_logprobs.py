"""The shift by one, laying values out on a mask, and whole log-distributions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masked_grids import close, few, masks, numbers, seeds
from torch import Tensor

from tether.ops.kl import exact_kl
from tether.ops.logprobs import log_distributions, scatter_to_mask, states_before, token_logprobs

VOCABULARY, HIDDEN = 6, 3


def without_first_column(mask: Tensor) -> Tensor:
    """The mask behind one more column, for the first token has no state before it."""
    return torch.cat([torch.zeros(len(mask), 1, dtype=torch.bool), mask], dim=1)


after_a_prompt = masks().map(without_first_column)


def test_the_shift_golden():
    # hidden[b, t] names itself: 10 b + t. The tokens at (0, 1), (0, 3), (1, 2) were chosen at (0, 0), (0, 2), (1, 1).
    hidden = torch.tensor([[[0.0], [1.0], [2.0], [3.0]], [[10.0], [11.0], [12.0], [13.0]]])
    mask = torch.tensor([[False, True, False, True], [False, False, True, False]])
    assert states_before(hidden, mask).flatten().tolist() == [0.0, 2.0, 11.0]
    assert scatter_to_mask(torch.tensor([5.0, 6.0, 7.0]), mask).tolist() == [[0, 5, 0, 6], [0, 0, 7, 0]]


@few
@given(after_a_prompt, seeds)
def test_states_before_one_token_at_a_time(mask, seed):
    hidden = numbers(seed, *mask.shape, HIDDEN)
    wanted = [hidden[b, t - 1] for b in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[b, t]]
    assert torch.equal(states_before(hidden, mask), torch.stack(wanted))


@few
@given(masks(), seeds)
def test_spread_is_the_inverse_of_reading_off(mask, seed):
    values = numbers(seed, int(mask.sum())).requires_grad_()
    laid = scatter_to_mask(values, mask)
    assert torch.equal(laid[mask], values) and not laid[~mask].any()
    upstream = numbers(seed + 1, *mask.shape)
    assert torch.equal(torch.autograd.grad(laid, values, upstream)[0], upstream[mask])
    x = numbers(seed + 2, *mask.shape).masked_fill(~mask, 0.0)
    assert torch.equal(scatter_to_mask(x[mask], mask), x)


@few
@given(after_a_prompt, seeds, st.sampled_from([0.7, 1.0]), st.sampled_from([None, 2.0]), st.sampled_from([1, 18, 999]))
def test_token_logprobs_one_token_at_a_time(mask, seed, temperature, softcap, chunk_elements):
    hidden, weight = numbers(seed, *mask.shape, HIDDEN), numbers(seed + 1, VOCABULARY, HIDDEN)
    bias, tokens = numbers(seed + 2, VOCABULARY), numbers(seed + 3, *mask.shape).mul(10).long().abs() % VOCABULARY
    options = {"temperature": temperature, "bias": bias, "scale": 1.3, "softcap": softcap}
    logprobs, entropy = token_logprobs(hidden, weight, tokens, mask, chunk_elements=chunk_elements, **options)
    whole = log_distributions(hidden, weight, mask, **options)
    place = 0
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if not mask[b, t]:
                assert logprobs[b, t] == 0.0 and entropy[b, t] == 0.0
                continue
            y = 1.3 * (weight @ hidden[b, t - 1] + bias)
            z = (y if softcap is None else softcap * torch.tanh(y / softcap)) / temperature
            distribution = z.exp() / z.exp().sum()
            close(logprobs[b, t], distribution[tokens[b, t]].log())
            close(entropy[b, t], -(distribution * distribution.log()).sum())
            close(whole[place], distribution.log())
            place += 1
    assert place == len(whole)


def test_padding_cannot_reach_a_gradient():
    mask = torch.tensor([[False, True, True, False, False]])
    hidden = numbers(1, 1, 5, HIDDEN)
    hidden[0, 2:] = float("nan")  # states at and after the last token choose nothing that is trained
    hidden.requires_grad_()
    weight, tokens = numbers(2, VOCABULARY, HIDDEN).requires_grad_(), torch.tensor([[0, 1, 2, 3, 4]])
    logprobs, entropy = token_logprobs(hidden, weight, tokens, mask)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    assert torch.isfinite(weight.grad).all() and torch.isfinite(hidden.grad).all()
    assert hidden.grad[0, :2].any() and not hidden.grad[0, 2:].any()


def test_a_mask_on_the_first_column_is_an_error():
    mask = torch.tensor([[True, True]])
    with pytest.raises((RuntimeError, IndexError)):
        token_logprobs(numbers(1, 1, 2, HIDDEN), numbers(2, VOCABULARY, HIDDEN), torch.zeros(1, 2).long(), mask)


def test_reading_at_the_token_itself_gives_other_numbers():
    # Off by one: the state *at* a token has already seen it.
    mask = torch.tensor([[False, True, True]])
    hidden, weight, tokens = numbers(1, 1, 3, HIDDEN), numbers(2, VOCABULARY, HIDDEN), torch.tensor([[0, 1, 2]])
    logprobs, _ = token_logprobs(hidden, weight, tokens, mask)
    naive = torch.log_softmax(hidden @ weight.T, -1).gather(2, tokens[..., None])[..., 0] * mask
    assert (logprobs - naive)[mask].abs().max() > 0.1


def test_trap_10_the_temperature_is_part_of_the_log_prob():
    mask = torch.tensor([[False, True, True]])
    hidden, weight, tokens = numbers(1, 1, 3, HIDDEN), numbers(2, VOCABULARY, HIDDEN), torch.tensor([[0, 1, 2]])
    warm, _ = token_logprobs(hidden, weight, tokens, mask, temperature=0.7)
    assert (warm - token_logprobs(hidden, weight, tokens, mask)[0])[mask].abs().min() > 0.01
    close(warm, token_logprobs(hidden / 0.7, weight, tokens, mask)[0])


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_log_distributions_can_be_differentiated_twice(softcap: float | None):
    mask = torch.tensor([[False, True, False], [False, False, True]])
    hidden, weight = numbers(1, 2, 3, 2).requires_grad_(), numbers(2, 3, 2).requires_grad_()
    bias = numbers(3, 3).requires_grad_()
    options = {"temperature": 0.8, "scale": 1.2, "softcap": softcap}

    def whole(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return log_distributions(hidden, weight, mask, bias=bias, **options)  # type: ignore[arg-type]

    def kl(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        now = whole(hidden, weight, bias)
        return exact_kl(torch.log_softmax(numbers(4, *now.shape), -1), now).mean()

    assert torch.autograd.gradcheck(whole, (hidden, weight, bias))
    assert torch.autograd.gradgradcheck(whole, (hidden, weight, bias))
    assert torch.autograd.gradgradcheck(kl, (hidden, weight, bias))
