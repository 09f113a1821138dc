"""Judges that choose the better of two answers: by a score (a rule, a reward model, a task), or over HTTP."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from tether.config.rewards import RemotePart
from tether.http_client import PostError, post
from tether.protocols import RewardFn
from tether.rewards.pool import in_order
from tether.rewards.remote import RemoteReward
from tether.rewards.scoring import score_rollouts
from tether.types import Rollout

Choice = Literal["first", "second", "tie"]
MIRRORED: dict[Choice, Choice] = {"first": "second", "second": "first", "tie": "tie"}
VERSION = 1


class Pair(NamedTuple):
    """Two models' answers to one prompt."""

    first: Rollout
    second: Rollout


@dataclass(frozen=True)
class Verdict:
    """A judge's choice for one pair; `choice` is None, with a `reason`, where it could not judge."""

    choice: Choice | None
    orders_agree: bool = True
    reason: str = ""


class Judge(Protocol):
    """Compares pairs of answers."""

    def __call__(self, pairs: Sequence[Pair]) -> Sequence[Verdict]:
        """One verdict per pair, in order."""
        ...


@dataclass(frozen=True)
class ScoreJudge:
    """The answer with the higher score wins; scores within `margin` of each other tie. The order does not matter."""

    reward: RewardFn
    margin: float = 0.0

    def __call__(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict per pair; no choice where either answer has no score."""
        firsts, seconds = (self._scores([pair[side] for pair in pairs]) for side in (0, 1))
        return [self._verdict(one - other) for one, other in zip(firsts, seconds, strict=True)]

    def _scores(self, rollouts: Sequence[Rollout]) -> list[float]:
        scores = score_rollouts(self.reward, rollouts, max_failure_rate=1.0)
        return [score.value if score.valid else math.nan for score in scores]

    def _verdict(self, lead: float) -> Verdict:
        if not math.isfinite(lead):
            return Verdict(None, reason="an answer could not be scored")
        if abs(lead) <= self.margin:
            return Verdict("tie")
        return Verdict("first" if lead > 0 else "second")


Item = dict[str, Any]
"""A prompt and two answers as a judge gets them: `prompt`, `messages`, `first`, `second`."""


class HTTPJudge(ABC):
    """A judge over HTTP. It sees every pair in both orders: if its choice changes with the order, the pair is a tie.

    The two orders of a pair are never in one request, and nothing in a request reveals which model wrote an answer.
    """

    def __init__(self, part: RemotePart, *, token: str | None, seed: int, **options: Any) -> None:
        self.part = part
        self.token = token
        self.waits = RemoteReward(part, token=token, seed=seed, **options)  # supplies the waits between retries

    def __call__(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict per pair; no choice where either order got no answer."""
        return self.judge([judge_item(pair.first, pair.second) for pair in pairs])

    def judge(self, items: Sequence[Item]) -> list[Verdict]:
        """One verdict per item; no choice where either order got no answer."""
        straight = self._ask(items)
        swapped = self._ask([item | {"first": item["second"], "second": item["first"]} for item in items])
        return [_both_orders(one, other) for one, other in zip(straight, swapped, strict=True)]

    def _ask(self, items: Sequence[Item]) -> list[Verdict]:
        def ask(start: int) -> list[Verdict]:
            batch = items[start : start + self.part.batch_size]
            return self._batch(start, [{"id": str(start + place)} | item for place, item in enumerate(batch)])

        batches = in_order(ask, range(0, len(items), self.part.batch_size), self.part.concurrency)
        return [verdict for batch in batches for verdict in batch]

    def _batch(self, start: int, items: list[Item]) -> list[Verdict]:
        body = json.dumps(self.request(items)).encode()
        for attempt in range(self.part.retries + 1):
            try:
                answer = post(
                    self.part.url,
                    body,
                    token=self.token,
                    timeout_seconds=self.part.timeout_seconds,
                    max_bytes=self.part.max_response_bytes,
                )
                return self.read(answer, items)
            except PostError as error:
                if not error.retriable or attempt == self.part.retries:
                    return [Verdict(None, reason=error.reason)] * len(items)
                self.waits.sleep(self.waits.wait(start, attempt))
        raise AssertionError("the last attempt returns")

    @abstractmethod
    def request(self, items: Sequence[Item]) -> dict[str, Any]:
        """The body of a request about these items, each with an `id`."""

    @abstractmethod
    def read(self, answer: bytes, items: Sequence[Item]) -> list[Verdict]:
        """The verdicts in a response."""


class RemoteJudge(HTTPJudge):
    """A judge that speaks the protocol of docs/evaluation.md.

    Version 1: POST `{"version": 1, "items": [{"id", "prompt", "messages", "first", "second"}]}`, answered by
    `{"choices": [{"id", "choice": "first" | "second" | "tie"}]}` in any order.
    """

    def request(self, items: Sequence[Item]) -> dict[str, Any]:
        """The items and the version."""
        return {"version": VERSION, "items": list(items)}

    def read(self, answer: bytes, items: Sequence[Item]) -> list[Verdict]:
        """The choices by id."""
        return read_choices(answer, [item["id"] for item in items])


class ChatJudge(HTTPJudge):
    """A language model behind an OpenAI-compatible endpoint, asked about one pair at a time at temperature 0."""

    def __init__(
        self,
        part: RemotePart,
        *,
        model: str,
        instruction: str,
        max_tokens: int,
        token: str | None,
        seed: int,
        **options: Any,
    ) -> None:
        url = part.url.rstrip("/")
        url = url if url.endswith("/chat/completions") else f"{url}/chat/completions"
        super().__init__(part.model_copy(update={"url": url, "batch_size": 1}), token=token, seed=seed, **options)
        self.model, self.instruction, self.max_tokens = model, instruction, max_tokens

    def request(self, items: Sequence[Item]) -> dict[str, Any]:
        """One user message with the conversation, answer A, answer B, and the instruction."""
        (item,) = items
        asked = "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in item["messages"])
        text = f"{asked}\n\n[Answer A]\n{item['first']}\n\n[Answer B]\n{item['second']}\n\n{self.instruction}"
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }

    def read(self, answer: bytes, items: Sequence[Item]) -> list[Verdict]:
        """The verdict in the reply's text."""
        del items
        try:
            text = json.loads(answer)["choices"][0]["message"]["content"]
        except (ValueError, RecursionError):
            return [Verdict(None, reason="not_json")]
        except (TypeError, KeyError, IndexError):
            return [Verdict(None, reason="wrong_shape")]
        return [read_reply(text)]


