"""Tokenizers without a chat template get the tokenizer's own BOS: once, everywhere, and no EOS of its making."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from tether.data.chat import opening_ids, prompt_token_ids
from tether.data.examples import read_demonstrations, read_rankings, read_texts
from tether.data.rows import RowEncoder
from tether.hub.tiny_model import END_ID, tiny_model, tiny_tokenizer
from tether.models.load import describe
from tether.protocols import Sampling
from tether.rewards.model import RewardModelReward
from tether.rollout.native import NativeEngine
from tether.types import Prompt

BOS = 256  # the tiny tokenizer's other special token, <|pad|>, plays BOS here
ADDS = {"bos": "<|pad|> $A", "eos": "$A <|end|>", "both": "<|pad|> $A <|end|>", "neither": "$A"}


def adding(which: str):
    tokenizer = tiny_tokenizer()
    tokens = [("<|pad|>", 256), ("<|end|>", END_ID)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=ADDS[which], special_tokens=tokens)
    return tokenizer


@pytest.mark.parametrize("which", ADDS)
def test_only_what_stands_before_a_text_is_taken(which: str):
    first = [BOS] if which in ("bos", "both") else []
    tokenizer = adding(which)
    assert opening_ids(tokenizer) == first
    assert prompt_token_ids(tokenizer, Prompt.from_text("p", "hi")) == [*first, *tiny_tokenizer().encode("hi")]


def test_never_twice():
    tokenizer = adding("bos")
    written_out = prompt_token_ids(tokenizer, Prompt.from_text("p", "<|pad|>hi"))
    assert written_out == prompt_token_ids(tokenizer, Prompt.from_text("p", "hi")) and written_out.count(BOS) == 1
    tokenizer.chat_template = (
        "<|pad|>{% for m in messages %}{{ m['content'] }}{% endfor %}"  # a template brings its own
    )
    assert prompt_token_ids(tokenizer, Prompt.from_text("p", "hi")).count(BOS) == 1
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert prompt_token_ids(tokenizer, Prompt.from_text("p", "hi")).count(BOS) == 0


def test_the_same_tokens_in_rollouts_sft_rewards_and_text(tmp_path: Path):
    tokenizer = adding("both")
    loaded = describe(tiny_model(0), tokenizer)
    engine = NativeEngine(loaded)
    [rollout] = engine.generate([Prompt.from_text("p", "hi")], Sampling(4), samples_per_prompt=1, seed=0)
    before = rollout.token_ids[~rollout.response_mask].tolist()
    assert before == [BOS, *tiny_tokenizer().encode("hi")]

    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"prompt": "hi", "completion": "you", "chosen": "you", "rejected": "no"}) + "\n")
    encode = RowEncoder(tokenizer, END_ID, 100)
    wanted = [*before, *tiny_tokenizer().encode("you"), END_ID]
    [row] = read_demonstrations(str(path), encode)
    [ranking] = read_rankings(str(path), encode)
    assert row.tokens.tolist() == ranking.rows[0].tokens.tolist() == wanted

    scorer: Any = SimpleNamespace(vocabulary=loaded, model=None, trained_here=True)
    assert RewardModelReward.encode(scorer, Prompt.from_text("p", "hi"), "you", ended=True) == wanted

    (tmp_path / "t.jsonl").write_text('{"text": "hi"}\n')
    [text] = read_texts(str(tmp_path / "t.jsonl"), encode)
    assert text.tokens.tolist() == before and text.response_mask.tolist() == [False, True, True]
    [text] = read_demonstrations(str(tmp_path / "t.jsonl"), encode)
    assert text.tokens.tolist() == [*before, END_ID]
