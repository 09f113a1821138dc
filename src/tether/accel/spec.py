"""`DecoderSpec`: what a decoder computes, read once from a model's modules. The decoders and the training pass read it.

The equations of a layer, where every norm may be absent, act is SiLU or GELU, and R turns queries and keys to their
positions:

    a = norm(x),  q, k, v = R(norm(W_q a)), R(norm(W_k a)), W_v a
    x = x + norm(W_o attention(q, k, v)),  attention = softmax(cap tanh(scaling q·k / cap)) v over the window
    b = norm(x),  x = x + norm(W_d (act(W_g b) * W_u b))

The tensors are the model's own parameters. Nothing is copied, so an update in place is seen by whoever holds a spec.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from tether.accel.families import BACKBONES, CAUSAL_LMS, Family

Activation = Literal["silu", "gelu_tanh"]
Tables = dict[str | None, tuple[Tensor, Tensor]]  # cos and sin, by the name of a rotary table
Part = TypeVar("Part")


@dataclass(frozen=True)
class Norm:
    """y = x (offset + weight) / sqrt(mean x² + ε) over groups of as many features as the weight has."""

    weight: Tensor
    epsilon: float
    offset: float = 0.0


@dataclass(frozen=True)
class LoraAdapter:
    """Adds s (x Aᵀ) Bᵀ to what its layer makes of x.

    Its two products of a token's width are called thin, x Aᵀ, and narrow, s dy B: (N, rank) both.
    """

    down: Tensor  # A (rank, in)
    up: Tensor  # B (out, rank)
    scaling: float  # s

    @property
    def rank(self) -> int:
        """The number of features between A and B."""
        return self.down.shape[0]


@dataclass(frozen=True)
class Linear:
    """y = x Wᵀ + b + s (x Aᵀ) Bᵀ, the last for an adapter.

    `weight` is None where the module may do more than that: then only calling `module` is right.
    """

    module: nn.Module
    weight: Tensor | None  # (out, in)
    bias: Tensor | None = None
    adapter: LoraAdapter | None = None

    @classmethod
    def of(cls, module: Any) -> Linear:
        """Read a linear layer, with a LoRA adapter or without."""
        if type(module) is nn.Linear:
            return cls(module, module.weight, module.bias)
        unknown = cls(module, None)
        if type(module) is not LoraLinear or type(base := cast(Any, module).get_base_layer()) is not nn.Linear:
            return unknown
        names = [name for name in module.active_adapters if name in module.lora_A]
        if module.disable_adapters:  # a merged adapter is taken out of the weight by the next call
            return unknown if module.merged else cls(module, base.weight, base.bias)
        if module.merged or not names:
            return cls(module, base.weight, base.bias)
        adapter = _adapter(module, names)
        return unknown if adapter is None else cls(module, base.weight, base.bias, adapter)

    def __call__(self, x: Tensor) -> Tensor:
        """The module's own output."""
        return self.module(x)

    def tensors(self) -> list[Tensor]:
        """Every tensor it computes with."""
        adapter = () if self.adapter is None else (self.adapter.down, self.adapter.up)
        return [tensor for tensor in (self.weight, self.bias, *adapter) if tensor is not None]


def _adapter(module: Any, names: list[str]) -> LoraAdapter | None:
    """The module's adapter; None unless it is a single plain one."""
    name = names[0]
    dropout = module.lora_dropout[name]
    if len(names) > 1 or name in module.lora_variant or module.lora_bias.get(name):
        return None
    if dropout.training and not isinstance(dropout, nn.Identity):
        return None
    return LoraAdapter(module.lora_A[name].weight, module.lora_B[name].weight, float(module.scaling[name]))


@dataclass(frozen=True)
class Embedding:
    """x = scale · table[token], the scale rounded to the table's type as the model rounds it.

    `table` is None where the module may do more than that.
    """

    module: nn.Module
    table: Tensor | None  # (V, H)
    scale: float
    after_module: float  # the factor of the scale that the backbone applies to what the module gives

    @classmethod
    def of(cls, backbone: Any, family: Family) -> Embedding:
        """Some releases of transformers scale Gemma 2's embeddings in the backbone, others in the module."""
        module: Any = backbone.embed_tokens
        base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        own = getattr(base, "scalar_embed_scale", None)
        known = base is module and (type(module) is nn.Embedding or own is not None) and module.max_norm is None
        after = backbone.config.hidden_size**0.5 if family.scaled_embeddings and own is None else 1.0
        scale, after = (float(torch.tensor(x, dtype=base.weight.dtype)) for x in (own or 1.0, after))
        return cls(module, module.weight if known else None, scale * after, after)

    def __call__(self, tokens: Tensor) -> Tensor:
        """(..., H) the first layer's inputs."""
        found = self.module(tokens)
        return found if self.after_module == 1.0 else found * self.after_module


