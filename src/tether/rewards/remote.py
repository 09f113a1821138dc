"""A reward model behind HTTP. What it cannot score is masked and counted by reason, never treated as zero.

The protocol, version 1 (docs/rewards.md): POST `{"version": 1, "items": [{"id", "prompt", "messages", "completion",
"answer", "finish"}]}`, answered by `{"scores": [{"id", "value"}]}` in any order, with `"value": null` and an `"error"`
for an item that cannot be scored.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tether.config.rewards import RemotePart
from tether.errors import ConfigError
from tether.http_client import PostError, post
from tether.redact import remember_secret
from tether.rewards.pool import in_order
from tether.rewards.scoring import failed
from tether.seeds import derive_seed
from tether.types import Rollout, Score

VERSION = 1
MAX_WAIT = 60.0  # seconds before a retry


class RemoteReward:
    """Posts rollouts in batches, several at the same time; retries a batch with growing waits where that may help."""

    def __init__(
        self, part: RemotePart, *, token: str | None, seed: int, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.part = part
        self.token = token
        self.seed = seed
        self.sleep = sleep

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout."""
        starts = range(0, len(rollouts), self.part.batch_size)
        batches = in_order(
            lambda start: self._batch(start, rollouts[start : start + self.part.batch_size]),
            starts,
            self.part.concurrency,
        )
        return [score for batch in batches for score in batch]

    def _batch(self, start: int, rollouts: Sequence[Rollout]) -> list[Score]:
        ids = [str(start + place) for place in range(len(rollouts))]
        body = json.dumps({"version": VERSION, "items": list(map(item, ids, rollouts))}).encode()
        for attempt in range(self.part.retries + 1):
            try:
                answer = post(
                    self.part.url,
                    body,
                    token=self.token,
                    timeout_seconds=self.part.timeout_seconds,
                    max_bytes=self.part.max_response_bytes,
                )
                return read_scores(answer, ids)
            except PostError as error:
                if not error.retriable or attempt == self.part.retries:
                    return [failed(error.reason)] * len(rollouts)
                self.sleep(self.wait(start, attempt))
        raise AssertionError("the last attempt returns")

    def wait(self, start: int, attempt: int) -> float:
        """Seconds before the next attempt: doubled each time, with a random factor of 0.5 to 1.5."""
        spread = 0.5 + random.Random(derive_seed(self.seed, "backoff", start, attempt)).random()  # noqa: S311
        return min(self.part.backoff_seconds * 2**attempt * spread, MAX_WAIT)


def item(id: str, rollout: Rollout) -> dict[str, Any]:
    """The JSON of one rollout for the server."""
    return {
        "id": id,
        "prompt": rollout.prompt.messages[-1]["content"],
        "messages": [dict(message) for message in rollout.prompt.messages],
        "completion": rollout.completion,
        "answer": rollout.prompt.answer,
        "finish": rollout.finish,
    }


def read_scores(answer: bytes, ids: Sequence[str]) -> list[Score]:
    """The scores by id. A faulty item fails alone; an unreadable response fails all items.

    Scores for unknown ids are ignored.
    """
    try:
        scores = json.loads(answer)["scores"]
    except (ValueError, RecursionError):
        return [failed("not_json")] * len(ids)
    except (TypeError, KeyError, IndexError):
        return [failed("wrong_shape")] * len(ids)
    if not isinstance(scores, list) or not all(isinstance(score, dict) for score in scores):
        return [failed("wrong_shape")] * len(ids)
    values = {score["id"]: score.get("value") for score in scores if isinstance(score.get("id"), str)}
    times = Counter(score["id"] for score in scores if isinstance(score.get("id"), str))
    return [_score(values.get(id), times[id]) for id in ids]


def _score(value: Any, times: int) -> Score:
    if times != 1:
        return failed("missing" if times == 0 else "duplicate")
    if value is None:
        return failed("refused")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return failed("not_a_number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return Score(number) if math.isfinite(number) else failed("not_finite")


def token_from(variable: str | None) -> str | None:
    """The bearer token in an environment variable; None where no variable is named."""
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ConfigError(f"reward.parts: token_env names {variable}, which is not set: export {variable}=...")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"reward.parts: the token in {variable} has characters that an HTTP header cannot contain")
    remember_secret(token)
    return token
