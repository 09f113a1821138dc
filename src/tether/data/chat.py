"""Conversations as tokens."""

from __future__ import annotations

from typing import Any, Protocol

from tether.errors import DataError
from tether.types import Prompt


class Encoder(Protocol):
    """What is asked of a tokenizer; where it has a `chat_template`, also `apply_chat_template`."""

    def encode(self, text: Any, *, add_special_tokens: bool = ...) -> list[int]:
        """The ids of `text`."""
        ...


def prompt_token_ids(tokenizer: Encoder, prompt: Prompt) -> list[int]:
    """The prompt's token ids, up to the place where the answer begins.

    With the tokenizer's own chat template where it has one (which brings its special tokens itself); otherwise the
    contents of the messages joined by newlines, with no special tokens.
    """
    if not any(message["content"] for message in prompt.messages):
        raise DataError(f"prompt {prompt.id!r} is empty: give it at least one message with content")
    if getattr(tokenizer, "chat_template", None):
        messages = [dict(message) for message in prompt.messages]
        template: Any = tokenizer
        ids = template.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    else:
        text = "\n".join(message["content"] for message in prompt.messages)
        ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise DataError(f"prompt {prompt.id!r} has no tokens: give it content that the tokenizer and template keep")
    return list(ids)