@dataclass(frozen=True)
class Layer:
    """One block; the module's docstring has its equations."""

    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    gate: Linear
    up: Linear
    down: Linear
    activation: Any  # the module
    activation_kind: Activation | None  # None for a function that no kernel computes
    head_dim: int
    scaling: float
    window: int | None  # how many tokens a token sees, itself counted; None: all before it
    score_cap: float | None  # a score s becomes cap · tanh(s / cap)
    rotary: str | None  # which of the rotary tables, where there are several

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linear layers, in the order they are computed."""
        return self.query, self.key, self.value, self.output, self.gate, self.up, self.down

    @property
    def norms(self) -> list[Norm]:
        """The norms that it has."""
        around = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return [norm for norm in (*around, self.query_norm, self.key_norm) if norm is not None]

    def tensors(self) -> list[Tensor]:
        """Every tensor it computes with."""
        return [norm.weight for norm in self.norms] + [tensor for part in self.linears for tensor in part.tensors()]


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder: its embedding, its layers, its final norm, and the output layer where the whole model was given."""

    embedding: Embedding
    layers: tuple[Layer, ...]
    final_norm: Norm | None  # None in a backbone that is cut off below its norm
    output: Linear | None  # None for a backbone alone
    logit_cap: float | None
    tied: bool  # whether the output layer's weight is the embedding's table
    hidden: int
    inner: int  # features of the gated product
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rotary: Any  # the module that computes angles
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def from_model(cls, model: Any) -> DecoderSpec:
        """Read a causal language model, or a backbone alone; `supported.py` says which."""
        whole = type(model) in CAUSAL_LMS
        backbone = model.model if whole else model
        family, config = BACKBONES[type(backbone)], backbone.config
        embedding = Embedding.of(backbone, family)
        output = Linear.of(model.lm_head) if whole else None
        table: Tensor = backbone.embed_tokens.weight
        weight: Tensor = model.lm_head.weight if whole else table
        layers = tuple(_layer(backbone, block, family) for block in backbone.layers)
        heads: int = config.num_attention_heads
        return cls(
            embedding=embedding,
            layers=layers,
            final_norm=_norm(backbone, "norm", family),
            output=output,
            logit_cap=getattr(config, "final_logit_softcapping", None),
            tied=whole and weight.data_ptr() == table.data_ptr(),
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_dim=layers[0].head_dim if layers else config.hidden_size // heads,
            vocabulary=weight.shape[0],
            rotary=backbone.rotary_emb,
            device=weight.device,
            dtype=weight.dtype,
        )

    def angles(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tables:
        """cos and sin, (N, D) each, of positions (N,), for each rotary table that the layers name."""
        like = torch.empty(0, dtype=dtype or self.dtype, device=positions.device)
        tables: Tables = {}
        for name in {layer.rotary: None for layer in self.layers}:
            named = () if name is None else (name,)
            cos, sin = self.rotary(like, positions[None], *named)
            tables[name] = cos[0], sin[0]
        return tables

    def trained(self) -> list[Tensor]:
        """The tensors of layers and the final norm that a gradient goes to."""
        own = [] if self.final_norm is None else [self.final_norm.weight]
        tensors = own + [tensor for layer in self.layers for tensor in layer.tensors()]
        return [tensor for tensor in tensors if tensor.requires_grad]

    def detached(self) -> DecoderSpec:
        """The same over tensors without gradients, which share the parameters' memory."""
        return _detached(self)


def rotary_kinds(backbone: Any) -> tuple[str, ...]:
    """How each of a backbone's rotary tables is made: default, linear, llama3, yarn, ..."""
    kinds = backbone.rotary_emb.rope_type
    return tuple(kinds.values()) if isinstance(kinds, dict) else (kinds,)


def _norm(owner: Any, name: str | None, family: Family) -> Norm | None:
    """The owner's norm of that name; what stands in a cut backbone where a norm was passes its input on."""
    module = None if name is None else getattr(owner, name)
    if module is None or isinstance(module, nn.Identity):
        return None
    return Norm(module.weight, getattr(module, family.epsilon), family.offset)


def read_layer(backbone: Any, index: int) -> Layer:
    """One block as it is now: gathering its weights makes new tensors."""
    return _layer(backbone, backbone.layers[index], BACKBONES[type(backbone)])


def _layer(backbone: Any, block: Any, family: Family) -> Layer:
    attention, mlp = block.self_attn, block.mlp
    windows = {None: None, "config": backbone.config, "attention": attention}
    act = mlp.act_fn
    gelu: Activation | None = "gelu_tanh" if isinstance(act, GELUTanh) else None
    return Layer(
        before_attention=_norm(block, family.before_attention, family),
        after_attention=_norm(block, family.after_attention, family),
        before_mlp=_norm(block, family.before_mlp, family),
        after_mlp=_norm(block, family.after_mlp, family),
        query=Linear.of(attention.q_proj),
        key=Linear.of(attention.k_proj),
        value=Linear.of(attention.v_proj),
        output=Linear.of(attention.o_proj),
        query_norm=_norm(attention, "q_norm", family) if family.query_key_norms else None,
        key_norm=_norm(attention, "k_norm", family) if family.query_key_norms else None,
        gate=Linear.of(mlp.gate_proj),
        up=Linear.of(mlp.up_proj),
        down=Linear.of(mlp.down_proj),
        activation=act,
        activation_kind="silu" if isinstance(act, nn.SiLU | SiLUActivation) else gelu,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        window=getattr(windows[family.window], "sliding_window", None),
        score_cap=attention.attn_logit_softcapping if family.score_cap else None,
        rotary=attention.layer_type if isinstance(backbone.rotary_emb.rope_type, dict) else None,
    )


def _detached(part: Part) -> Part:
    if isinstance(part, Tensor):
        return cast("Part", part.detach())
    if isinstance(part, tuple):
        return cast("Part", tuple(map(_detached, cast("tuple[Any, ...]", part))))
    if isinstance(part, Norm | LoraAdapter | Linear | Embedding | Layer | DecoderSpec):
        fields = {field.name: _detached(getattr(part, field.name)) for field in dataclasses.fields(part)}
        return cast("Part", dataclasses.replace(part, **fields))
    return part


def fingerprint(model: nn.Module) -> tuple[object, ...]:
    """Where the model's parameters lie and which adapters act: while this stays the same, so does its spec."""
    acting = [
        (tuple(module.active_adapters), module.disable_adapters, tuple(module.merged_adapters), *module.scaling.items())
        for module in model.modules()
        if isinstance(module, LoraLayer)
    ]
    return tuple(parameter.data_ptr() for parameter in model.parameters()), *acting
