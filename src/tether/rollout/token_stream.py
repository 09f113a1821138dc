"""Answers as a stream: token by token, as text that only grows, several answers side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from tether.errors import DataError
from tether.models.load import LoadedModel
from tether.ops.sampling import Draw, check_sampling, draw, log_softmax, sample_uniforms
from tether.protocols import Sampling
from tether.rollout.native import CachedBatch

HALF = "\ufffd"  # what a decoder writes for a character of which some bytes are still to come
MAX_HALVES = 3  # of one character: it has four bytes at most, and some decoders write one for each


@dataclass(frozen=True)
class Token:
    """What one more token adds to the text, which may be nothing yet; `finish` with the last one: stop or length.

    `logprob` is at the sampling temperature over the whole vocabulary, and so are those in `top`, the likeliest ids.
    """

    text: str
    finish: str | None = None
    answer: int = 0  # which of the answers
    id: int = -1
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    ended: bool = False  # it is a token that ends answers, and no part of the text


class _Answer:
    """One answer that is being written."""

    def __init__(self, number: int, loaded: LoadedModel, stops: Sequence[str]) -> None:
        self.number = number
        self.text = growing_text(lambda ids: text_of(loaded, ids))
        self.until = StopText(stops)


def text_of(loaded: LoadedModel, ids: Sequence[int]) -> str:
    """The text of an answer's tokens; an end token is no text, also where the tokenizer does not call it special."""
    return str(loaded.tokenizer.decode([id for id in ids if id not in loaded.end_ids], skip_special_tokens=True))


def stream_tokens(
    loaded: LoadedModel,
    ids: Sequence[int],
    sampling: Sampling,
    seed: int,
    turn: Lock,
    *,
    name: str,
    samples: int = 1,
    stops: Sequence[str] = (),
    top: int = 0,
) -> Iterator[Token]:
    """The answers that the engine gives for this seed and prompt id `name`, token by token.

    An answer ends with an end token, at the longest length, or where its text holds one of `stops`, which is left
    out. `turn` is held while a token is made and not between two, so that several callers' answers are written side by
    side, and one that nobody reads on keeps no one waiting. `top` is how many top_logprobs each token comes with.
    """
    check_sampling(sampling)
    uniforms = torch.stack([sample_uniforms(seed, name, row, sampling.max_new_tokens) for row in range(samples)])
    batch = CachedBatch(loaded, room=sampling.max_new_tokens)
    uniforms = uniforms.to(batch.device, torch.float32 if batch.device.type == "mps" else torch.float64)
    ends = {*loaded.end_ids, *sampling.stop_token_ids}
    live: list[_Answer | None] = [_Answer(number, loaded, stops) for number in range(samples)]  # None: it is over
    last: Tensor | None = None
    for step in range(sampling.max_new_tokens):
        with turn, torch.inference_mode():
            logits = batch.read([list(ids)], [0] * samples) if last is None else batch.step(last)
            drawn = draw(logits, uniforms[:, step], sampling)
            chosen, logprobs, others = _on_host(drawn, logits, sampling, top)
        for place, answer in enumerate(live):
            if answer is not None:
                token = _token(answer, chosen[place], ends, is_last=step + 1 == sampling.max_new_tokens)
                live[place] = None if token.finish else answer
                yield Token(
                    token.text, token.finish, answer.number, chosen[place], logprobs[place], others[place], token.ended
                )
        running = [place for place, answer in enumerate(live) if answer is not None]
        if not running:
            return
        last = drawn.tokens
        if len(running) < len(live) and batch.can_select:
            with turn, torch.inference_mode():
                kept = torch.tensor(running, device=batch.device)
                batch.select(kept)
                last, uniforms = last[kept], uniforms[kept]
            live = [live[place] for place in running]


def _on_host(
    drawn: Draw, logits: Tensor, sampling: Sampling, top: int
) -> tuple[list[int], list[float], list[tuple[tuple[int, float], ...]]]:
    chosen, logprobs = drawn.tokens.tolist(), drawn.untruncated.tolist()
    if not top:
        return chosen, logprobs, [()] * len(chosen)
    best = log_softmax(logits.float() / (sampling.temperature or 1.0)).topk(min(top, logits.shape[-1]), dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return chosen, logprobs, [tuple(zip(ids, values, strict=True)) for ids, values in pairs]


def _token(answer: _Answer, id: int, ends: set[int], *, is_last: bool) -> Token:
    if id < 0:
        raise DataError("the model's logits are not finite: its weights have diverged; talk to an earlier one")
    finish = "stop" if id in ends else "length" if is_last else None
    news, stopped = answer.until.add(answer.text(id, finish is not None), is_last=finish is not None)
    return Token(news, "stop" if stopped else finish, ended=id in ends)


class StopText:
    """Text up to the first of some strings. Text that may begin one of them is held back until that is decided."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stop for stop in stops if stop)
        self.held = ""

    def add(self, news: str, *, is_last: bool) -> tuple[str, bool]:
        """`(new text, whether a stop was found)`; the stop and all text after it are left out."""
        text = self.held + news
        found = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if found:
            self.held = ""
            return text[: min(found)], True
        keep = 0 if is_last else max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def _overlap(text: str, stop: str) -> int:
    """How long an end of the text is a beginning of the stop, but not all of it."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


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
        halves = min(MAX_HALVES, len(text) - len(text.rstrip(HALF)))
        stands = max(sent, len(text) if is_last else len(text) - halves)
        news, sent = text[sent:stands], stands
        if not halves and text:
            start, whole = whole, len(tokens)
            sent = len(decode(tokens[start:]))
        return news

    return add
