"""Writing a model of the Llama family as a GGUF file, and comparing the file with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.errors import DataError
from tether.hub.gguf import TYPES, WrittenTensor, kind_for, open_gguf, write_gguf
from tether.hub.gguf_convert import BLOCK_WEIGHTS, WEIGHTS, read_weights, tokenizer_metadata, transformers_name
from tether.models.load import LoadedModel, embedding_count

# model_type of transformers -> llama.cpp's architecture; it runs Mistral's as llama.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
PAIRED = ("llama",)  # architectures in which rotary embedding turns neighbouring rows of q and k
ROPE_FREQUENCIES = "rope_freqs.weight"
ROPES = {"llama": ("default", "linear", "llama3"), "qwen2": ("default",), "qwen3": ("default",)}
QUANTIZATION_VERSION = 2
# What a stored weight may differ by, as a share of the largest of its block (Q8_0) or of itself (F16).
WITHIN = {"F32": 0.0, "F16": 2.0**-11, "Q8_0": 0.5 / 127 + 2.0**-11}
SMALLEST_HALF = 2.0**-24

NAMES = {target: name for name, target in WEIGHTS.items()}
BLOCK_NAMES = {target: name for name, target in BLOCK_WEIGHTS.items()}


@dataclass(frozen=True)
class Written:
    """A GGUF file that was read back."""

    path: Path
    type: str
    tensors: int
    size: int
    largest: float  # |difference| of a weight


def write_model(loaded: LoadedModel, path: Path, type_: str, name: str) -> Written:
    """Write the model, then read the file and compare every weight; `type_` is one of TYPES."""
    config = loaded.model.config
    architecture = architecture_of(config)
    weights = dict(_weights(loaded, architecture))
    metadata = _metadata(loaded, architecture, name, TYPES[type_].file_type)
    entries = [
        WrittenTensor(
            key, tuple(weight.shape), kind_for(tuple(weight.shape), TYPES[type_]), lambda weight=weight: weight
        )
        for key, weight in weights.items()
    ]
    write_gguf(path, metadata, entries)
    try:
        largest = _check(path, loaded, weights)
    except DataError:
        path.unlink(missing_ok=True)
        raise
    return Written(path, type_, len(weights), path.stat().st_size, largest)


def architecture_of(config: Any) -> str:
    """llama.cpp's name for the model's architecture; a model that it would run differently raises a DataError."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise DataError(f"--gguf: {config.model_type} models are not written as GGUF, only {', '.join(ARCHITECTURES)}")
    rope = rope_type(config)
    if rope not in ROPES[architecture]:
        known = ", ".join(ROPES[architecture])
        raise DataError(f"--gguf: the rotary embedding is of type {rope}, and {architecture} is written with {known}")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or (architecture != "llama" and "sliding_attention" in (getattr(config, "layer_types", None) or ())):
        raise DataError("--gguf: some layers of the model attend to a sliding window, which is not written as GGUF")
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        raise DataError(f"--gguf: the model's activation is {config.hidden_act}, and llama.cpp runs silu")
    return architecture


def rope_type(config: Any) -> str:
    """How positions are turned into angles."""
    return str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))


def heads_of(config: Any) -> dict[str, int]:
    """How many heads the rows of q and k are; empty where their order is transformers' own."""
    if ARCHITECTURES[config.model_type] not in PAIRED:
        return {}
    return {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads or config.num_attention_heads}


