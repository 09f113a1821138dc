"""From a request to tokens: what is asked of the model, who may run at once, and who has to wait."""

from __future__ import annotations

import asyncio
import secrets
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
from tether.server.api_errors import ApiError
from tether.server.schema import ChatRequest, CompletionRequest, GenerationRequest
from tether.types import Message, Prompt

COMPLETION_TOKENS = 16  # where a completion says no length, as OpenAI has it
STREAM_NAME = "serve"  # of the random streams
MAX_CHOICES = 4096  # answers to one request, over all its prompts
MIN_TOKEN_LETTERS = 64  # that the longest token is taken to have at least: some tokenizers leave letters out
MIN_TEMPERATURE = 1e-4  # below it only the likeliest token is left, and logits over it are not finite


@dataclass(frozen=True)
class Job:
    """What the model is asked: one or more prompts, each answered `n` times."""

    prompts: tuple[tuple[int, ...], ...]
    n: int
    sampling: Sampling
    seed: int
    stops: tuple[str, ...]
    top: int  # top_logprobs at each token

    @property
    def prompt_tokens(self) -> int:
        """How many tokens were asked with."""
        return sum(map(len, self.prompts))


class Turnstile:
    """At most `running` requests at work and `waiting` in line; one more is refused."""

    def __init__(self, running: int, waiting: int) -> None:
        self._free = asyncio.Semaphore(running)
        self._most, self.waiting = waiting, 0

    async def enter(self) -> None:
        """Wait for a place."""
        if self._free.locked() and self.waiting >= self._most:
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
    """The model under the name it is served by. `turn` is held by whoever makes the next token."""

    name: str
    loaded: LoadedModel
    max_tokens: int  # of an answer whose request states no length
    aliases: tuple[str, ...] = ()
    turn: Lock = field(default_factory=Lock)

    def check_name(self, asked: str) -> None:
        """Raise where another model is asked for."""
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
            raise ApiError(400, f"the model's chat template refuses the messages: {reason}", param="messages") from None
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
        """Raise where a text cannot fit the context, before it is made into tokens: that takes 300 times its memory."""
        context = self.loaded.context_length
        if letters > context * self._longest_token:
            raise ApiError(
                400,
                f"the request has {letters} letters, which is more than the model's context of {context} tokens can "
                f"hold: shorten the {field}",
                param=field,
                code="context_length_exceeded",
            )

    @cached_property
    def _longest_token(self) -> int:
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