REPLY = re.compile(r"\b(A|B|[Tt]ie|TIE)\b")
CHOICES: dict[str, Choice] = {"a": "first", "b": "second", "tie": "tie"}


def read_reply(text: Any) -> Verdict:
    """The choice in a judge's words: A, B or tie. A reply that names none of them, or several, is no verdict."""
    named = {word.lower() for word in REPLY.findall(text)} if isinstance(text, str) else set[str]()
    return Verdict(CHOICES[named.pop()]) if len(named) == 1 else Verdict(None, reason="not_a_choice")


def read_choices(answer: bytes, ids: Sequence[str]) -> list[Verdict]:
    """The choices by id. A faulty item fails alone; an unreadable response fails all items."""
    try:
        choices = json.loads(answer)["choices"]
    except (ValueError, RecursionError):
        return [Verdict(None, reason="not_json")] * len(ids)
    except (TypeError, KeyError, IndexError):
        return [Verdict(None, reason="wrong_shape")] * len(ids)
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return [Verdict(None, reason="wrong_shape")] * len(ids)
    named = [choice for choice in choices if isinstance(choice.get("id"), str)]
    times = Counter(choice["id"] for choice in named)
    values = {choice["id"]: choice.get("choice") for choice in named}
    return [_verdict(values.get(id), times[id]) for id in ids]


def _verdict(choice: Any, times: int) -> Verdict:
    if times != 1:
        return Verdict(None, reason="missing" if times == 0 else "duplicate")
    known: Choice | None = next((word for word in MIRRORED if word == choice), None)
    return Verdict(known) if known else Verdict(None, reason="not_a_choice")


def _both_orders(straight: Verdict, swapped: Verdict) -> Verdict:
    if straight.choice is None or swapped.choice is None:
        return straight if straight.choice is None else swapped
    if straight.choice == MIRRORED[swapped.choice]:
        return straight
    return Verdict("tie", orders_agree=False)


def judge_item(first: Rollout, second: Rollout) -> Item:
    """Two answers to one prompt as a judge gets them."""
    messages = [dict(message) for message in first.prompt.messages]
    prompt = messages[-1]["content"]
    return {"prompt": prompt, "messages": messages, "first": first.completion, "second": second.completion}
