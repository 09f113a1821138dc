"""TRPO's attention that can be differentiated twice: torch's plain kernel to the bit, and for one thread alone."""

import threading

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tether.algorithms.trpo import PlainAttention

CASES = {
    "causal": ({"is_causal": True}, 4),
    "a mask": ({"attn_mask": torch.arange(9)[:, None] >= torch.arange(9)}, 4),
    "a bias": ({"attn_mask": torch.linspace(-1, 1, 81).view(9, 9)}, 4),
    "shared keys": ({"is_causal": True, "enable_gqa": True, "scale": 0.3}, 2),
}


def tensors(key_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 9, 8, generator=generator) for heads in (4, key_heads, key_heads)]


@pytest.mark.parametrize("case", CASES)
def test_it_has_the_bits_of_the_plain_kernel_and_a_second_derivative(case):
    words, key_heads = CASES[case]
    query, key, value = tensors(key_heads)
    query.requires_grad_(True)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(query, key, value, **words)
    with PlainAttention():
        found = F.scaled_dot_product_attention(query, key, value, **words)
    assert torch.equal(found, expected)
    (first,) = torch.autograd.grad(found.square().sum(), query, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), query)
    assert second.abs().sum() > 0


def test_other_threads_keep_their_kernel():
    found: list[bool] = []

    def elsewhere() -> None:
        query = torch.randn(1, 1, 4, 8, requires_grad=True)
        found.append(
            "flash" in str(F.scaled_dot_product_attention(query, query, query, is_causal=True).grad_fn).lower()
        )

    elsewhere()
    with PlainAttention():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert found == [True, True]
