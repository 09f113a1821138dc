"""An answer as it is being written: one token at a time, as text that only ever grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch

from tether.data.chat import prompt_token_ids
from tether.errors import DataError
from tether.models.load import LoadedModel
from tether.protocols import Sampling
from tether.rollout.forward import CachedBatch
from tether.rollout.sampling import check_sampling, draw, sample_uniforms
from tether.types import Message, Prompt

HALF = "\ufffd"  # what a decoder writes for a character of which some bytes are still to come
MOST_HALVES = 3  # of one character: it has four bytes at most, and some decoders write one for each


@dataclass(frozen=True)
class Token:
    """What one more token adds to the text, which may be nothing yet; `finish` with the last one: stop or length."""

    text: str
    finish: str | None = None


def stream_answer(loaded: LoadedModel, prompt: Prompt, sampling: Sampling, seed: int, turn: Lock) -> Iterator[Token]:
    """The answer that the engine gives for this seed, token by token.

    `turn` is held while a token is made and not between two, so that several answers are written side by side, and one
    that nobody reads on keeps no one waiting.
    """
    check_sampling(sampling)
    ids = prompt_token_ids(loaded.tokenizer, prompt)
    if len(ids) + sampling.max_new_tokens > loaded.context_length:
        raise DataError(
            f"the conversation has {len(ids)} tokens, and with an answer of {sampling.max_new_tokens} exceeds the "
            f"model's context of {loaded.context_length}: start over, or allow fewer tokens"
        )
    uniforms = sample_uniforms(seed, prompt.id, 0, sampling.max_new_tokens)
    batch = CachedBatch(loaded, room=sampling.max_new_tokens)
    text = growing_text(lambda tokens: str(loaded.tokenizer.decode(tokens, skip_special_tokens=True)))
    last: torch.Tensor | None = None
    for step in range(sampling.max_new_tokens):
        with turn, torch.inference_mode():
            logits = batch.read([ids], [0]) if last is None else batch.step(last)
            last = draw(logits, uniforms[step : step + 1].to(batch.device), sampling).tokens
        token = int(last)
        if token < 0:
            raise DataError("the model's logits are not finite: its weights have diverged; talk to an earlier one")
        is_last = step + 1 == sampling.max_new_tokens
        finish = "stop" if token == loaded.end_id else "length" if is_last else None
        yield Token(text(token, finish is not None), finish)
        if finish is not None:
            return


def growing_text(decode: Callable[[list[int]], str]) -> Callable[[int, bool], str]:
    """For each token what it adds: `(token, is_last) -> text`. The texts joined are the whole answer.

    A token need not be whole characters, nor look alone as it does among others. So the tokens since the last whole
    text, and the few before them for their company, are decoded anew, and what may still change is held back.
    """
    tokens: list[int] = []
    start, whole, sent = 0, 0, 0  # decoded from `start`; whole up to `whole`; letters of that which were handed out

    def add(token: int, is_last: bool) -> str:
        nonlocal start, whole, sent
        tokens.append(token)
        text = decode(tokens[start:])
        halves = min(MOST_HALVES, len(text) - len(text.rstrip(HALF)))
        stands = max(sent, len(text) if is_last else len(text) - halves)
        news, sent = text[sent:stands], stands
        if not halves and text:
            start, whole = whole, len(tokens)
            sent = len(decode(tokens[start:]))
        return news

    return add


def as_prompt(turns: Sequence[dict[str, Any]], name: str) -> Prompt:
    """A conversation as a prompt."""
    return Prompt(name, tuple(Message(role=turn["role"], content=turn["content"]) for turn in turns))
