"""The tiny tokenizer and model: bytes round-trip, seeds decide, the global random stream is untouched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tether.hub.tiny_model import END_ID, PAD_ID, VOCABULARY, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@given(st.text(max_size=40).filter(lambda text: "<|" not in text))
def test_any_text_round_trips_with_one_token_per_byte(text: str):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert max(ids, default=0) < PAD_ID
    assert TOKENIZER.decode(ids) == text


def test_special_tokens_are_distinct_and_skipped_in_text():
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, len(TOKENIZER)) == (PAD_ID, END_ID, VOCABULARY)
    ids = [*TOKENIZER.encode("hi", add_special_tokens=False), END_ID, PAD_ID]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "hi"


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = tiny_model(3).state_dict()
    torch.manual_seed(2)
    again, other = tiny_model(3).state_dict(), tiny_model(4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_the_global_random_stream_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny_model(0)
    assert torch.equal(torch.rand(3), expected)


def test_shape_dtype_and_untied_embeddings():
    model = tiny_model(0, layers=3, width=32, heads=2, context=99)
    assert len(model.model.layers) == 3
    assert model.config.max_position_embeddings == 99
    assert model.lm_head.weight.shape == (VOCABULARY, 32)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    with pytest.raises(ValueError, match="multiple of heads"):
        tiny_model(0, width=30, heads=4)
