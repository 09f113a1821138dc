"""The decoder written for Llama-like models: the model's own logits, from the model's own parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from tether.accel import cpu_decoder
from tether.accel.cpu_decoder import CpuDecoder
from tether.accel.engine import disagreement, nats_apart
from tether.accel.supported import decoding_unsupported
from tether.hub.tiny_model import tiny_tokenizer
from tether.models.load import LoadedModel, describe, disable_dropout
from tether.protocols import Sampling
from tether.rollout.native import NativeEngine
from tether.types import Prompt

COMMON = {
    "vocab_size": 300,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}
LONG = {"rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 24}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG}
GEMMA = {"query_pre_attn_scalar": 5, "sliding_window": 4}  # caps and windows are so small that they show
KINDS: dict[str, PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**COMMON),
    "llama, tied": transformers.LlamaConfig(**COMMON | {"tie_word_embeddings": True}),
    "llama, biases": transformers.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "llama, one key head": transformers.LlamaConfig(**COMMON | {"num_key_value_heads": 1}),
    "llama, as many key heads": transformers.LlamaConfig(**COMMON | {"num_key_value_heads": 6}),
    "llama, gelu": transformers.LlamaConfig(**COMMON, hidden_act="gelu"),
    "llama, stretched": transformers.LlamaConfig(**COMMON, rope_parameters={"rope_type": "yarn", **LONG}),
    "llama 3": transformers.LlamaConfig(**COMMON, rope_parameters=LLAMA3),
    "mistral": transformers.MistralConfig(**COMMON, sliding_window=None),
    "mistral, wide window": transformers.MistralConfig(**COMMON, sliding_window=64),
    "mistral, narrow window": transformers.MistralConfig(**COMMON, sliding_window=5),
    "qwen2": transformers.Qwen2Config(**COMMON),
    "qwen2, windows": transformers.Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen2, tied": transformers.Qwen2Config(**COMMON | {"tie_word_embeddings": True}),
    "qwen3": transformers.Qwen3Config(**COMMON),
    "qwen3, biases": transformers.Qwen3Config(**COMMON, attention_bias=True),
    "gemma 2": transformers.Gemma2Config(**COMMON, **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    "gemma 2, no caps": transformers.Gemma2Config(
        **COMMON, **GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma 3": transformers.Gemma3TextConfig(**COMMON, **GEMMA, sliding_window_pattern=2),
    "olmo 2": transformers.Olmo2Config(**COMMON),
    "olmo 2, biases": transformers.Olmo2Config(**COMMON, attention_bias=True),
    "gemma 3, capped": transformers.Gemma3TextConfig(**COMMON, **GEMMA, final_logit_softcapping=5.0),
}
FLOAT32_ONLY = ("gemma 2", "gemma 2, no caps")  # a padded batch's mask is a number, which overflows in float64


def build(config: PretrainedConfig) -> LoadedModel:
    """Random weights in which every part, biases and norms too, shows in the logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(0.3 * torch.randn_like(parameter))
    disable_dropout(model)
    return describe(model, tiny_tokenizer())


def plain_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("multiple", [1, 16])  # whatever this processor likes best
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_gives_the_models_own_logits(kind: str, multiple: int):
    model = build(KINDS[kind]).model
    rows = [[5, 9, 250, 3], [7], list(range(40, 60)), [1, 2]]
    with torch.inference_mode():
        decoder = CpuDecoder(model, slots=4, length=32)
        decoder.column_multiple = multiple
        decoder.prefill([rows[2][:-1], rows[0][:-1], rows[3][:-1]], [2, 0, 3])  # the prompt of one token needs none
        for step in range(6):
            lengths = [len(row) for row in rows]
            tokens = torch.tensor([row[-1] for row in rows])
            logits = decoder.step(tokens, torch.tensor(lengths) - 1, max(lengths))
            for row, found in zip(rows, logits.t(), strict=True):
                assert torch.allclose(found, plain_logits(model, row), atol=2e-5), (step, len(row))
            for place, row in enumerate(rows):
                row.append((17 * step + place) % 300)


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_takes_the_fast_way_and_agrees_with_the_general_one(
    kind: str, prompts: list[Prompt], assert_matches_plain_forward, assert_same_rollouts
):
    loaded = build(KINDS[kind])
    sampling = Sampling(12, temperature=0.9, stop_token_ids=tuple(range(0, 256, 12)))
    engine = NativeEngine(loaded, max_num_seqs=5)
    rollouts = engine.generate(prompts, sampling, samples_per_prompt=3, seed=0)
    assert engine.notices == ()
    assert_matches_plain_forward(loaded.model, rollouts, sampling)
    if kind in FLOAT32_ONLY:
        return
    loaded.model.double()
    hook = loaded.model.register_forward_hook(lambda *_: None)  # any hook of a user's needs the general way
    general = NativeEngine(loaded)
    expected = general.generate(prompts, sampling, samples_per_prompt=3, seed=0)
    assert "forward hook" in general.notices[0]
    hook.remove()
    found = NativeEngine(loaded, max_num_seqs=5).generate(prompts, sampling, samples_per_prompt=3, seed=0)
    assert_same_rollouts(found, expected)


