"""Tokens as OpenAI's objects: whole answers, chunks of a stream, log-probabilities and counts."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from tether.rollout.token_stream import Token
from tether.server.generate import Job, ServedModel


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
            said: dict[str, Any] = {"index": index, "finish_reason": choice.finish}
            said["logprobs"] = self._logprobs(choice.tokens) if self.logprobs else None
            if self.chat:
                said["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
            else:
                said["text"] = choice.text
            choices.append(said)
        return self._head | {"object": self._kind, "choices": choices, "usage": self.usage()}

    def opening(self) -> list[str]:
        """The first events of a stream: whose turn it is."""
        if not self.chat:
            return []
        return [self._event(index, {"role": "assistant", "content": ""}, None) for index in range(len(self.choices))]

    def chunk(self, place: int, token: Token) -> str | None:
        """The event for one token; None where it adds nothing that can be told yet."""
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
        asked, said = self.job.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}

    def _event(self, index: int, delta: Any, finish: str | None, logprobs: Any = None) -> str:
        said = {"index": index, "logprobs": logprobs, "finish_reason": finish}
        said |= {"delta": delta} if self.chat else {"text": delta}
        return event(self._head | {"object": f"{self._kind}.chunk" if self.chat else self._kind, "choices": [said]})

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any]:
        told = [token for token in tokens if not token.ended]
        if self.chat:
            return {"content": [self._entry(token.id, token.logprob, token.top) for token in told], "refusal": None}
        texts, offset, offsets = [self._text(token.id) for token in told], 0, []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in told],
            "top_logprobs": [{self._text(id): value for id, value in token.top} for token in told],
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
