"""Tiny random models of many families, built by transformers without a download, each in a folder with a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tether.hub.tiny_model import END_ID, PAD_ID, tiny_tokenizer

VOCABULARY = 264  # a few more rows than the tokenizer has tokens, like most released models
CHAT = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STANDARD: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Family:
    """How to build a tiny model of a family: its config class in transformers and the arguments."""

    config: str
    given: dict[str, Any] = field(default_factory=dict)
    standard: bool = True  # uses the usual argument names for sizes
    chat: bool = True  # its tokenizer gets a chat template

    def options(self) -> dict[str, Any]:
        """The arguments of the config class."""
        return (
            (STANDARD if self.standard else {})
            | {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
            | self.given
        )


GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig"),
    "mistral": Family("MistralConfig", {"sliding_window": 128}),
    "qwen2": Family("Qwen2Config"),
    "qwen3": Family("Qwen3Config"),
    "gemma": Family("GemmaConfig"),
    "gemma2": Family("Gemma2Config", {"query_pre_attn_scalar": 16, "sliding_window": 32}),
    "gemma3_text": Family("Gemma3TextConfig", {"query_pre_attn_scalar": 16, "sliding_window": 32}),
    "phi": Family("PhiConfig", chat=False),
    "phi3": Family("Phi3Config"),
    "gpt2": Family("GPT2Config", GPT2, standard=False, chat=False),
    "gpt_bigcode": Family("GPTBigCodeConfig", GPT2, standard=False, chat=False),
    "gptj": Family("GPTJConfig", GPT2 | {"rotary_dim": 8}, standard=False, chat=False),
    "gpt_neo": Family(
        "GPTNeoConfig",
        {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 256,
        },
        standard=False,
        chat=False,
    ),
    "gpt_neox": Family("GPTNeoXConfig", chat=False),
    "opt": Family("OPTConfig", {"ffn_dim": 128, "word_embed_proj_dim": 64}, chat=False),
    "bloom": Family("BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 4}, standard=False, chat=False),
    "mpt": Family(
        "MptConfig", {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}, standard=False, chat=False
    ),
    "falcon": Family(
        "FalconConfig",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256},
        standard=False,
        chat=False,
    ),
    "olmo": Family("OlmoConfig"),
    "olmo2": Family("Olmo2Config"),
    "olmo3": Family("Olmo3Config", {"sliding_window": 32}),
    "stablelm": Family("StableLmConfig"),
    "starcoder2": Family("Starcoder2Config", {"sliding_window": None}, chat=False),
    "cohere": Family("CohereConfig"),
    "cohere2": Family("Cohere2Config", {"sliding_window": 32}),
    "granite": Family(
        "GraniteConfig", {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0}
    ),
    "smollm3": Family("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "glm4": Family("Glm4Config"),
    "nemotron": Family("NemotronConfig"),
    "exaone4": Family("Exaone4Config", {"sliding_window": 32}),
    "mixtral": Family("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": Family("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3_moe": Family("Qwen3MoeConfig", EXPERTS),
    "gpt_oss": Family(
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "mamba": Family(
        "MambaConfig", {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}, standard=False, chat=False
    ),
    "rwkv": Family(
        "RwkvConfig", {"hidden_size": 64, "num_hidden_layers": 2, "context_length": 256}, standard=False, chat=False
    ),
}


def save_family(name: str, folder: Path) -> str | None:
    """Save a tiny model of the family with a tokenizer; returns the reason where it cannot be built."""
    family = FAMILIES[name]
    kind = getattr(transformers, family.config, None)
    if kind is None:
        return f"transformers {transformers.__version__} has no {family.config}"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT if family.chat else None  # pyright: ignore[reportAttributeAccessIssue]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(kind(**family.options()))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # with fresh weights the logits hardly differ, and a fault would stay hidden
                parameter.mul_(5.0)
    model.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return None
