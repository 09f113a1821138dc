"""Conversations as tokens, by the model's chat template.

Running a model's chat template: a program that came with the model, in transformers' sandbox and within limits.

The sandbox keeps it from files and attributes, but not from loops within loops or from texts of gigabytes. So numbers
that could make those are refused before it runs, and it runs under a time limit.

Conversations as tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

from jinja2 import Environment, TemplateError, nodes

from tether.errors import DataError
from tether.types import Message, Prompt
from tether.user_code import TimeLimitError, time_limit

SECONDS = 4.0  # to write one conversation; templates take milliseconds
SECONDS_A_CHARACTER = 1e-5  # more, for making tokens of what is written
MAX_NUMBER = 1_000_000  # in a template: more turns or characters than any needs
MAX_TEMPLATE = 1 << 20  # characters


class TemplateRefusedError(DataError):
    """A template that is not run, or did not end."""


def render(tokenizer: Any, messages: list[Any], **options: Any) -> Any:
    """`tokenizer.apply_chat_template(messages, **options)`; raises TemplateRefusedError where it is no template to run.

    What the template itself raises on turns that it does not like is raised as it is.
    """
    given = getattr(tokenizer, "chat_template", None)
    for template in given.values() if isinstance(given, dict) else [given]:
        if isinstance(template, str) and (wrong := refusal(template)):
            raise TemplateRefusedError(f"the model's chat template is not run: {wrong}")
    characters = sum(len(str(message.get("content") or "")) for message in messages)
    try:
        with time_limit(SECONDS + SECONDS_A_CHARACTER * characters, "the model's chat template"):
            return tokenizer.apply_chat_template(messages, return_dict=False, **options)
    except TimeLimitError:
        raise TemplateRefusedError(
            f"the model's chat template did not end within {SECONDS:g} seconds: mend its loop, in chat_template.jinja "
            "or tokenizer_config.json"
        ) from None
    except RecursionError:
        raise TemplateRefusedError("the model's chat template calls itself without an end") from None


@lru_cache(maxsize=64)
def refusal(template: str) -> str | None:
    """Why a template is not run; None where nothing speaks against it."""
    if len(template) > MAX_TEMPLATE:
        return f"it has {len(template):,} characters"
    try:
        tree = Environment(extensions=["jinja2.ext.do", "jinja2.ext.loopcontrols"]).parse(template)  # noqa: S701 (read only)
    except TemplateError as error:
        reason = str(error).partition("\n")[0]
        return None if "unknown tag" in reason else f"it is no Jinja template ({reason})"  # tags of transformers' own
    except RecursionError:
        return "it is nested too deeply"
    for node in tree.find_all((nodes.Pow, nodes.Mul, nodes.Const)):
        if isinstance(node, nodes.Pow):
            return "it raises to a power, which can make a text or a loop of any length"
        if isinstance(node, nodes.Mul) and next(iter(node.find_all(nodes.Mul)), None) is not None:
            return "it multiplies products, which can make a text or a loop of any length"
        if isinstance(node, nodes.Const) and isinstance(node.value, int | float) and node.value > MAX_NUMBER:
            return f"it holds the number {node.value:.12g}, which can make a text or a loop of any length"
    return None


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
