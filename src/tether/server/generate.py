"""From a request to tokens, and from tokens to OpenAI's objects.

A request becomes a job for the model; a limited number of jobs run at once and others wait. The tokens become whole
answers, chunks of a stream, log-probabilities and usage counts.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

from jinja2 import TemplateError

from tether.data.chat import prompt_token_ids
from tether.errors import DataError
from tether.models.load import LoadedModel, embedding_count
from tether.protocols import Sampling
from tether.rollout.token_stream import Token, stream_tokens
from tether.server.schema import ApiError, ChatRequest, CompletionRequest, GenerationRequest
from tether.types import Message, Prompt

COMPLETION_TOKENS = 16  # OpenAI's default for a completion without max_tokens
STREAM_NAME = "serve"  # of the random streams
MAX_CHOICES = 4096  # answers to one request, over all its prompts
MIN_TOKEN_LETTERS = 64  # that the longest token is taken to have at least: some tokenizers leave letters out
MIN_TEMPERATURE = 1e-4  # below it only the likeliest token is left, and logits over it are not finite


@dataclass(frozen=True)
class Job:
    """The work of one request: one or more prompts, each answered `n` times."""

    prompts: tuple[tuple[int, ...], ...]
    n: int
    sampling: Sampling
    seed: int
    stops: tuple[str, ...]
    top: int  # top_logprobs at each token

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens."""
        return sum(map(len, self.prompts))


class Turnstile:
    """At most `running` requests run and `waiting` wait; one more gets status 429."""

    def __init__(self, running: int, waiting: int) -> None:
        self._free = asyncio.Semaphore(running)
        self._max_waiting, self.waiting = waiting, 0

    async def enter(self) -> None:
        """Wait for a place."""
        if self._free.locked() and self.waiting >= self._max_waiting:
            raise ApiError(429, f"{self.waiting} requests are waiting already: try again later", code="queue_full")
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1

    def leave(self) -> None:
        """Make room for the next."""
        self._free.release()


