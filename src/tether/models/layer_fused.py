"""The parts of a decoder layer over packed tokens for a CUDA device, with the names and meanings of `layer_plain.py`.

What only reads and writes is done by Triton kernels, each in one pass over its inputs. Products stay with the library,
but the gradient of a weight is added to `.grad` by the product itself, the gradients of one input by several products
likewise, and adapters are two thin products added in place. A layer keeps for its backward pass: what enters each of
its two norms and what leaves it, queries, keys, values, what attention mixed, gates and ups. The gated product is made
again.

Padding never exists: attention runs over rows laid end to end (torch's own flash attention, which groups query heads
over a key head by itself).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation

from tether.models import layer_plain
from tether.models.layer_kernels import (
    add_norm_backward_kernel,
    add_norm_kernel,
    gate_backward_kernel,
    gate_kernel,
    rotate_kernel,
)
from tether.models.packing import Packing, Rows

GATE_BLOCK = 4096  # numbers that one program of the gates' kernels reads
NORM_PROGRAMS = 132 * 4  # programs of the norm's backward pass, each with a partial gradient of its weight


def norm(module: Any, x: Tensor) -> Tensor:
    """The module's RMS norm of x (N, H); what stands in a cut trunk where a norm was passes x on."""
    return x if isinstance(module, nn.Identity) else _apply(_AddNorm, x, None, module.weight, module.variance_epsilon)[1]


def head_norm(module: Any, x: Tensor) -> Tensor:
    """The norm of each head of x (N, heads, D)."""
    return norm(module, x.reshape(-1, x.shape[-1])).view(x.shape)


