"""Turn conversations into tokens with the model's chat template.

A chat template is a program that comes with the model. transformers runs it in a Jinja sandbox, which blocks access to
files and attributes but allows nested loops and texts of gigabytes. `render` therefore rejects templates that contain
very large numbers, and runs every template under a time limit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

from jinja2 import Environment, TemplateError, nodes

from tether.errors import DataError
from tether.types import Message, Prompt
from tether.user_code import TimeLimitError, time_limit

SECONDS = 4.0  # time limit for one conversation; templates take milliseconds
SECONDS_A_CHARACTER = 1e-5  # added to the limit for tokenizing the text
MAX_NUMBER = 1_000_000  # largest number in a template; no template needs more turns or characters
MAX_TEMPLATE = 1 << 20  # characters


class TemplateRefusedError(DataError):
    """A chat template that was rejected before it ran, or that exceeded its time limit."""


def render(tokenizer: Any, messages: list[Any], **options: Any) -> Any:
    """Return `tokenizer.apply_chat_template(messages, **options)`.

    Raises TemplateRefusedError where the template is rejected or exceeds its limits. Errors that the template itself
    raises, for example on roles that it does not support, pass through unchanged.
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
            f"the model's chat template did not end within {SECONDS:g} seconds: fix its loop, in chat_template.jinja "
            "or tokenizer_config.json"
        ) from None
    except RecursionError:
        raise TemplateRefusedError("the model's chat template recurses without end") from None


@lru_cache(maxsize=64)
def refusal(template: str) -> str | None:
    """Why a template is rejected; None where it may run."""
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
    """The tokenizer methods that Tether uses; one with a `chat_template` also needs `apply_chat_template`."""

    def encode(self, text: Any, *, add_special_tokens: bool = ...) -> list[int]:
        """The ids of `text`."""
        ...


def prompt_token_ids(tokenizer: Encoder, prompt: Prompt) -> list[int]:
    """The prompt's token ids, up to where the answer begins.

    With a chat template, the template writes the whole prompt, special tokens included. Without one, the contents of
    the messages are joined by newlines, after the tokens that the tokenizer adds before a text (BOS).
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
    """The ids of a text at the start of a row: one BOS token where the tokenizer adds one, and no end token."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    first = opening_ids(tokenizer)
    return ids if ids[: len(first)] == first else [*first, *ids]


def opening_ids(tokenizer: Encoder) -> list[int]:
    """The tokens that the tokenizer adds before a text: its BOS token, or nothing.

    Found by encoding a text, because some tokenizers add BOS without setting `add_bos_token`.
    """
    plain = list(tokenizer.encode("a", add_special_tokens=False))
    whole = list(tokenizer.encode("a", add_special_tokens=True))
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start]
    return []


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def plain_text(prompt: Prompt) -> str:
    """The prompt as plain text, for a tokenizer without a chat template."""
    if prompt.tools or any("tool_calls" in message for message in prompt.messages):
        raise DataError(f"prompt {prompt.id!r} has tools: use a model whose chat template supports tools")
    return "\n".join(message["content"] for message in prompt.messages)


def prompt_text(tokenizer: Any, prompt: Prompt, *, answered: bool = False) -> str:
    """The prompt as text; with `answered`, without the header of the next assistant turn."""
    if not has_template(tokenizer):
        return plain_text(prompt)
    return _templated(tokenizer, prompt, tokenize=False, add_generation_prompt=not answered)


def _templated(tokenizer: Any, prompt: Prompt, *, tokenize: bool, add_generation_prompt: bool = True) -> Any:
    messages: list[Message] = [message.copy() for message in prompt.messages]
    if prompt.tools or any("tool_calls" in message for message in messages):
        _check_tools(tokenizer, prompt)
    return _apply(tokenizer, prompt, messages, tokenize=tokenize, add_generation_prompt=add_generation_prompt)


def _check_tools(tokenizer: Any, prompt: Prompt) -> None:
    """Reject a template that drops tools or tool calls: the model would learn an empty turn."""

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
    except Exception as error:  # the template is the model's own program and may raise anything
        reason = str(error).partition("\n")[0][:300] or type(error).__name__
        raise DataError(
            f"prompt {prompt.id!r}: the model's chat template rejects this conversation ({reason}): its roles "
            f"are {', '.join(message['role'] for message in prompt.messages)}"
        ) from None
