"""Causal attention over rows laid end to end, forward and backward, by the kernel that is right for it. No autograd.

Torch's flash attention is the default, and knows windows. Many short rows and capped scores have kernels of their own
(`kernels/attention.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tether.accel.kernels import attention as row_kernels
from tether.accel.spec import Layer
from tether.ops.packing import Packing, Rows


class Attention:
    """Attention of n query tokens (n, heads, D) to the N keys and values (N, kv heads, D) of their rows.

    The queries are those of all tokens, or those of `rows`. Where these end their rows, causality counted from the
    ends of queries and keys is right as it is; else queries stand among zeros at the other tokens.
    """

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, packing: Packing, rows: Rows | None, layer: Layer
    ) -> tuple[Tensor, Tensor]:
        """`(mixed, normalisers)`: (n, heads * D), and what the backward pass needs."""
        if layer.score_cap is None and row_kernels.usable(query, key, packing, rows):
            return row_kernels.forward(query, key, value, packing, rows, layer)
        query, starts, most = _laid_out(query, packing, rows)
        if layer.score_cap is not None:
            mixed, lse = row_kernels.forward(query, key, value, packing, _ending(rows), layer)
            return _picked(mixed, rows), lse
        mixed, lse = torch.ops.aten._flash_attention_forward(
            query, key, value, starts, packing.starts, most, packing.longest, 0.0, True, False,
            scale=layer.scaling, **_window(packing, layer),
        )[:2]  # fmt: skip
        return _picked(mixed, rows).flatten(1), lse

    @staticmethod
    def backward(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mixed: Tensor,
        lse: Tensor,
        packing: Packing,
        rows: Rows | None,
        layer: Layer,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`(d query, d key, d value)` from the gradient (n, heads * D) of what `forward` gave."""
        if layer.score_cap is None and row_kernels.usable(query, key, packing, rows):
            return row_kernels.backward(grad, query, key, value, mixed, lse, packing, rows, layer)
        shape = query.shape
        query, starts, most = _laid_out(query, packing, rows)
        grad, mixed = (_laid_out(x.view(shape), packing, rows)[0] for x in (grad, mixed))
        if layer.score_cap is not None:
            rest = packing, _ending(rows), layer
            of_query, of_key, of_value = row_kernels.backward(grad.flatten(1), query, key, value, mixed, lse, *rest)
            return _picked(of_query, rows).contiguous(), of_key, of_value
        seed: Any = torch.empty(2, dtype=torch.uint64, device=query.device)  # of a dropout that is not there
        found = torch.ops.aten._flash_attention_backward(
            grad, query, key, value, mixed, lse, starts, packing.starts, most, packing.longest, 0.0, True,
            seed, seed, scale=layer.scaling, **_window(packing, layer),
        )  # fmt: skip
        return _picked(found[0], rows).contiguous(), found[1].contiguous(), found[2]


def _window(packing: Packing, layer: Layer) -> dict[str, int]:
    """How many tokens before its own a query sees, for flash attention; nothing where the window hides no token."""
    if layer.window is None or layer.window >= packing.longest:
        return {}
    return {"window_size_left": layer.window - 1, "window_size_right": 0}


def _ending(rows: Rows | None) -> Rows | None:
    """The tokens that ask, where they end their rows; else all tokens stand for them."""
    return None if rows is None or rows.starts is None else rows


def _laid_out(x: Tensor, packing: Packing, rows: Rows | None) -> tuple[Tensor, Tensor, int]:
    """`(x, where its rows start, a bound on their length)`; x (n, ...) among zeros where its tokens end no rows.

    The bound is never 1, as of a reward model, which reads each row's last state alone: where rows ask once and query
    heads share a key head, flash attention swaps the two in its forward pass, and the normalisers it leaves then lie in
    another order than its backward pass reads.
    """
    if rows is None:
        return x, packing.starts, max(2, packing.longest)
    if rows.starts is not None:
        return x, rows.starts, max(2, rows.most)
    among = x.new_zeros(len(packing.places), *x.shape[1:]).index_copy_(0, rows.tokens, x)
    return among, packing.starts, max(2, packing.longest)


def _picked(x: Tensor, rows: Rows | None) -> Tensor:
    """The tokens of x that were asked for."""
    return x if rows is None or rows.starts is not None else x.index_select(0, rows.tokens)