def pairs_from_halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from transformers' order, (0, d/2), (1, d/2 + 1), ..., to llama.cpp's, (0, 1), (2, 3), ..."""
    rows, rest = weight.shape[0], weight.shape[1:]
    return weight.reshape(heads, 2, rows // heads // 2, *rest).transpose(1, 2).reshape(rows, *rest)


def _weights(loaded: LoadedModel, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """(GGUF's name, weight) of every tensor."""
    config, heads = loaded.model.config, heads_of(loaded.model.config)
    for key, weight in loaded.model.state_dict().items():
        stem, _, ending = key.rpartition(".")
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        if stem.startswith("model.layers."):
            layer, _, part = stem.removeprefix("model.layers.").partition(".")
            short = BLOCK_NAMES.get(part)
            name = f"blk.{layer}.{short}" if short else None
            if short in heads:
                weight = pairs_from_halves(weight, heads[short])
        else:
            name = NAMES.get(stem)
        if name is None:
            raise DataError(f"--gguf: the model has a weight {key} that {architecture} has no place for")
        yield f"{name}.{ending}", weight
    factors = rope_factors(loaded.model)
    if factors is not None:
        yield ROPE_FREQUENCIES, factors


def rope_factors(model: Any) -> Tensor | None:
    """(head_dim / 2,) what each frequency is divided by; None where it is 1 throughout."""
    if rope_type(model.config) == "default":
        return None
    used = model.model.rotary_emb.inv_freq.detach().float().cpu()
    base = float(model.config.rope_parameters["rope_theta"])
    plain = base ** -(torch.arange(0, 2 * len(used), 2, dtype=torch.float32) / (2 * len(used)))
    return plain / used


def _metadata(loaded: LoadedModel, architecture: str, name: str, file_type: int) -> dict[str, Any]:
    config = loaded.model.config
    heads, width = config.num_attention_heads, config.hidden_size
    head = getattr(config, "head_dim", None) or width // heads
    context = config.max_position_embeddings
    if architecture == "llama" and getattr(config, "sliding_window", None):
        context = min(context, config.sliding_window)  # up to there a window changes nothing
    rows = embedding_count(loaded.model)
    own = {
        "block_count": config.num_hidden_layers,
        "context_length": context,
        "embedding_length": width,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads or heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": head,
        "rope.freq_base": float((config.rope_parameters or {}).get("rope_theta", 10000.0)),
        "vocab_size": rows,
    }
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.file_type": file_type,
        "general.quantization_version": QUANTIZATION_VERSION,
        **{f"{architecture}.{key}": value for key, value in own.items()},
        **tokenizer_metadata(loaded.tokenizer, rows),
        **({} if loaded.end_id == loaded.tokenizer.eos_token_id else {"tokenizer.ggml.eot_token_id": loaded.end_id}),
    }


def _check(path: Path, loaded: LoadedModel, weights: Mapping[str, Tensor]) -> float:
    """Read the file with Tether's reader; the largest difference of a weight. Raises where one is too far off."""
    gguf = open_gguf(path)
    found = read_weights(gguf, heads_of(loaded.model.config))
    expected = {name: weight for name, weight in loaded.model.state_dict().items() if name in found}
    missing = len(weights) - len(expected) - (ROPE_FREQUENCIES in weights)
    if missing or gguf.metadata["tokenizer.ggml.eos_token_id"] != loaded.tokenizer.eos_token_id:
        raise DataError(f"{path.name} does not read back as it was written: {missing} weights are missing")
    largest = 0.0
    kinds = {target: gguf.tensors[name].kind.name for name, target in gguf_names(gguf.tensors).items()}
    for name, weight in expected.items():
        wanted, got = weight.float().cpu(), found[name]
        apart = (wanted - got).abs()
        size = wanted.abs()
        if kinds[name] == "Q8_0":
            size = size.reshape(-1, 32).amax(dim=1, keepdim=True).expand(-1, 32).reshape(wanted.shape)
        allowed = WITHIN[kinds[name]] * size + (0.0 if kinds[name] == "F32" else SMALLEST_HALF * 128)
        if bool((apart > allowed).any()):
            largest = float(apart.max())
            raise DataError(f"{path.name} does not read back as it was written: {name} differs by {largest:.3g}")
        largest = max(largest, float(apart.max()))
    return largest


def gguf_names(tensors: Mapping[str, Any]) -> dict[str, str]:
    """GGUF's names of the weights that transformers has too -> transformers' names."""
    return {name: transformers_name(name) for name in tensors if name != ROPE_FREQUENCIES}
