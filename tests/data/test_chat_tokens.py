"""Prompts as tokens, with and without a chat template."""

from __future__ import annotations

import pytest

from tether.data.chat import prompt_token_ids
from tether.hub.tiny_model import tiny_tokenizer
from tether.types import Message, Prompt

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TURNS = Prompt("p", (Message(role="system", content="be brief"), Message(role="user", content="hé?")))


def test_without_a_template_the_contents_are_joined_by_newlines():
    tokenizer = tiny_tokenizer()
    ids = prompt_token_ids(tokenizer, TURNS)
    assert type(ids) is list and all(type(id) is int for id in ids)
    assert tokenizer.decode(ids) == "be brief\nhé?"


def test_a_template_ends_where_the_answer_begins():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    ids = prompt_token_ids(tokenizer, TURNS)
    assert type(ids) is list and all(type(id) is int for id in ids)
    assert tokenizer.decode(ids) == "[system]be brief<|end|>[user]hé?<|end|>[assistant]"
    assert ids.count(tokenizer.eos_token_id) == 2  # the template's special tokens are tokens, not text


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("messages", [(), (Message(role="user", content=""),)])
def test_an_empty_prompt_is_named(template: str | None, messages: tuple[Message, ...]):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="prompt 'blank' is empty"):
        prompt_token_ids(tokenizer, Prompt("blank", messages))


def test_a_template_that_swallows_the_prompt_is_named():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if false %}{{ messages }}{% endif %}"
    with pytest.raises(ValueError, match="prompt 'p' has no tokens"):
        prompt_token_ids(tokenizer, TURNS)
