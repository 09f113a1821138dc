"""Rows that are too long are cut at the end of a paragraph, and an answer that was cut did not end there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tether.data.examples import RowEncoder, collate_rows, read_demonstrations, read_rankings
from tether.data.prompts import cut_end, cut_middle
from tether.errors import DataError
from tether.hub.tiny_model import END_ID, tiny_model, tiny_tokenizer
from tether.models.load import describe
from tether.types import Message

THREE = "one\n\ntwo two \n  three"


def at_most(length: int):
    return lambda text: len(text) <= length


@pytest.mark.parametrize(
    ("length", "left"),
    [(2, None), (3, "one"), (11, "one"), (12, "one\n\ntwo two"), (19, "one\n\ntwo two"), (99, "one\n\ntwo two")],
)
def test_an_end_is_cut_between_paragraphs(length: int, left: str | None):
    assert cut_end(THREE, at_most(length)) == left


@pytest.mark.parametrize(("length", "left"), [(11, None), (12, "one \n  three"), (99, "one\n\ntwo two \n  three")])
def test_a_middle_is_cut_and_the_last_paragraph_stays(length: int, left: str | None):
    found = cut_middle("one\n\ntwo two\n\nmore \n  three", at_most(length))
    assert found == left


@pytest.mark.parametrize("text", ["", "one", "\n\none\n", "one paragraph, however long"])
def test_one_paragraph_cannot_be_cut(text: str):
    assert cut_end(text, at_most(99)) is None and cut_middle(text, at_most(99)) is None


@given(st.lists(st.text("ab \t", min_size=1), max_size=8), st.integers(0, 30))
def test_the_longest_cut_that_fits_is_taken(lines: list[str], length: int):
    text = "\n".join(lines)
    whole = [line for line in lines if line.strip()]
    found = cut_end(text, at_most(length))
    if found is not None:
        assert text.startswith(found) and len(found) <= length and found == found.rstrip()
        assert text[len(found) :].lstrip(" \t").startswith("\n") and text[len(found) :].strip()
    beginnings = [text[: place + 1] for place, mark in enumerate(text) if mark.strip()]
    ends = [start for start in beginnings if text[len(start) :].lstrip(" \t").startswith("\n")]
    fitting = [end for end in ends if len(end) <= length and text[len(end) :].strip()]
    assert found == (fitting[-1] if fitting else None)
    middle = cut_middle(text, at_most(length))
    if middle is not None:
        assert len(middle) <= length and middle.rstrip().endswith(whole[-1].strip())
        assert middle.lstrip().startswith(whole[0].strip())


# -- rows


def encoder(max_length: int, **options) -> RowEncoder:
    return RowEncoder(tiny_tokenizer(), END_ID, max_length, **options)


def user(text: str) -> tuple[Message, ...]:
    return (Message(role="user", content=text),)


def said(row) -> tuple[str, str, bool]:
    """(prompt, answer, whether its end token is learned)."""
    tokens = row.tokens.tolist()
    ended = tokens[-1] == END_ID
    decode = tiny_tokenizer().decode
    return decode(tokens[: row.prompt_length]), decode(tokens[row.prompt_length : len(tokens) - ended]), ended


def test_a_row_that_fits_is_left_alone():
    encode = encoder(len("ask") + len("a\nb") + 1)
    assert said(encode(user("ask"), "a\nb", "here", "completion")) == ("ask", "a\nb", True)
    assert not encode.cut


def test_a_cut_answer_does_not_learn_to_end():
    encode = encoder(12)
    assert said(encode(user("ask"), "first\nsecond part", "here", "completion")) == ("ask", "first", False)
    assert encode.cut == {"answer": 1}


def test_a_long_post_is_cut_and_its_question_kept():
    encode = encoder(30)
    post = "TITLE: x\npost post post\nmore more more\nTL;DR:"
    assert said(encode(user(post), "sum", "here", "completion")) == ("TITLE: x\nTL;DR:", "sum", True)
    assert encode.cut == {"prompt": 1}


def test_the_other_is_cut_where_the_longer_has_no_paragraphs():
    assert said(encoder(16)(user("a\nbb\nc"), "w" * 11, "here", "completion")) == ("a\nc", "w" * 11, True)
    assert said(encoder(16)(user("w" * 12), "a\nlonger", "here", "completion")) == ("w" * 12, "a", False)


def test_answers_of_one_prompt_keep_one_prompt():
    encode = encoder(20)
    rows = encode.rows(user("a\npost post post\nc"), ["short", "longer answer"], "here", "answers")
    assert [said(row) for row in rows] == [("a\nc", "short", True), ("a\nc", "longer answer", True)]
    rows = encode.rows(user("ask"), ["short", "one\n" + "two " * 5], "here", "answers")
    assert [said(row) for row in rows] == [("ask", "short", True), ("ask", "one", False)]


@pytest.mark.parametrize(
    ("truncate", "repair"), [(True, "no paragraph end fits"), (False, "shorten it, set data.truncate")]
)
def test_what_cannot_be_cut_is_refused(truncate: bool, repair: str):
    text = "word " * 10 if truncate else "word\n" * 10
    with pytest.raises(DataError, match=rf"here: field 'completion' makes a row of .* data.max_length = 20: {repair}"):
        encoder(20, truncate=truncate)(user("ask"), text, "here", "completion")


def test_what_was_cut_is_told_once_for_each_file(tmp_path: Path):
    told: list[str] = []
    encode = encoder(12, notify=told.append)
    path = tmp_path / "d.jsonl"
    records = [{"prompt": "ask", "completion": text} for text in ("fits", "first\nsecond part", "first\nthird part")]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert len(read_demonstrations(str(path), encode)) == 3
    assert told == [f"{path}: 2 answers cut at a paragraph end, to fit data.max_length = 12"]
    path.write_text(json.dumps({"prompt": "ask", "chosen": "yes", "rejected": "no"}) + "\n")
    assert len(read_rankings(str(path), encode)) == 1 and len(told) == 1


def test_truncation_is_a_setting_of_the_recipe(tmp_path: Path, capsys):
    from tether.config.load import load_recipe
    from tether.train.build import build_supervised, load_policy

    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"prompt": "ask", "completion": "first\n" + "second " * 9}) + "\n")
    flags = ["--data.train", str(path), "--data.max_length", "20"]
    recipe = load_recipe("sft", None, flags)
    build_supervised(recipe, load_policy(recipe))
    assert "1 answer cut at a paragraph end" in capsys.readouterr().err
    recipe = load_recipe("sft", None, [*flags, "--data.truncate", "false"])
    with pytest.raises(DataError, match=r"set data\.truncate"):
        build_supervised(recipe, load_policy(recipe))


# -- the end token


def test_the_end_is_learned_where_the_tokenizer_pads_with_it():
    words = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "ask": 2, "yes": 3, "it": 4, "is": 5}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="</s>", unk_token="<s>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    loaded = describe(tiny_model(0), tokenizer)
    assert loaded.pad_id != loaded.end_id == 1 and "pads with its end token" in loaded.notices[0]
    encode = RowEncoder(loaded.tokenizer, loaded.end_id, 32)
    rows = [encode(user("ask"), answer, "here", "completion") for answer in ("yes", "yes it is")]
    batch = collate_rows(rows, loaded.pad_id)
    assert batch.tokens[0].tolist() == [2, 3, 1, loaded.pad_id, loaded.pad_id]
    assert batch.tokens[batch.response_mask].tolist() == [3, 1, 3, 4, 5, 1]  # both ends are learned, and no padding