@dataclass
class ServedModel:
    """The model and its served name. A request holds `turn` while it computes its next token."""

    name: str
    loaded: LoadedModel
    max_tokens: int  # of an answer whose request states no length
    aliases: tuple[str, ...] = ()
    turn: Lock = field(default_factory=Lock)

    def check_name(self, asked: str) -> None:
        """Raise if the request names another model."""
        if asked != self.name and asked not in self.aliases:
            raise ApiError(
                404,
                f"the model {asked!r} is not served here, only {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def chat_job(self, asked: ChatRequest) -> Job:
        """The work of a chat request."""
        self._check(asked)
        self._check_length(sum(message.length for message in asked.messages), "messages")
        messages = tuple(Message(**message.as_message()) for message in asked.messages)  # pyright: ignore[reportArgumentType]
        try:
            ids = prompt_token_ids(self.loaded.tokenizer, Prompt(STREAM_NAME, messages))
        except DataError as error:
            raise ApiError(400, str(error), param="messages") from None
        except (TemplateError, ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise ApiError(400, f"the model's chat template rejects the messages: {reason}", param="messages") from None
        top = (asked.top_logprobs or 0) if asked.logprobs else 0
        return self._job(asked, [ids], asked.limit, self.max_tokens, "messages", top)

    def completion_job(self, asked: CompletionRequest) -> Job:
        """The work of a completion request."""
        self._check(asked)
        tokenizer: Any = self.loaded.tokenizer
        prompts: list[list[int]] = []
        known = embedding_count(self.loaded.model)
        if len(asked.prompts) * (asked.n or 1) > MAX_CHOICES:
            raise ApiError(
                400, f"a request may ask for {MAX_CHOICES} answers at most: send it in parts", param="prompt"
            )
        for prompt in asked.prompts:
            self._check_length(len(prompt) if isinstance(prompt, str) else 0, "prompt")
            ids = list(tokenizer.encode(prompt)) if isinstance(prompt, str) else list(prompt)
            if not ids:
                raise ApiError(400, "the prompt has no tokens", param="prompt")
            if min(ids) < 0 or max(ids) >= known:
                raise ApiError(400, f"a token id is not between 0 and {known - 1}", param="prompt")
            prompts.append(ids)
        if not prompts:
            raise ApiError(400, "the list of prompts is empty", param="prompt")
        return self._job(asked, prompts, asked.max_tokens, COMPLETION_TOKENS, "prompt", asked.logprobs or 0)

    def _check(self, asked: GenerationRequest) -> None:
        self.check_name(asked.model)
        if name := asked.unsupported():
            raise ApiError(400, f"{name} is not supported here: leave it out", param=name, code="unsupported_parameter")

    def _check_length(self, letters: int, field: str) -> None:
        """Raise if a text cannot fit the context, before tokenization, which takes 300 times its memory."""
        context = self.loaded.context_length
        if letters > context * self._max_token_length:
            raise ApiError(
                400,
                f"the request has {letters} letters, which is more than the model's context of {context} tokens can "
                f"hold: shorten the {field}",
                param=field,
                code="context_length_exceeded",
            )

    @cached_property
    def _max_token_length(self) -> int:
        tokenizer: Any = self.loaded.tokenizer
        return max(MIN_TOKEN_LETTERS, *map(len, tokenizer.get_vocab()))

    def _job(
        self,
        asked: GenerationRequest,
        prompts: Sequence[list[int]],
        limit: int | None,
        default: int,
        field: str,
        top: int,
    ) -> Job:
        longest, context = max(map(len, prompts)), self.loaded.context_length
        room = context - longest
        if room < 1 or (limit is not None and limit > room):
            answer = f" and an answer of {limit}" if limit is not None else ""
            raise ApiError(
                400,
                f"the request has {longest} tokens{answer}, and the model's context is {context}: shorten the "
                f"{field}, or ask for fewer tokens",
                param=field if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        sampling = Sampling(
            max_new_tokens=limit or min(default, room),
            temperature=_temperature(asked.temperature),
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=asked.top_k or 0,
        )
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        return Job(tuple(map(tuple, prompts)), asked.n or 1, sampling, seed, asked.stops, top)

    def tokens(self, job: Job) -> Iterator[tuple[int, Token]]:
        """(choice, token) after token; the prompts one after the other, the answers to one side by side."""
        for place, prompt in enumerate(job.prompts):
            stream = stream_tokens(
                self.loaded,
                prompt,
                job.sampling,
                job.seed,
                self.turn,
                name=STREAM_NAME,
                samples=job.n,
                stops=job.stops,
                top=job.top,
            )
            for token in stream:
                yield place * job.n + token.answer, token


def _temperature(asked: float | None) -> float:
    """The temperature to sample at; 0 is greedy."""
    if asked is None:
        return 1.0
    return asked if asked >= MIN_TEMPERATURE else 0.0


@dataclass
class Choice:
    """One answer as far as it is written."""

    text: str = ""
    finish: str | None = None
    tokens: list[Token] = field(default_factory=list)  # for log-probs


class OpenAIAnswer:
    """The answer to one request: collects its tokens, and writes each kind of object."""

    def __init__(self, served: ServedModel, job: Job, *, chat: bool, logprobs: bool) -> None:
        self.served, self.job, self.chat, self.logprobs = served, job, chat, logprobs
        self.choices = [Choice() for _ in range(len(job.prompts) * job.n)]
        self.completion_tokens = 0
        prefix, kind = ("chatcmpl-", "chat.completion") if chat else ("cmpl-", "text_completion")
        self._head = {"id": f"{prefix}{secrets.token_hex(12)}", "created": int(time.time()), "model": served.name}
        self._kind = kind

    def add(self, place: int, token: Token) -> None:
        """One more token."""
        choice = self.choices[place]
        self.completion_tokens += 1
        choice.text += token.text
        choice.finish = token.finish
        if self.logprobs:
            choice.tokens.append(token)

    def whole(self) -> dict[str, Any]:
        """The reply to a request that did not ask for a stream."""
        choices = []
        for index, choice in enumerate(self.choices):
            entry: dict[str, Any] = {"index": index, "finish_reason": choice.finish}
            entry["logprobs"] = self._logprobs(choice.tokens) if self.logprobs else None
            if self.chat:
                entry["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
            else:
                entry["text"] = choice.text
            choices.append(entry)
        return self._head | {"object": self._kind, "choices": choices, "usage": self.usage()}

    def opening(self) -> list[str]:
        """The first events of a stream: whose turn it is."""
        if not self.chat:
            return []
        return [self._event(index, {"role": "assistant", "content": ""}, None) for index in range(len(self.choices))]

    def chunk(self, place: int, token: Token) -> str | None:
        """The event for one token; None if it adds no complete text yet."""
        logprobs = self._logprobs([token]) if self.logprobs else None
        if not token.text and token.finish is None and not logprobs:
            return None
        delta: Any = ({"content": token.text} if token.text or not token.finish else {}) if self.chat else token.text
        return self._event(place, delta, token.finish, logprobs)

    def closing(self, include_usage: bool) -> list[str]:
        """The last events of a stream."""
        kind = f"{self._kind}.chunk" if self.chat else self._kind
        counts = self._head | {"object": kind, "choices": [], "usage": self.usage()}
        return [*([event(counts)] if include_usage else []), "data: [DONE]\n\n"]

    def usage(self) -> dict[str, int]:
        """Counts of tokens; end tokens are counted, for they were sampled."""
        prompt, completion = self.job.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _event(self, index: int, delta: Any, finish: str | None, logprobs: Any = None) -> str:
        entry = {"index": index, "logprobs": logprobs, "finish_reason": finish}
        entry |= {"delta": delta} if self.chat else {"text": delta}
        return event(self._head | {"object": f"{self._kind}.chunk" if self.chat else self._kind, "choices": [entry]})

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any]:
        shown = [token for token in tokens if not token.ended]
        if self.chat:
            return {"content": [self._entry(token.id, token.logprob, token.top) for token in shown], "refusal": None}
        texts, offset, offsets = [self._text(token.id) for token in shown], 0, []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in shown],
            "top_logprobs": [{self._text(id): value for id, value in token.top} for token in shown],
            "text_offset": offsets,
        }

    def _entry(self, id: int, logprob: float, top: tuple[tuple[int, float], ...] | None) -> dict[str, Any]:
        text = self._text(id)
        entry: dict[str, Any] = {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}
        if top is not None:
            entry["top_logprobs"] = [self._entry(other, value, None) for other, value in top]
        return entry

    def _text(self, id: int) -> str:
        return str(self.served.loaded.tokenizer.decode([id]))


def event(content: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"
