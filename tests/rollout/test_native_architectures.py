"""Every kind of model goes through the engine with log-probs equal to a plain forward pass.

Kinds differ in positions (learned, rotary, ALiBi), in attention (full, sliding, grouped, linear), in their caches, and
in logits (soft-capped, more rows than the tokenizer has tokens).
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import PretrainedConfig

from tether.hub.tiny_model import tiny_tokenizer
from tether.models.load import LoadedModel, describe, disable_dropout
from tether.protocols import Sampling
from tether.rollout.native import NativeEngine
from tether.types import Prompt

COMMON = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": 256,
}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
KINDS: dict[str, PretrainedConfig] = {
    "gpt2": transformers.GPT2Config(
        vocab_size=258, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=257, eos_token_id=257
    ),
    "llama": transformers.LlamaConfig(**COMMON),
    "padded vocabulary": transformers.LlamaConfig(**COMMON | {"vocab_size": 320}),
    "qwen2": transformers.Qwen2Config(**COMMON),
    "qwen3": transformers.Qwen3Config(**COMMON),
    "gemma": transformers.GemmaConfig(**COMMON),
    "gemma2": transformers.Gemma2Config(**COMMON, **SLIDING),
    "gemma3": transformers.Gemma3TextConfig(**COMMON, **SLIDING),
    "mistral": transformers.MistralConfig(**COMMON, sliding_window=8),
    "olmo2": transformers.Olmo2Config(**COMMON),
    "bloom": transformers.BloomConfig(vocab_size=258, hidden_size=32, n_layer=2, n_head=4, eos_token_id=257),
    "qwen3.5 (linear attention)": transformers.Qwen3_5TextConfig(**COMMON, **LINEAR),
}

FLOAT32_ONLY = ("gemma2", "bloom")  # their mask is a number, which overflows when a float64 one meets float32


def build(config: PretrainedConfig) -> LoadedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # far from zero, so that every part shows in the logits
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    disable_dropout(model)
    return describe(model, tiny_tokenizer())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_agrees_with_its_plain_forward_pass(
    kind: str, prompts: list[Prompt], assert_matches_plain_forward, assert_same_rollouts
):
    loaded = build(KINDS[kind])
    sampling = Sampling(10, temperature=0.8, top_p=0.95, stop_token_ids=tuple(range(0, 256, 12)))
    rollouts = NativeEngine(loaded).generate(prompts, sampling, samples_per_prompt=2, seed=0)
    assert_matches_plain_forward(loaded.model, rollouts, sampling)
    if kind not in FLOAT32_ONLY:  # in float64, rounding is too small for batching to move a draw over a boundary
        loaded.model.double()
        rollouts = NativeEngine(loaded).generate(prompts, sampling, samples_per_prompt=2, seed=0)
    assert_same_rollouts(
        NativeEngine(loaded, max_num_seqs=1).generate(prompts, sampling, samples_per_prompt=2, seed=0), rollouts
    )
    assert len({rollout.response_length for rollout in rollouts}) > 2, "answers end at different steps"


def test_ids_past_the_tokenizer_stay_in_the_distribution(prompts: list[Prompt]):
    loaded = build(KINDS["padded vocabulary"])
    rollouts = NativeEngine(loaded).generate(prompts, Sampling(40), samples_per_prompt=1, seed=0)
    drawn = torch.cat([rollout.token_ids for rollout in rollouts])
    assert int(drawn.max()) >= len(loaded.tokenizer), "an untrained model draws them; the trainer sees the same"
    assert all(isinstance(rollout.completion, str) for rollout in rollouts)


def test_a_model_with_adapters(prompts: list[Prompt], assert_matches_plain_forward):
    plain = build(KINDS["llama"])
    adapted = get_peft_model(plain.model, LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # an adapter starts as the identity; make it matter
                parameter.normal_()
    disable_dropout(adapted)
    loaded = dataclasses.replace(plain, model=adapted)
    rollouts = NativeEngine(loaded).generate(prompts, Sampling(6), samples_per_prompt=2, seed=0)
    assert_matches_plain_forward(adapted, rollouts, Sampling(6))
    with adapted.disable_adapter():
        first = adapted(rollouts[0].token_ids[None]).logits
    assert not torch.allclose(first, adapted(rollouts[0].token_ids[None]).logits)


def test_a_model_without_a_cache_is_refused(prompts: list[Prompt]):
    loaded = build(KINDS["llama"])
    loaded.model.register_forward_hook(lambda _, __, output: output.__setattr__("past_key_values", None))
    with pytest.raises(ValueError, match="LlamaForCausalLM returns no cache"):
        NativeEngine(loaded).generate(prompts, Sampling(2), samples_per_prompt=1, seed=0)
