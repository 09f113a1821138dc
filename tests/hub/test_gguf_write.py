"""Writing GGUF: each family's names and order of rows, against transformers' own loading; blocks against gguf's own."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tether.errors import DataError
from tether.hub.gguf import F16, Q8_0, encode, open_gguf
from tether.hub.gguf_convert import SPLITS, pre_tokenizer_name, tokenizer_metadata
from tether.hub.tiny_model import tiny_tokenizer
from tether.models.gguf_export import architecture_of, rope_factors, write_model
from tether.models.load import describe

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 257,
    "pad_token_id": 256,
    "bos_token_id": None,
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, head_dim=16, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    # transformers reads no head_dim of Qwen3 from a file, and takes 128, which all of that family have
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=128)),
}


def model_of(family: str):
    torch.manual_seed(2)
    model = FAMILIES[family]().eval()
    for weight in model.parameters():  # norms and biases too, so that none can be swapped for another unseen
        torch.nn.init.normal_(weight, 0.5 if weight.ndim == 1 else 0.0, 0.3)
    return describe(model, tiny_tokenizer())


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_loads_back_in_transformers(tmp_path: Path, family: str):
    loaded = model_of(family)
    written = write_model(loaded, tmp_path / "m.gguf", "f32", f"tiny-{family}")
    assert written.largest == 0.0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    assert theirs.config.model_type in (family, "llama"), "llama.cpp, and so the file, calls Mistral llama"
    ids = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, loaded.model(ids).logits, atol=2e-4, rtol=1e-5)
    types = open_gguf(tmp_path / "m.gguf").metadata["tokenizer.ggml.token_type"]
    assert types[:256] == [1] * 256 and types[256:258] == [3, 3] and set(types[258:]) == {5}, "normal, control, unused"


@pytest.mark.parametrize(("kind", "name"), [(F16, "F16"), (Q8_0, "Q8_0")])
def test_blocks_are_those_of_llama_cpp(kind: int, name: str):
    values = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    values[0, :32] = 0.0
    theirs = quants.quantize(values.numpy().astype(np.float32), GGMLQuantizationType[name])
    assert encode(values, kind) == theirs.tobytes()


def test_what_cannot_be_written_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="only llama, mistral, qwen2, qwen3"):
        architecture_of(GPT2Config())
    with pytest.raises(DataError, match="yarn"):
        architecture_of(Qwen2Config(**SMALL, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}))
    with pytest.raises(DataError, match="not finite"):
        encode(torch.tensor([[float("nan")]]), 0)
    with pytest.raises(DataError, match="65504"):
        encode(torch.tensor([[1e6]]), F16)
    with pytest.raises(DataError, match="no name here"):
        pre_tokenizer_name({"pre_tokenizer": {"type": "Whitespace"}})


def test_scaled_rotary_frequencies_are_written_as_factors():
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(**SMALL, rope_parameters=rope | {"original_max_position_embeddings": 64})
    factors = rope_factors(LlamaForCausalLM(config))
    assert factors is not None and factors.shape == (8,) and factors.min() >= 0.999 and factors.max() <= 8.001
    assert factors[0] == pytest.approx(1.0) and factors[-1] == pytest.approx(8.0, rel=1e-3)
    plain = LlamaForCausalLM(
        LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})
    )
    assert torch.allclose(rope_factors(plain), torch.full((8,), 4.0))


def byte_level(split: str | None) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={token: id for id, token in enumerate([*alphabet, "he"])}, merges=[("h", "e")])
    )
    steps = (
        [pre_tokenizers.Split(Regex(split), "isolated")] if split else [pre_tokenizers.Digits(individual_digits=True)]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    )
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>")


def test_pre_tokenizers_have_llama_cpps_names():
    for split, name in {**SPLITS, None: "smollm"}.items():
        found = tokenizer_metadata(byte_level(split), 300)
        assert found["tokenizer.ggml.pre"] == name and found["tokenizer.ggml.merges"] == ["h e"]
        assert found["tokenizer.ggml.add_bos_token"] is False and len(found["tokenizer.ggml.tokens"]) == 300


def test_sentencepiece_scores_follow_the_merges():
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]
    merges = [("a", "b"), ("▁", "ab")]
    model = models.BPE({token: id for id, token in enumerate(vocab)}, merges, byte_fallback=True, unk_token="<unk>")
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    found = tokenizer_metadata(tokenizer, len(vocab))
    assert found["tokenizer.ggml.model"] == "llama" and found["tokenizer.ggml.add_space_prefix"] is True
    assert found["tokenizer.ggml.scores"][-2:] == [0.0, -1.0] and found["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    assert json.dumps(found)