def add_norm(module: Any, x: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """`(x + change, its norm)`, (N, H) each."""
    if isinstance(module, nn.Identity):
        return layer_plain.add_norm(module, x, change)
    return _apply(_AddNorm, x, change, module.weight, module.variance_epsilon)


def linears(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Each module's product with the same x (N, in): (N, out) each."""
    parts = [_Part.of(module) for module in modules]
    if any(part is None for part in parts):  # quantised, or wrapped by something that is not known
        return layer_plain.linears(modules, x)
    known = cast("list[_Part]", parts)
    return list(_apply(_Linears, x, known, *(tensor for part in known for tensor in part.tensors())))


def gated(mlp: Any, x: Tensor) -> Tensor:
    """down(act(gate(x)) * up(x)): (N, H)."""
    gate, up = linears((mlp.gate_proj, mlp.up_proj), x)
    if not isinstance(mlp.act_fn, nn.SiLU | SiLUActivation):
        return linears((mlp.down_proj,), mlp.act_fn(gate) * up)[0]
    down = mlp.down_proj
    if type(down) is nn.Linear:
        return _apply(_GatedDown, gate, up, down.weight, down.bias)
    return linears((down,), _apply(_Gated, gate, up))[0]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x (N, heads, D): pairs (i, i + D/2) turned by the angles of cos and sin, (N, 1, D) each."""
    return _apply(_Rotate, x, cos, sin)


def attend(query: Tensor, key: Tensor, value: Tensor, packing: Packing, rows: Rows | None, scaling: float) -> Tensor:
    """(n, heads * D) causal attention of the query tokens to their rows: of all N, or of the n that `rows` names.

    Where the n tokens end their rows, causality counted from the ends of queries and keys is right as it is.
    """
    starts, most = packing.starts, packing.longest
    scattered = rows is not None and rows.starts is None
    if rows is not None and rows.starts is not None:
        starts, most = rows.starts, rows.most
    elif scattered:
        assert rows is not None
        query = query.new_zeros(len(packing.places), *query.shape[1:]).index_copy(0, rows.tokens, query)
    mixed: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, starts, packing.starts, most, packing.longest, 0.0, True, False, scale=scaling
    )[0]
    mixed = mixed.flatten(1)
    return take(mixed, rows) if scattered and rows is not None else mixed


def take(x: Tensor, rows: Rows) -> Tensor:
    """(n, ...) the tokens of x (N, ...) that `rows` names."""
    return _apply(_Take, x, rows.tokens)


def _apply(function: Any, *arguments: Any) -> Any:
    return cast("Callable[..., Any]", function.apply)(*arguments)


def add_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """The gradient grad^T x (out, in) of a weight: added to its `.grad` where that can be done, else returned.

    grad is (N, out), x (N, in). What watches a weight's gradient has to see it pass: then it is returned.
    """
    if not weight.is_leaf or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return grad.t() @ x
    if weight.grad is None:
        weight.grad = grad.t() @ x
    else:
        weight.grad.addmm_(grad.t(), x)
    return None


@dataclass(frozen=True)
class _Part:
    """A linear layer, with an adapter or without: y = x W^T + b + scaling (x A^T) B^T."""

    weight: Tensor  # (out, in)
    bias: Tensor | None
    down: Tensor | None = None  # A (rank, in)
    up: Tensor | None = None  # B (out, rank)
    scaling: float = 1.0

    @classmethod
    def of(cls, module: nn.Module) -> _Part | None:
        """None where the module may do more than this says."""
        if type(module) is nn.Linear:
            return cls(module.weight, module.bias)
        if type(module) is not LoraLinear or type(module.base_layer) is not nn.Linear:
            return None
        layer: Any = module
        active = list(layer.active_adapters)
        plain = not layer.disable_adapters and not layer.merged and not layer.lora_variant
        if not plain or len(active) != 1 or active[0] not in layer.lora_A:
            return None
        name = active[0]
        down, up = layer.lora_A[name], layer.lora_B[name]
        if not isinstance(layer.lora_dropout[name], nn.Identity) or up.bias is not None:
            return None
        return cls(layer.base_layer.weight, layer.base_layer.bias, down.weight, up.weight, float(layer.scaling[name]))

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What gradients may go to."""
        return self.weight, self.bias, self.down, self.up


class _Linears(torch.autograd.Function):
    """Several linear layers of one x. With dy = dL/dy of each:

    dx = sum of (dy W + s (dy B) A),  dW = dy^T x,  dA = s (dy B)^T x,  dB = s dy^T (x A^T).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: list[_Part], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        del tensors  # they are the parts' own, given apart so that autograd sees them
        outputs: list[Tensor] = []
        thin: list[Tensor | None] = []
        for part in parts:
            output = F.linear(x, part.weight, part.bias)
            narrow = None
            if part.down is not None and part.up is not None:
                narrow = x @ part.down.t().to(x.dtype)
                output.addmm_(narrow, part.up.t().to(x.dtype), alpha=part.scaling)
            outputs.append(output)
            thin.append(narrow)
        ctx.save_for_backward(x, *thin)
        ctx.parts = parts
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *thin = ctx.saved_tensors
        grad_x: Tensor | None = None
        found: list[Tensor | None] = []
        for index, (part, grad, narrow) in enumerate(zip(ctx.parts, grads, thin, strict=True)):
            wants = ctx.needs_input_grad[2 + 4 * index : 6 + 4 * index]
            if ctx.needs_input_grad[0]:
                grad_x = _accumulate(grad_x, grad, part.weight)
            found.append(add_gradient(part.weight, grad, x) if wants[0] else None)
            found.append(grad.sum(dim=0) if wants[1] else None)
            if part.down is None or part.up is None:
                found += [None, None]
                continue
            narrow_grad = (grad @ part.up.to(grad.dtype)).mul_(part.scaling)
            if grad_x is not None:
                grad_x.addmm_(narrow_grad, part.down.to(grad.dtype))
            found.append((narrow_grad.t() @ x).to(part.down.dtype) if wants[2] else None)
            found.append((grad.t() @ narrow).mul_(part.scaling).to(part.up.dtype) if wants[3] else None)
        return (grad_x, None, *found)


def _accumulate(total: Tensor | None, grad: Tensor, weight: Tensor) -> Tensor:
    """total + grad W, in place where there is a total."""
    return grad @ weight if total is None else total.addmm_(grad, weight)


class _AddNorm(torch.autograd.Function):
    """`(x + change, RMS norm of it)`; without a change the first is x itself, and carries no gradient of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, change: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor | None, Tensor]:
        rows, width = x.shape
        x = x.contiguous()
        change = None if change is None else change.contiguous()
        added = x if change is None else torch.empty_like(x)
        normed = torch.empty_like(x)
        inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
        if rows:
            add_norm_kernel[(rows,)](
                x, x if change is None else change, weight, added, normed, inverse, width, epsilon,
                ADDS=change is not None, BLOCK=_power_of_two(width), num_warps=_warps(width),
            )  # fmt: skip
        ctx.save_for_backward(added, weight, inverse)
        ctx.adds = change is not None
        ctx.set_materialize_grads(False)
        return (None if change is None else added), normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_added: Tensor | None, grad_normed: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        added, weight, inverse = ctx.saved_tensors
        if grad_normed is None:
            return grad_added, grad_added if ctx.adds else None, None, None
        rows, width = added.shape
        grad_normed = grad_normed.contiguous()
        passes = grad_added is not None
        grad_added = grad_added.contiguous() if grad_added is not None else grad_normed
        programs = min(rows, NORM_PROGRAMS)
        wants_weight = ctx.needs_input_grad[2]
        partial = torch.empty(programs if wants_weight else 0, width, dtype=torch.float32, device=added.device)
        grad_x = torch.empty_like(added)
        if rows:
            add_norm_backward_kernel[(programs,)](
                grad_normed, grad_added, added, weight, inverse, grad_x, partial, rows, width,
                PASSES=passes, WEIGHTS=wants_weight, BLOCK=_power_of_two(width), num_warps=_warps(width),
            )  # fmt: skip
        grad_weight = partial.sum(dim=0).to(weight.dtype) if wants_weight else None
        return grad_x, grad_x if ctx.adds else None, grad_weight, None


class _Rotate(torch.autograd.Function):
    """A rotation; backward turns the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1.0), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, way: float) -> Tensor:
    rows, heads, width = x.shape
    if x.stride(2) != 1 or x.stride(1) != width:
        x = x.contiguous()
    turned = torch.empty(rows, heads, width, dtype=x.dtype, device=x.device)
    if rows:
        rotate_kernel[(rows,)](
            x, cos, sin, turned, heads, way, x.stride(0),
            HALF=width // 2, HALF_BLOCK=_power_of_two(width // 2), BLOCK=_power_of_two(heads), num_warps=4,
        )  # fmt: skip
    return turned


class _Gated(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _product(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        return _gate_gradients(gate, up, grad.clone(), None)


class _GatedDown(torch.autograd.Function):
    """(silu(gate) * up) W^T + b; the product is made again in the backward pass rather than kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.weight = weight
        return F.linear(_product(gate, up), weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        wants_weight, wants_bias = ctx.needs_input_grad[2:]
        product = torch.empty_like(gate) if wants_weight else None
        grad_gate, grad_up = _gate_gradients(gate, up, grad @ ctx.weight, product)
        grad_weight = None if product is None else add_gradient(ctx.weight, grad, product)
        return grad_gate, grad_up, grad_weight, grad.sum(dim=0) if wants_bias else None


def _product(gate: Tensor, up: Tensor) -> Tensor:
    product = torch.empty_like(gate)
    if gate.numel():
        gate_kernel[(-(-gate.numel() // GATE_BLOCK),)](gate, up, product, gate.numel(), BLOCK=GATE_BLOCK, num_warps=8)
    return product


def _gate_gradients(gate: Tensor, up: Tensor, grad: Tensor, product: Tensor | None) -> tuple[Tensor, Tensor]:
    """`(d gate, d up)`; `grad` is overwritten, and `product`, where there is one, filled."""
    grad_up = torch.empty_like(up)
    if gate.numel():
        gate_backward_kernel[(-(-gate.numel() // GATE_BLOCK),)](
            gate, up, grad, gate if product is None else product, grad_up, gate.numel(),
            AGAIN=product is not None, BLOCK=GATE_BLOCK, num_warps=8,
        )  # fmt: skip
    return grad, grad_up


class _Take(torch.autograd.Function):
    """x[places], each place at most once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return x.index_select(0, places)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.saved_tensors[0], grad), None


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _warps(width: int) -> int:
    """Warps for a row of so many numbers."""
    return max(1, min(16, _power_of_two(width) // 512))
