"""Tensors arrive as they left. (On a device: tests/accel/test_fused_cuda.py.)"""

from __future__ import annotations

import torch

from tether.device_transfer import brought, sent


def test_what_is_sent_and_brought_is_the_same():
    large, small = torch.arange(100_000), torch.tensor(2.5)
    assert torch.equal(sent(large, "cpu"), large)
    assert [tensor.tolist() for tensor in brought([large[:3], small])] == [[0, 1, 2], 2.5]
    assert brought([]) == []
