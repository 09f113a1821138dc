"""Prompts to sample answers to: read them, hold some out, and drop or shorten those that are too long.

A prompt is shortened at paragraph ends. A paragraph ends at a newline.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tether.config.base import Paths, ReadSettings
from tether.config.sections import PromptSettings
from tether.data.chat import Encoder, prompt_token_ids
from tether.data.conversations import prompt_of
from tether.data.records import PLAIN, read_records
from tether.errors import ConfigError, DataError
from tether.types import Message, Prompt

_BREAK = re.compile(r"[^\S\n]*\n\s*")


def cut_end(text: str, fits: Callable[[str], bool]) -> str | None:
    """`text` up to the last paragraph end at which it `fits`; None where not even the first paragraph fits.

    If `fits` accepts a text, it must accept every prefix of it. Used for answers, whose beginning is kept.
    """
    return _longest([text[: found.start()] for found in _breaks(text)], fits)


def cut_middle(text: str, fits: Callable[[str], bool]) -> str | None:
    """`text` with as few paragraphs as possible removed, just before the last; None where that is not enough.

    Used for prompts: the papers shorten the post and keep the "TL;DR:" after it, and instructions and questions come
    first or last. The first and the last paragraph are always kept.
    """
    breaks = _breaks(text)
    if len(breaks) < 2:
        return None
    last = text[breaks[-1].start() :]
    return _longest([text[: found.start()] + last for found in breaks[:-1]], fits)


def _breaks(text: str) -> list[re.Match[str]]:
    """The breaks between paragraphs, without one at the beginning or the end of the text."""
    first = len(text) - len(text.lstrip())
    return list(_BREAK.finditer(text, first, len(text.rstrip())))


def _longest(candidates: Sequence[str], fits: Callable[[str], bool]) -> str | None:
    """The last candidate that fits, found by bisection; the candidates are sorted by length."""
    low, high = 0, len(candidates)  # every candidate before `low` fits, none from `high` on does
    while low < high:
        middle = (low + high) // 2
        if fits(candidates[middle]):
            low = middle + 1
        else:
            high = middle
    return candidates[low - 1] if low else None


def read_prompts(paths: Paths, settings: ReadSettings = PLAIN, *, split: str | None = None) -> list[Prompt]:
    """The prompts of a source; the records may have any supported shape."""
    records = read_records(paths, settings, split=split)
    return [prompt_of(record, settings, index)[0] for index, record in enumerate(records)]


def hold_out(prompts: Sequence[Prompt], fraction: float, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held out), each in the order given. Equal prompts stay together, so that none is on both sides.

    The choice depends on the seed and on the prompts' texts, and not on their order in the file.
    """
    keys = [_key(prompt) for prompt in prompts]
    different = sorted(set(keys), key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest())
    count = max(1, round(fraction * len(different)))
    if count >= len(different):
        raise DataError(
            f"task.held_out_fraction is {fraction}, and of {len(different)} different prompts that leaves none to "
            "train on: lower it, or add prompts"
        )
    out = set(different[:count])
    sides = [
        [prompt for prompt, key in zip(prompts, keys, strict=True) if (key in out) is side] for side in (False, True)
    ]
    return sides[0], sides[1]


def seen_in_training(held_out: Sequence[Prompt], training: Sequence[Prompt]) -> int:
    """The number of held-out prompts that are also trained on."""
    trained = {_key(prompt) for prompt in training}
    return sum(_key(prompt) in trained for prompt in held_out)


def _key(prompt: Prompt) -> str:
    return json.dumps([prompt.messages, prompt.tools], sort_keys=True, default=str)


@dataclass(frozen=True)
class PromptRule:
    """How to treat prompts that are too long: `limit` is in tokens, `why` says where it comes from."""

    limit: int
    why: str
    settings: PromptSettings

    @classmethod
    def of(cls, settings: PromptSettings, context: int, max_new_tokens: int) -> PromptRule:
        """The limit: data.max_prompt_length, and at most the model's context minus the answer."""
        room = context - max_new_tokens
        if room < 1:
            raise ConfigError(
                f"rollout.max_new_tokens is {max_new_tokens}, and the model's context of {context} tokens leaves no "
                "room for a prompt: lower it"
            )
        given = settings.max_prompt_length
        if given is not None and given <= room:
            return cls(given, f"data.max_prompt_length = {given}", settings)
        why = f"the model's context of {context} less max_new_tokens {max_new_tokens}"
        return cls(room, f"{room} tokens, {why}", settings)

    def apply(self, prompts: Sequence[Prompt], tokenizer: Encoder, name: str) -> Fitted:
        """The prompts that fit, some of them shortened, with counts of the others."""
        kept: list[Prompt] = []
        lengths: list[int] = []
        counts: Counter[str] = Counter()
        for prompt in prompts:
            length = len(prompt_token_ids(tokenizer, prompt))
            if length > self.limit:
                shorter = shortened(prompt, tokenizer, self.limit) if self.settings.truncate else None
                if shorter is None and self.settings.overlong == "error":
                    raise DataError(
                        f"{name}: prompt {prompt.id!r} has {length} tokens, above {self.why}: shorten it, set "
                        "data.truncate, or set data.overlong to drop"
                    )
                counts["dropped" if shorter is None else "cut"] += 1
                if shorter is None:
                    continue
                prompt, length = shorter, len(prompt_token_ids(tokenizer, shorter))
            kept.append(prompt)
            lengths.append(length)
        if not kept:
            raise DataError(
                f"{name}: all {len(prompts)} prompts are longer than {self.why}: shorten them, or set data.truncate"
            )
        return Fitted(kept, lengths, counts["dropped"], counts["cut"], self.why, name)


@dataclass(frozen=True)
class Fitted:
    """The prompts that fit the model, their lengths in tokens, and how many were dropped and shortened."""

    prompts: list[Prompt]
    lengths: list[int]
    dropped: int
    cut: int
    why: str
    name: str

    @property
    def notices(self) -> list[str]:
        """Messages for the user."""
        whole = len(self.prompts) + self.dropped
        said = [(self.dropped, "dropped"), (self.cut, "cut at paragraph ends")]
        return [f"{self.name}: {n} of {whole} prompts {what}, to fit {self.why}." for n, what in said if n]


def shortened(prompt: Prompt, tokenizer: Encoder, room: int) -> Prompt | None:
    """The prompt with its longest message cut in the middle, at paragraph ends; None where that is not enough."""
    which = max(range(len(prompt.messages)), key=lambda index: len(prompt.messages[index]["content"]))

    def changed(content: str) -> Prompt:
        turn: Message = {**prompt.messages[which], "content": content}
        return replace(prompt, messages=(*prompt.messages[:which], turn, *prompt.messages[which + 1 :]))

    content = cut_middle(
        prompt.messages[which]["content"], lambda text: len(prompt_token_ids(tokenizer, changed(text))) <= room
    )
    return None if content is None else changed(content)
