"""Models for the page: loaded on first use, a few kept in memory, one request at a time, in separate threads.

Routes share a pool of 40 threads. An answer takes seconds, and a model handles one request at a time. Without a limit,
40 requests to models would occupy every thread, and all other routes would wait. So models have their own threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from tether.studio.connections import freeze_gc

if TYPE_CHECKING:
    from tether.studio.chat_routes import Token


AT_ONCE = 8

P = ParamSpec("P")
T = TypeVar("T")
_waiting: RunVar[anyio.CapacityLimiter] = RunVar("model_threads")


async def in_model_thread(call: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """Run `call` in one of the `AT_ONCE` threads for models, and return its result."""
    return await anyio.to_thread.run_sync(lambda: call(*given, **named), limiter=_limiter())


def _limiter() -> anyio.CapacityLimiter:
    try:
        return _waiting.get()
    except LookupError:
        made = anyio.CapacityLimiter(AT_ONCE)
        _waiting.set(made)
        return made


# -- models -------------------------------------------------------------------------------------------------------

MAX_MODELS = 2  # in memory at a time


@dataclass(frozen=True)
class ModelAnswer:
    """An answer of a model, and its token ids."""

    text: str
    finish: str
    tokens: int
    ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    tokenizer: str | None = None  # digest of the tokenizer of the ids


@dataclass(frozen=True)
class Scored:
    """An answer for a reward model to score, with its sampled token ids if they are known."""

    turns: Sequence[Mapping[str, Any]]
    text: str
    ended: bool = True
    ids: Sequence[int] = ()
    prompt_ids: Sequence[int] = ()
    tokenizer: str | None = None


def answers_of_item(row: Any) -> list[Scored]:
    """The answers of an item of a queue."""
    known = (row.meta.get("prompt_ids", ()), row.meta.get("tokenizer"))
    return [
        Scored(row.prompt, answer["text"], answer.get("ended", True), answer.get("ids", ()), *known)
        for answer in row.answers
    ]


class ModelHost:
    """Answers and scores of saved models. torch is imported on first use, so an idle server stays small."""

    def __init__(self, limit: int = MAX_MODELS) -> None:
        self._limit = limit
        self._engines: OrderedDict[tuple[str, float], Any] = OrderedDict()
        self._lock = threading.Lock()

    def answer(
        self,
        folder: Path,
        conversations: Sequence[Sequence[dict[str, str]]],
        *,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        samples: int = 1,
    ) -> list[ModelAnswer]:
        """Answer each conversation with a run's model, `samples` times each, in order."""
        from tether.data.records import tokenizer_digest
        from tether.protocols import Sampling
        from tether.studio.chat_routes import as_prompt

        prompts = [as_prompt(turns, f"studio-{place}") for place, turns in enumerate(conversations)]
        with self._lock:
            engine = self._engine(folder)
            sampling = Sampling(max_new_tokens, temperature)
            rollouts = engine.generate(prompts, sampling, samples_per_prompt=samples, seed=seed)
            digest = tokenizer_digest(engine.loaded.tokenizer)
        return [
            ModelAnswer(
                rollout.completion,
                rollout.finish,
                rollout.response_length,
                tuple(rollout.token_ids[rollout.response_mask].tolist()),
                tuple(rollout.token_ids[~rollout.response_mask].tolist()),
                digest,
            )
            for rollout in rollouts
        ]

    def stream(
        self, folder: Path, turns: Sequence[dict[str, str]], *, max_new_tokens: int, temperature: float, seed: int
    ) -> Iterator[Token]:
        """Stream the answer that `answer` would give to one conversation, token by token."""
        from tether.protocols import Sampling
        from tether.studio.chat_routes import as_prompt, stream_answer

        with self._lock:
            loaded = self._engine(folder).loaded
        sampling = Sampling(max_new_tokens, temperature)
        yield from stream_answer(loaded, as_prompt(turns, "studio-0"), sampling, seed, self._lock)

    def scores(self, folder: Path, answers: Sequence[Scored]) -> list[float]:
        """Score each answer with a run's reward model."""
        from tether.data.examples import RowEncoder
        from tether.data.records import SampledIds
        from tether.types import Message

        with self._lock:
            reward = _reward_model(folder)
            known = reward.vocabulary
            encode = RowEncoder(known.tokenizer, known.end_id, known.context_length, notify=lambda text: None)  # noqa: ARG005
            rows = []
            for place, one in enumerate(answers):
                messages = tuple(cast(Message, dict(turn)) for turn in one.turns)
                has_ids = one.tokenizer is not None and one.ids and one.prompt_ids
                sampled = SampledIds(one.tokenizer or "", one.prompt_ids, [one.ids]) if has_ids else None
                [row] = encode.rows(messages, [one.text], f"answer {place}", "answer", [one.ended], sampled)
                rows.append(row.tokens)
            return reward.values(rows)

    def _engine(self, folder: Path) -> Any:
        """The engine of a run's model; a model that was saved again is loaded again."""
        from tether.models.load import load_causal_lm
        from tether.rollout.native import NativeEngine
        from tether.store.find import find_model

        path = Path(find_model(str(folder)))
        key = (str(path), path.stat().st_mtime if path.exists() else 0.0)
        if key not in self._engines:
            self._engines[key] = NativeEngine(load_causal_lm(str(path), dtype="auto", device="auto", seed=0))
            while len(self._engines) > self._limit:
                self._engines.popitem(last=False)
            freeze_gc()
        self._engines.move_to_end(key)
        return self._engines[key]


def _reward_model(folder: Path) -> Any:
    """The reward model of a run; adapters are applied to the base model of the run's recipe."""
    from tether.config.rewards import ModelPart
    from tether.config.sections import RolesSettings
    from tether.models.load import load_causal_lm
    from tether.models.sharing import build_sharing
    from tether.rewards.model import RewardModelReward
    from tether.store.find import find_model, run_config

    path, config = find_model(str(folder)), run_config(str(folder))
    if config.get("roles", {}).get("mode") != "lora":
        return RewardModelReward.load(ModelPart(kind="model", path=path), None)
    base = load_causal_lm(find_model(config["model"]["path"]), dtype="auto", device="auto", seed=0)
    sharing = build_sharing(base.model, RolesSettings(**config["roles"]), 0)
    return RewardModelReward.load(ModelPart(kind="model", path=path, shared=True), base, sharing.load_scalar)
