"""The likeliest tokens at each place are those of the whole distribution, however it is cut into chunks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tether.ops.logprobs import token_logprobs, top_of_blocks, top_tokens

MASK = torch.tensor([[False, True, True, False], [False, False, True, True]])


def inputs(vocabulary: int = 7):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, 3, generator=generator), torch.randn(vocabulary, 3, generator=generator)


def what_was_sampled(hidden, weight, **options):
    tokens = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]])
    return tokens, token_logprobs(hidden, weight, tokens, MASK, **options)[0]


@pytest.mark.parametrize("chunk", [1, 7, 20, 10_000])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "scale": 2.0}, {"softcap": 1.5, "bias": torch.ones(7)}])
def test_they_are_the_top_of_the_whole_distribution(chunk, options):
    hidden, weight = inputs()
    sampled, theirs = what_was_sampled(hidden, weight, **options)
    tokens, logprobs = top_tokens(hidden, weight, sampled, theirs, MASK, 3, chunk_elements=chunk, **options)
    assert tokens.shape == logprobs.shape == (2, 4, 3) and tokens.dtype == torch.int32
    for row, column in MASK.nonzero().tolist():
        logits = hidden[row, column - 1] @ weight.T + options.get("bias", torch.zeros(7))
        logits = logits * options.get("scale", 1.0)
        if cap := options.get("softcap"):
            logits = cap * torch.tanh(logits / cap)
        whole = torch.log_softmax(logits / options.get("temperature", 1.0), dim=-1)
        order = sorted(range(7), key=lambda token: -whole[token])[:3]
        assert tokens[row, column].tolist() == order
        torch.testing.assert_close(logprobs[row, column], whole[order])
    assert not tokens[~MASK].any() and not logprobs[~MASK].any()


def test_a_small_vocabulary_has_no_more_than_all_of_it():
    hidden, weight = inputs(vocabulary=2)
    tokens, logprobs = top_tokens(hidden, weight, *what_was_sampled(hidden, weight), MASK, 5)
    assert tokens.shape == (2, 4, 2)
    torch.testing.assert_close(logprobs[MASK].exp().sum(dim=-1), torch.ones(4))


@given(st.integers(1, 300), st.integers(1, 8), st.integers(0, 99))
def test_two_levels_find_what_one_finds(width, count, seed):
    values = torch.randn(3, width, generator=torch.Generator().manual_seed(seed))
    highest, ids = top_of_blocks(values, min(count, width))
    plain = values.topk(min(count, width), dim=1)
    assert torch.equal(highest, plain.values) and torch.equal(values.gather(1, ids), highest)
