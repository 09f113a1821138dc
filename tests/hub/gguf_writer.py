"""Writes small GGUF files, straight from the format's description and with no code of the reader."""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tether.hub.tiny_model import tiny_tokenizer

HEADS, KV_HEADS = 4, 2
U32, F32, BOOL, STRING, ARRAY, U64, I32 = 4, 6, 7, 8, 9, 10, 5


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value(item: object) -> bytes:
    """Type and value of a metadata entry, by its Python type."""
    if isinstance(item, bool):
        return struct.pack("<I?", BOOL, item)
    if isinstance(item, int):
        return struct.pack("<II", U32, item)
    if isinstance(item, float):
        return struct.pack("<If", F32, item)
    if isinstance(item, str):
        return struct.pack("<I", STRING) + text(item)
    assert isinstance(item, list)
    if all(isinstance(each, str) for each in item):
        return struct.pack("<IIQ", ARRAY, STRING, len(item)) + b"".join(text(each) for each in item)
    return struct.pack(f"<IIQ{len(item)}i", ARRAY, I32, len(item), *item)


def write_gguf(
    path: Path, metadata: dict[str, object], tensors: dict[str, tuple[int, tuple[int, ...], bytes]], version: int = 3
) -> Path:
    """`tensors` are name: (number of the kind, shape as in torch, data)."""
    alignment = metadata.get("general.alignment", 32)
    assert isinstance(alignment, int)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(key) + value(item) for key, item in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        data += bytes(-len(data) % alignment)
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data))
        data += raw
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path


def tiny_llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        rms_norm_eps=1e-5,
    )
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():  # norms too, so that none can be swapped for another unseen
        torch.nn.init.normal_(weight, 0.5 if weight.ndim == 1 else 0.0, 0.3)
    return model


def as_gguf(path: Path, model: LlamaForCausalLM) -> Path:
    """As llama.cpp's converter writes it: rows of q and k in pairs, float32 throughout."""
    blocks = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    tensors = {}
    for key, weight in model.state_dict().items():
        stem = key.removesuffix(".weight")
        if stem == "lm_head" and model.config.tie_word_embeddings:
            continue
        if stem.startswith("model.layers."):
            layer, _, part = stem.removeprefix("model.layers.").partition(".")
            stem = f"blk.{layer}.{blocks[part]}"
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(blocks[part])
            if heads:
                rows, columns = weight.shape
                weight = weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        else:
            stem = names[stem]
        data = struct.pack(f"<{weight.numel()}f", *weight.flatten().tolist())
        tensors[f"{stem}.weight"] = (0, tuple(weight.shape), data)
    letters = [token for token, _ in sorted(tiny_tokenizer().get_vocab().items(), key=lambda pair: pair[1])][:256]
    return write_gguf(
        path,
        {
            "general.architecture": "llama",
            "llama.block_count": 2,
            "llama.context_length": 64,
            "llama.embedding_length": 32,
            "llama.feed_forward_length": 48,
            "llama.attention.head_count": HEADS,
            "llama.attention.head_count_kv": KV_HEADS,
            "llama.rope.freq_base": 500.0,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": [*letters, "<end>", "<unk>", "he"],
            "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 1],
            "tokenizer.ggml.merges": ["h e"],
            "tokenizer.ggml.eos_token_id": 256,
            "tokenizer.ggml.unknown_token_id": 257,
        },
        tensors,
    )
