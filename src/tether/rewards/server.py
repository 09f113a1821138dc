"""A reward server on Python's standard library: loopback by default, one bearer token, one request at a time.

`RewardService` turns a request's JSON into scores; `RewardServer` is the HTTP around it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch

from tether.config.load import load_recipe
from tether.config.read_yaml import read_value
from tether.config.recipes import RLRecipe
from tether.errors import ConfigError, DataError, UsageError
from tether.http_server import JSON, LOOPBACK, MAX_BYTES, BadRequestError, TokenServer
from tether.protocols import RewardFn
from tether.rewards.model import RewardModelReward
from tether.rewards.parts import build_reward
from tether.rewards.remote import VERSION
from tether.rewards.scoring import CombinedReward, failure_reasons
from tether.store.find import find_model
from tether.types import Finish, Message, Prompt, Rollout, Score

MAX_ITEMS = 4096
FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length", "error": "error"}


@dataclass
class RewardService:
    """Scores one request at a time, because threads cannot share a model."""

    reward: RewardFn
    model: RewardModelReward | None = None  # the first reward model, where there is one
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, body: bytes) -> dict[str, Any]:
        """The response to a request; raises BadRequestError where the request is invalid."""
        items = read_items(body)
        rollouts: dict[str, Rollout] = {}
        errors: dict[str, str] = {}
        for place, (id, item) in enumerate(items.items()):
            try:
                rollouts[id] = self.rollout(id, item, place)
            except DataError as error:
                errors[id] = str(error)
        with self.lock:
            scores = dict(zip(rollouts, self.reward(list(rollouts.values())), strict=True)) if rollouts else {}
        return {"scores": [_entry(id, scores.get(id), errors.get(id)) for id in items]}

    def rollout(self, id: str, item: dict[str, Any], place: int) -> Rollout:
        """One item as a rollout, encoded with the reward model's tokenizer where there is one."""
        prompt = Prompt(id, _messages(item), _text(item, "answer", optional=True))
        completion = _text(item, "completion") or ""
        finish = item.get("finish", "stop")
        if not isinstance(finish, str) or finish not in FINISHES:
            raise DataError(f"finish must be one of {', '.join(FINISHES)}")
        tokens, mask = self.encode(prompt, completion, ended=finish == "stop")
        nothing = torch.zeros(len(tokens))
        return Rollout(prompt, place, 0, tokens, mask, nothing, nothing, completion, FINISHES[finish])

    def encode(self, prompt: Prompt, completion: str, *, ended: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and response mask; every reward model encodes the text again with its own tokenizer."""
        if self.model is None:
            return torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool)
        tokens = torch.tensor(self.model.encode(prompt, completion, ended=ended))
        return tokens, torch.arange(len(tokens)) > 0


def build_service(target: str) -> RewardService:
    """Build from a reward model's folder, or from parts as in a recipe: `ended`, `{kind: json}`, `[{...}, {...}]`."""
    reward = build_reward(reward_parts(target), own=None, policy=None, seed=0)
    assert isinstance(reward, CombinedReward)
    models = [part.reward for part in reward.parts if isinstance(part.reward, RewardModelReward)]
    return RewardService(reward, models[0] if models else None)


def read_items(body: bytes) -> dict[str, dict[str, Any]]:
    """The items of a request, by id."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequestError("the request is not JSON") from None
    if not isinstance(request, dict) or request.get("version") != VERSION:
        raise BadRequestError(f'the request must be an object with "version": {VERSION}')
    items = request.get("items")
    if not isinstance(items, list) or not items or len(items) > MAX_ITEMS:
        raise BadRequestError(f'"items" must be a list of 1 to {MAX_ITEMS} items')
    if not all(isinstance(item, dict) and isinstance(item.get("id"), str) for item in items):
        raise BadRequestError('every item must be an object with an "id" that is text')
    by_id = {item["id"]: item for item in items}
    if len(by_id) != len(items):
        raise BadRequestError("two items have the same id")
    return by_id


def reward_parts(target: str) -> Sequence[Any]:
    """The parts that a command-line argument names: a reward model's folder, its run's folder, or recipe parts."""
    if Path(target).expanduser().is_dir():
        given: Any = {"kind": "model", "path": find_model(target)}
    else:
        try:
            given = read_value(target)
        except Exception as error:
            raise ConfigError(f"{target} is neither a folder nor a part such as '{{kind: ended}}'") from error
        if isinstance(given, str):
            if "/" in given or "\\" in given:
                raise ConfigError(f"{target}: there is no such folder")
            given = {"kind": given}
    recipe = load_recipe("ppo", None, ["--reward.parts", json.dumps(given if isinstance(given, list) else [given])])
    assert isinstance(recipe, RLRecipe)
    return recipe.reward.parts


def _messages(item: dict[str, Any]) -> tuple[Message, ...]:
    messages = item.get("messages")
    if messages is None:
        return (Message(role="user", content=_text(item, "prompt") or ""),)
    if not isinstance(messages, list) or not messages:
        raise DataError("messages must be a non-empty list")
    if not all(isinstance(message, dict) for message in messages):
        raise DataError("every message must be {role, content}")
    return tuple(
        Message(role=_text(message, "role") or "", content=_text(message, "content") or "") for message in messages
    )


def _text(item: dict[str, Any], key: str, *, optional: bool = False) -> str | None:
    value = item.get(key)
    if isinstance(value, str) or (optional and value is None):
        return value
    raise DataError(f"{key} must be text")


def _entry(id: str, score: Score | None, error: str | None) -> dict[str, Any]:
    if score is not None and score.valid and math.isfinite(score.value):
        return {"id": id, "value": score.value}
    reason = (score.error or failure_reasons([score])) if score else ""
    return {"id": id, "value": None, "error": error or reason or "not scored"}


TOKEN_VARIABLE = "TETHER_REWARD_TOKEN"  # noqa: S105 (the variable's name, not a secret)


class RewardServer(TokenServer):
    """Scores what is posted to it."""

    paths = ("/", "/score")

    def __init__(self, service: RewardService, *, host: str, port: int, token: str, max_bytes: int = MAX_BYTES) -> None:
        self.service = service
        super().__init__(host=host, port=port, token=token, max_bytes=max_bytes)

    @property
    def url(self) -> str:
        """The URL to post to."""
        return f"{self.address}/score"

    def health(self) -> dict[str, Any]:
        """That it is up, and the version of its protocol."""
        return {"status": "ok", "version": VERSION}

    def answer(self, path: str, body: bytearray) -> tuple[HTTPStatus, str, bytes]:  # noqa: ARG002
        """Scores for a batch."""
        try:
            status, found = HTTPStatus.OK, self.service.answer(bytes(body))
        except BadRequestError:
            raise
        except Exception as error:
            reason = f"the reward raised {type(error).__name__}: {error}"
            status, found = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": reason}
        return status, JSON, json.dumps(found).encode()


def serve(target: str, *, host: str, port: int, json_output: bool) -> int:
    """Serve until interrupted; prints the address and the token once it listens."""
    service = build_service(target)
    chosen = os.environ.get(TOKEN_VARIABLE, "").strip()
    token = chosen or secrets.token_urlsafe(24)
    try:
        server = RewardServer(service, host=host, port=port, token=token)
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on {host}, port {port}: {error}; choose another --port or --host") from error
    shown = None if chosen else token
    if json_output:
        print(json.dumps({"url": server.url, "token": shown, "token_env": TOKEN_VARIABLE}), flush=True)
    else:
        print(_welcome(target, server.url, shown), flush=True)
    if host not in LOOPBACK:
        print(
            f"tether: {host} can be reached from outside, and HTTP is not encrypted: put TLS in front", file=sys.stderr
        )
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with server:
            server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def _welcome(target: str, url: str, token: str | None) -> str:
    export = f"export {TOKEN_VARIABLE}={token}" if token else f"the token is the one in {TOKEN_VARIABLE}"
    part = f"reward:\n  parts:\n    - {{kind: remote, url: {url!r}, token_env: {TOKEN_VARIABLE}}}"
    return (
        f"Scoring with {target} at {url}. Ctrl-C stops it.\n\nWhere the run is:  {export}\nIn its recipe:\n\n{part}\n"
    )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
