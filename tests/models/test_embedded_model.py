"""The embedded default model, for real: fetched once into the user's cache, then asked things."""

from __future__ import annotations

import pytest
import torch

from tether.hub.catalog import EMBEDDED, cached_model
from tether.models.load import LoadedModel, load_causal_lm
from tether.protocols import Sampling
from tether.rollout.native import NativeEngine
from tether.types import Prompt

NAME = "smollm2-135m"


@pytest.fixture(scope="module")
def smollm() -> LoadedModel:
    """Workers that ask at the same time wait for the one that fetches it."""
    return load_causal_lm(NAME, dtype="float32", device="cpu", seed=0)


def test_it_answers_a_factual_question(smollm: LoadedModel):
    prompt = Prompt.from_text("france", "What is the capital of France?")
    greedy = Sampling(max_new_tokens=24, temperature=0.0)
    [rollout] = NativeEngine(smollm).generate([prompt], greedy, samples_per_prompt=1, seed=0)
    assert "Paris" in rollout.completion
    assert rollout.finish == "stop", "the answer ends with the end token"


def test_its_text_is_likely_to_it(smollm: LoadedModel):
    """Wrong weights can still name Paris; a wrong rotary order or scale cannot read a paragraph at 3 nats a token."""
    text = "The sun rises in the east and sets in the west. Water boils at one hundred degrees and freezes at zero."
    ids = torch.tensor([smollm.tokenizer.encode(text)])
    with torch.no_grad():
        loss = smollm.model(input_ids=ids, labels=ids).loss.item()
    assert loss < 3.0


def test_its_shape_and_ids_are_those_of_smollm2_135m_instruct(smollm: LoadedModel):
    config = smollm.model.config
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (576, 30, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (9, 3, 49152)
    assert config.rope_parameters["rope_theta"] == 100000.0 and config.rms_norm_eps == 1e-5
    assert smollm.context_length == 8192
    assert sum(weight.numel() for weight in smollm.model.parameters()) == 134_515_008
    assert {weight.dtype for weight in smollm.model.parameters()} == {torch.float32}
    assert smollm.model.lm_head.weight is smollm.model.get_input_embeddings().weight
    tokenizer = smollm.tokenizer
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token)
    assert named == ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, len(tokenizer)) == (1, 2, 0, 49152)
    assert smollm.model.generation_config.eos_token_id == 2


def test_padding_is_not_the_end_token(smollm: LoadedModel):
    assert (smollm.end_id, smollm.pad_id) == (2, 0)
    assert any("pads with its end token" in notice for notice in smollm.notices)


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox, don't you know?",
        "naïve café, 日本語, русский, العربية, 🙂👩‍👩‍👧",
        "def f(x):\n    return x[1:23]  # tab\t\there\n\n\n",
        "3.14159 and 2024-02-29, ½ ² ٣٤ Ⅷ",
        "  leading and trailing  \r\n",
        "\x00\x7f\u200b\ufeff",
        "",
    ],
)
def test_text_comes_back(smollm: LoadedModel, text: str):
    ids = smollm.tokenizer.encode(text)
    assert smollm.tokenizer.decode(ids) == text
    assert smollm.tokenizer.encode(text, add_special_tokens=False) == ids, "nothing is added at either end"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1234567890", list("1234567890")),
        ("in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        ("a\n 6", ["a", "ĊĠ", "6"]),  # without digits set apart first, the newline and the space are two tokens
        ("x1y", ["x", "1", "y"]),
    ],
)
def test_digits_are_split_singly(smollm: LoadedModel, text: str, tokens: list[str]):
    assert smollm.tokenizer.tokenize(text) == tokens


def test_chat_template(smollm: LoadedModel):
    messages = [{"role": "user", "content": "Hi 42"}]
    shown = smollm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert shown == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm.tokenizer.encode(shown)
    assert ids.count(1) == 3 and ids.count(2) == 2, "control tokens are read whole"
    assert "<|" not in smollm.tokenizer.decode(ids, skip_special_tokens=True)


def test_what_the_listing_says_of_it_is_true(smollm: LoadedModel):
    found = cached_model(NAME)
    assert found is not None and found.licence == "Apache-2.0"
    assert found.size == pytest.approx(EMBEDDED[NAME].size, rel=0.01)