def test_weights_are_the_models_own_and_followed_when_they_change(prompts: list[Prompt], assert_matches_plain_forward):
    loaded = build(KINDS["qwen2, tied"])
    model, engine = loaded.model, NativeEngine(loaded)
    decoder = CpuDecoder(model, 1, 8)
    owned = {parameter.data_ptr() for parameter in model.parameters()}
    used = [decoder.head.weight, decoder.layers[1].gate.weight, decoder.layers[1].query.bias, decoder.norm.weight]
    assert all(tensor is not None and tensor.data_ptr() in owned for tensor in used)
    first = engine.generate(prompts, Sampling(8), samples_per_prompt=1, seed=0)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-2.0)  # in place
    model.model.layers[2].self_attn.q_proj.weight = nn.Parameter(torch.randn(48, 24))  # another tensor
    second = engine.generate(prompts, Sampling(8), samples_per_prompt=1, seed=0)
    assert any(not torch.equal(a.token_ids, b.token_ids) for a, b in zip(first, second, strict=True))
    assert_matches_plain_forward(model, second, Sampling(8))


def test_adapters_are_called(prompts: list[Prompt], assert_matches_plain_forward):
    plain = build(KINDS["qwen3, biases"])
    config = LoraConfig(r=2, target_modules=["q_proj", "o_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"])
    adapted = get_peft_model(plain.model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                parameter.normal_(std=0.2)
    disable_dropout(adapted)
    engine = NativeEngine(dataclasses.replace(plain, model=adapted))
    rollouts = engine.generate(prompts, Sampling(6), samples_per_prompt=2, seed=0)
    assert engine.notices == ()
    assert_matches_plain_forward(adapted, rollouts, Sampling(6))
    with adapted.disable_adapter():
        without = engine.generate(prompts, Sampling(6), samples_per_prompt=2, seed=0)
        assert_matches_plain_forward(adapted, without, Sampling(6))


def own_forward(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.forward = lambda x: x


REFUSED: dict[str, tuple[PretrainedConfig, Callable[[PreTrainedModel], object], str]] = {
    "another kind": (transformers.GemmaConfig(**COMMON), lambda _: None, "GemmaForCausalLM is not one of"),
    "dynamic positions": (
        transformers.LlamaConfig(**COMMON, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        lambda _: None,
        "depend on the length",
    ),
    "a hook": (
        KINDS["llama"],
        lambda model: model.model.layers[1].register_forward_pre_hook(lambda *_: None),
        r"model\.layers\.1 has a forward hook",
    ),
    "a forward pass of its own": (KINDS["llama"], own_forward, r"model\.layers\.1\.mlp has a forward pass of its own"),
    "half precision": (KINDS["llama"], lambda model: model.bfloat16(), "bfloat16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_it_is_not_written_for_take_the_general_way(case: str):
    config, change, reason = REFUSED[case]
    loaded = build(config)
    change(loaded.model)
    [notice] = NativeEngine(loaded).notices
    with pytest.raises(AssertionError, match=reason):  # a match with a readable failure
        raise AssertionError(notice)


def test_an_adapter_of_virtual_tokens_is_refused():
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)
    adapted = get_peft_model(build(KINDS["llama"]).model, config)
    assert "tokens of its own" in str(decoding_unsupported(adapted, adapted.get_base_model()))


def test_distributions_are_as_many_nats_apart_as_the_row_that_is_most():
    even, uneven = [0.0, 0.0], [math.log(3.0), 0.0]  # a half each, and three quarters and one
    expected = torch.tensor([even, uneven], dtype=torch.bfloat16)
    assert nats_apart(expected, expected) == pytest.approx(0.0, abs=1e-6)
    assert nats_apart(expected + 2.0, expected) == pytest.approx(0.0, abs=1e-2)  # the same distribution
    found = nats_apart(torch.tensor([uneven, uneven]), torch.tensor([even, uneven]))
    assert found == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), abs=1e-6)


def test_a_decoder_that_is_wrong_is_found_out(
    prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch, assert_matches_plain_forward
):
    loaded = build(KINDS["llama"])
    assert disagreement(loaded.model) is None
    monkeypatch.setattr(cpu_decoder, "rotate", lambda x, cos, sin: x * cos)
    engine = NativeEngine(loaded)
    assert "logits differ from the model's own" in engine.notices[0]
    assert_matches_plain_forward(
        loaded.model, engine.generate(prompts, Sampling(5), samples_per_prompt=1, seed=0), Sampling(5)
    )


def test_recorded_outputs_of_transformers_do_not_count_as_hooks():
    loaded = build(KINDS["llama"])
    loaded.model(torch.tensor([[1, 2]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in loaded.model.modules()), "the test needs such hooks"
    assert decoding_unsupported(loaded.model) is None


def test_logits_that_are_not_finite_name_the_prompt_and_step(prompts: list[Prompt]):
    loaded = build(KINDS["llama"])
    engine = NativeEngine(loaded, max_num_seqs=3)
    with torch.no_grad():
        loaded.model.lm_head.weight[3] = float("nan")
    with pytest.raises(FloatingPointError, match=r"not finite at step 0 of prompt 'prompt 3'"):
        engine.generate(prompts, Sampling(6), samples_per_prompt=1, seed=0)
