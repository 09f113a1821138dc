"""Conversations as tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from tether.data.chat_template import TemplateRefusedError, render
from tether.errors import DataError
from tether.types import Message, Prompt


class Encoder(Protocol):
    """What is asked of a tokenizer; where it has a `chat_template`, also `apply_chat_template`."""

    def encode(self, text: Any, *, add_special_tokens: bool = ...) -> list[int]:
        """The ids of `text`."""
        ...


def prompt_token_ids(tokenizer: Encoder, prompt: Prompt) -> list[int]:
    """The prompt's token ids, up to the place where the answer begins.

    With the tokenizer's own chat template where it has one (which brings its special tokens itself); otherwise the
    contents of the messages joined by newlines, after the tokens that the tokenizer itself puts before a text (BOS).
    """
    if not any(message["content"] or message.get("tool_calls") for message in prompt.messages):
        raise DataError(f"prompt {prompt.id!r} is empty: give it at least one message with content")
    if has_template(tokenizer):
        ids = _templated(tokenizer, prompt, tokenize=True)
    else:
        ids = text_token_ids(tokenizer, plain_text(prompt))
    if not ids:
        raise DataError(f"prompt {prompt.id!r} has no tokens: give it content that the tokenizer and template keep")
    return list(ids)


def text_token_ids(tokenizer: Encoder, text: str) -> list[int]:
    """The ids of a text that begins a row: BOS first where the tokenizer adds one, never twice, and nothing after."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    first = opening_ids(tokenizer)
    return ids if ids[: len(first)] == first else [*first, *ids]


def opening_ids(tokenizer: Encoder) -> list[int]:
    """What the tokenizer puts before a text by itself: its BOS token, or nothing.

    Read off what it really does, for `add_bos_token` is not set by all that add one.
    """
    plain = list(tokenizer.encode("a", add_special_tokens=False))
    whole = list(tokenizer.encode("a", add_special_tokens=True))
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start]
    return []


def has_template(tokenizer: Any) -> bool:
    """Whether conversations are written by the tokenizer's own template."""
    return bool(getattr(tokenizer, "chat_template", None))


def plain_text(prompt: Prompt) -> str:
    """The prompt of a tokenizer without a template."""
    if prompt.tools or any("tool_calls" in message for message in prompt.messages):
        raise DataError(f"prompt {prompt.id!r} has tools, which need a model with a chat template that writes them")
    return "\n".join(message["content"] for message in prompt.messages)


def prompt_text(tokenizer: Any, prompt: Prompt, *, answered: bool = False) -> str:
    """The prompt as text; `answered`: without the beginning of a turn that follows."""
    if not has_template(tokenizer):
        return plain_text(prompt)
    return _templated(tokenizer, prompt, tokenize=False, add_generation_prompt=not answered)


def _templated(tokenizer: Any, prompt: Prompt, *, tokenize: bool, add_generation_prompt: bool = True) -> Any:
    messages: list[Message] = [message.copy() for message in prompt.messages]
    if prompt.tools or any("tool_calls" in message for message in messages):
        _check_tools(tokenizer, prompt)
    return _apply(tokenizer, prompt, messages, tokenize=tokenize, add_generation_prompt=add_generation_prompt)


def _check_tools(tokenizer: Any, prompt: Prompt) -> None:
    """Refuse a template that leaves tools or calls of them out: what is learned would be an empty turn."""

    def text(tools: tuple[dict[str, Any], ...], *, calls: bool) -> str:
        turns = [turn.copy() for turn in prompt.messages]
        for turn in turns if not calls else ():
            turn.pop("tool_calls", None)
        return _apply(tokenizer, replace(prompt, tools=tools), turns, tokenize=False)

    whole = text(prompt.tools, calls=True)
    has_calls = any("tool_calls" in turn for turn in prompt.messages)
    for what, there, without in (("tools", prompt.tools, ((), True)), ("tool calls", has_calls, (prompt.tools, False))):
        if there and text(without[0], calls=without[1]) == whole:
            raise DataError(
                f"prompt {prompt.id!r} has {what}, which the model's chat template leaves out: use a model whose "
                "template writes them, or remove them from the records"
            )


def _apply(
    tokenizer: Any, prompt: Prompt, messages: list[Message], *, tokenize: bool, add_generation_prompt: bool = True
) -> Any:
    options: dict[str, Any] = {"tools": list(prompt.tools)} if prompt.tools else {}
    options |= {**prompt.template_kwargs, "add_generation_prompt": add_generation_prompt}
    try:
        return render(tokenizer, list(messages), tokenize=tokenize, **options)
    except TemplateRefusedError as error:
        raise DataError(f"prompt {prompt.id!r}: {error}") from None
    except (MemoryError, OSError):
        raise
    except Exception as error:  # a template is a program of the model's, and may raise anything
        reason = str(error).partition("\n")[0][:300] or type(error).__name__
        raise DataError(
            f"prompt {prompt.id!r}: the model's chat template does not take this conversation ({reason}): its roles "
            f"are {', '.join(message['role'] for message in prompt.messages)}"
        ) from None
