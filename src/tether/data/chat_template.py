"""Running a model's chat template: a program that came with the model, in transformers' sandbox and within limits.

The sandbox keeps it from files and attributes, but not from loops within loops or from texts of gigabytes. So numbers
that could make those are refused before it runs, and it runs under a time limit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError, nodes

from tether.errors import DataError
from tether.time_limit import TimeLimitError, time_limit

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
