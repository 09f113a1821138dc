"""Which tokens end an answer: those at which sampling stops, and the one that training appends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tether.data.chat import render

ANSWER = "tether-answer"  # placeholder for an answer, to see what the chat template appends


@dataclass(frozen=True)
class Ends:
    """`appended` ends an answer in training records; sampling stops there and at each of `also`."""

    appended: int
    also: tuple[int, ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        """Every end token."""
        return tuple(sorted({self.appended, *self.also}))


def find_ends(tokenizer: Any, config: Any, generation: Any, known: int) -> Ends | None:
    """The end tokens of a model; None where neither its tokenizer nor its configuration names one.

    Chat models often end a turn with a token that is not the tokenizer's end token (Llama 3's <|eot_id|>, Gemma's
    <end_of_turn>), and name it in generation_config.json. What training appends is the one that the chat template
    itself puts behind an answer, so that what is learned is what sampling stops at; else the tokenizer's own.
    `known` is how many token ids the model can read.
    """
    own = tokenizer.eos_token_id
    special = {*getattr(tokenizer, "all_special_ids", ()), *getattr(tokenizer, "added_tokens_decoder", {})}
    listed, usual = _ids(getattr(generation, "eos_token_id", None)), _ids(getattr(config, "eos_token_id", None))
    # Where there is no generation_config.json, transformers makes one from the model's config, whose defaults are the
    # architecture's and may be letters in this tokenizer: of those, only tokens made for a purpose count.
    if generation is None or getattr(generation, "_from_model_config", False):
        listed = [id for id in (*listed, *usual) if id in special or id not in usual]
    found = [id for id in dict.fromkeys((*_ids(own), *listed)) if 0 <= id < known]
    if not found:
        return None
    appended = turn_end(tokenizer, found)
    if appended is None:
        appended = own if own in found else found[0]
    return Ends(appended, tuple(sorted(set(found) - {appended})))


def turn_end(tokenizer: Any, ends: Iterable[int]) -> int | None:
    """The first of the end tokens that the chat template puts behind an answer; None where it puts none there."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = render(tokenizer, turns, tokenize=False)
    except Exception:  # a template is a program of the model's, and may raise anything on turns that it does not like
        return None
    _, found, after = text.rpartition(ANSWER)
    wanted = set(ends)
    ids = tokenizer.encode(after, add_special_tokens=False) if found and after else []
    return next((id for id in ids if id in wanted), None)


def ends_notice(tokenizer: Any, ends: Ends) -> str | None:
    """What to tell where answers end with more than the tokenizer's end token."""
    if not ends.also and ends.appended == tokenizer.eos_token_id:
        return None

    def named(id: int) -> str:
        return f"{tokenizer.convert_ids_to_tokens(id)} ({id})"

    return (
        f"Answers end at {' or '.join(map(named, ends.all))}, as the model's configuration says; in training records "
        f"they end with {named(ends.appended)}."
    )


def _ids(listed: Any) -> list[int]:
    """The ids of a field that holds one, several or none."""
    values = listed if isinstance(listed, list | tuple) else [listed]
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
