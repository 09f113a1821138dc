"""The routes that sample from models: a chat with streamed answers, and an arena of two models judged blind."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from threading import Lock
from typing import Annotated, Any, Literal

from fastapi import Path, Request
from pydantic import Field

from tether.data.chat import prompt_token_ids
from tether.errors import DataError, TetherError
from tether.models.load import LoadedModel
from tether.ops.sampling import check_sampling
from tether.protocols import Sampling
from tether.redact import redact
from tether.rollout.token_stream import Token, growing_text, stream_tokens
from tether.store.read import RunSummary, read_rollouts
from tether.studio.context import Studio, person_of, studio_of
from tether.studio.label_queues import NewItem
from tether.studio.label_records import verdict
from tether.studio.model_host import ModelAnswer, answers_of_item, in_model_thread
from tether.studio.people import EventStream, Person
from tether.studio.queue_items import messages_of
from tether.studio.replies import BIGGEST, Body, Refused, Reply, api_router
from tether.studio.run_queries import kept_steps, run_with_id
from tether.studio.run_routes import message
from tether.types import Message, Prompt

__all__ = ["Token", "as_prompt", "growing_text", "stream_answer"]


def stream_answer(loaded: LoadedModel, prompt: Prompt, sampling: Sampling, seed: int, turn: Lock) -> Iterator[Token]:
    """Stream the engine's answer for this seed, token by token; `turn` as for `stream_tokens`."""
    check_sampling(sampling)
    ids = prompt_token_ids(loaded.tokenizer, prompt)
    if len(ids) + sampling.max_new_tokens > loaded.context_length:
        raise DataError(
            f"the conversation has {len(ids)} tokens, and with an answer of {sampling.max_new_tokens} exceeds the "
            f"model's context of {loaded.context_length}: start over, or allow fewer tokens"
        )
    yield from stream_tokens(loaded, ids, sampling, seed, turn, name=prompt.id)


def as_prompt(turns: Sequence[dict[str, Any]], name: str) -> Prompt:
    """A conversation as a prompt."""
    return Prompt(name, tuple(Message(role=turn["role"], content=turn["content"]) for turn in turns))


router = api_router()

Id = Annotated[int, Path(ge=0, le=BIGGEST)]
Place = Annotated[int, Field(ge=0, le=BIGGEST)]
Length = Annotated[int, Field(ge=1, le=4096)]
Temperature = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, le=BIGGEST)]

ARENA_GUIDELINES = "Two models answered the same. Which answer is better?"


class Turn(Body):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str = Field(max_length=100_000)


class ChatMessageRequest(Body):
    """A conversation so far, and the run whose model answers."""

    run: Place
    messages: list[Turn] = Field(min_length=1, max_length=500)
    max_new_tokens: Length = 256
    temperature: Temperature = 0.7
    seed: Seed = 0
    stream: bool = False


class AskedModel(Body):
    """A prompt of an arena, a text or a conversation, and its category."""

    prompt: Annotated[str, Field(min_length=1, max_length=100_000)] | Annotated[list[Turn], Field(min_length=1)]
    category: str = Field(default="", max_length=200)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as messages."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return [turn.model_dump() for turn in self.prompt]


class NewArena(Body):
    """Two runs, and the prompts for both."""

    run_a: Place
    run_b: Place
    prompts: list[str | AskedModel] = Field(default_factory=list, max_length=500)
    count: Annotated[int, Field(ge=1, le=500)] = 20
    name: str | None = Field(default=None, min_length=1, max_length=200)
    max_new_tokens: Length | None = None
    temperature: Temperature | None = None
    seed: Seed = 0


class JudgeRequest(Body):
    """The reward model that votes."""

    reward_run: Place


@router.post("/chat")
async def chat(request: Request, asked: ChatMessageRequest) -> Any:
    """Answer a conversation with a run's model; with `stream`, as server-sent `token` events and then `done`.

    The model stops when the client closes the connection.
    """
    return await in_model_thread(_chat, request, asked)


def _chat(request: Request, asked: ChatMessageRequest) -> Any:
    studio = studio_of(request)
    run = run_with_id(studio.opened, asked.run)
    turns = [turn.model_dump() for turn in asked.messages]
    limits = {"max_new_tokens": asked.max_new_tokens, "temperature": asked.temperature, "seed": asked.seed}
    if asked.stream:
        place = studio.streams.enter(person_of(request).id)
        try:
            return EventStream(_spoken(studio.models.stream(run.folder, turns, **limits)), place)
        except BaseException:
            place.leave()
            raise
    [said] = studio.models.answer(run.folder, [turns], **limits)
    return Reply({"text": said.text, "finish": said.finish, "tokens": said.tokens})


async def _spoken(tokens: Iterator[Token]) -> AsyncIterator[str]:
    """The events of a streamed answer; an error is the last of them."""
    count = 0
    try:
        while (token := await in_model_thread(next, tokens, None)) is not None:
            count += 1
            if token.text:
                yield message("token", {"text": token.text}, None)
            if token.finish is not None:
                yield message("done", {"finish": token.finish, "tokens": count}, None)
    except TetherError as error:
        yield message("error", {"error": redact(str(error))}, None)


# -- the arena ----------------------------------------------------------------------------------------------------


@router.post("/arena")
async def new_arena(request: Request, wanted: NewArena) -> Any:
    """Sample answers of two models to the same prompts, and put them into a queue to be judged."""
    return await in_model_thread(_new_arena, request, wanted)


def _new_arena(request: Request, wanted: NewArena) -> Any:
    studio, person = studio_of(request), person_of(request)
    sides = [run_with_id(studio.opened, run) for run in (wanted.run_a, wanted.run_b)]
    prompts = [one if isinstance(one, AskedModel) else AskedModel(prompt=one) for one in wanted.prompts if one]
    prompts = (prompts or _kept_prompts(studio, sides[0]))[: wanted.count if not wanted.prompts else None]
    if not prompts:
        raise Refused(422, f"prompts: {sides[0].name} kept none, so give the prompts")
    answers = [_answers(studio, run, prompts, wanted, seed) for seed, run in enumerate(sides)]
    new = [_arena_item(asked, said, sides) for asked, *said in zip(prompts, *answers, strict=True)]
    meta = {"arena": [run.name for run in sides]}
    name = wanted.name or f"Arena {1 + len(_arenas(studio))}"  # without model names, because annotators read it
    queue = studio.labels.add_queue(person, name, "pair", ARENA_GUIDELINES, meta)
    studio.labels.add_items(person, queue, new, origin={"from": "arena", "runs": meta["arena"]})
    return Reply({"queue_id": queue, "items": len(new)})


def _arena_item(asked: AskedModel, said: Sequence[ModelAnswer], sides: Sequence[RunSummary]) -> NewItem:
    """The answers of both models, with their token ids if both have the same tokenizer."""
    meta: dict[str, Any] = {"category": asked.category} if asked.category else {}
    has_ids = len({(one.tokenizer, one.prompt_ids) for one in said}) == 1 and all(one.ids for one in said)
    if has_ids:
        meta |= {"prompt_ids": list(said[0].prompt_ids), "tokenizer": said[0].tokenizer}
    answers = [
        {"text": one.text, "ended": one.finish == "stop", "source": {"run": run.name}}
        | ({"ids": list(one.ids)} if has_ids else {})
        for one, run in zip(said, sides, strict=True)
    ]
    return NewItem(asked.messages, answers, meta)


def _answers(
    studio: Studio, run: RunSummary, prompts: Sequence[AskedModel], wanted: NewArena, seed: int
) -> list[ModelAnswer]:
    """One answer to each prompt, with the run's sampling settings unless the request overrides them."""
    own = run.config.get("rollout", {})
    length = wanted.max_new_tokens or own.get("max_new_tokens", 128)
    temperature = own.get("temperature", 1.0) if wanted.temperature is None else wanted.temperature
    return studio.models.answer(
        run.folder,
        [asked.messages for asked in prompts],
        max_new_tokens=length,
        temperature=temperature,
        seed=2 * wanted.seed + seed,
    )


def _kept_prompts(studio: Studio, run: RunSummary) -> list[AskedModel]:
    """The distinct prompts of a run's newest kept step."""
    steps = kept_steps(studio.opened, run.id)[-1:]
    found = [messages_of(rollout) for step in steps for rollout in read_rollouts(studio.opened, run.id, step)]
    prompts = {json.dumps(turns): turns for turns in found if any(turn["content"] for turn in turns)}
    return [AskedModel.model_construct(prompt=_as_asked(turns), category="") for turns in prompts.values()]


def _as_asked(turns: Sequence[Mapping[str, Any]]) -> str | list[Turn]:
    if len(turns) == 1 and turns[0]["role"] == "user":
        return turns[0]["content"]
    return [Turn.model_construct(role=turn["role"], content=turn["content"]) for turn in turns]


@router.get("/arena")
def arenas(request: Request) -> Any:
    """Every arena of the workspace."""
    return Reply({"arenas": _arenas(studio_of(request))})


def _arenas(studio: Studio) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for queue in studio.labels.queues(Person(-1, "", "owner")):
        sides = studio.labels.queue(queue["id"]).meta.get("arena")
        if sides:
            kept = {name: queue[name] for name in ("name", "items", "votes", "created")}
            found.append({"queue_id": queue["id"], "run_a": sides[0], "run_b": sides[1]} | kept)
    return found


@router.get("/arena/{queue}")
def arena(request: Request, queue: Id) -> Any:
    """The win rate of each side, with its confidence interval."""
    studio = studio_of(request)
    found = _arena_queue(studio, queue)
    said: dict[str, Counter[str]] = defaultdict(Counter)
    for vote in studio.labels.standing_votes(queue):
        if (one := verdict(vote.order, vote.choice)) is not None:
            said[""][one] += 1
            if category := vote.meta.get("category"):
                said[category][one] += 1
    everything = said.pop("", Counter())
    counts = {"wins_a": everything["0"], "wins_b": everything["1"], "ties": everything["tie"]}
    sides = found.meta["arena"]
    head = {"queue_id": queue, "name": found.name, "run_a": sides[0], "run_b": sides[1]}
    categories = [{"name": name} | win_rate(counter) for name, counter in sorted(said.items())]
    return Reply(head | counts | {"both_bad": everything["both_bad"], "categories": categories} | win_rate(everything))


def win_rate(said: Counter[str]) -> dict[str, Any]:
    """The win rate of the first side with Wilson's 95 % interval; a tie is half a win."""
    votes = said.total()
    if votes == 0:
        return {"votes": 0, "win_rate": None, "low": None, "high": None}
    from tether.evaluation.metrics import wilson

    estimate = wilson(said["0"] + 0.5 * (said["tie"] + said["both_bad"]), votes)
    return {"votes": votes, "win_rate": estimate.value, "low": estimate.low, "high": estimate.high}


@router.post("/arena/{queue}/judge")
async def judge(request: Request, queue: Id, wanted: JudgeRequest) -> Any:
    """Let a reward model vote on every item that it has not voted on."""
    return await in_model_thread(_judge, request, queue, wanted)


def _judge(request: Request, queue: int, wanted: JudgeRequest) -> Any:
    studio, person = studio_of(request), person_of(request)
    _arena_queue(studio, queue)
    run = run_with_id(studio.opened, wanted.reward_run)
    if run.method != "reward":
        raise Refused(422, f"reward_run: {run.name} is not a reward model")
    rows = studio.labels.items(queue)
    scored = studio.models.scores(run.folder, [answer for row in rows for answer in answers_of_item(row)])
    pairs = zip(scored[0::2], scored[1::2], strict=True)
    choices = {row.id: _choice(one - other) for row, (one, other) in zip(rows, pairs, strict=True)}
    return Reply({"votes": studio.labels.vote_as(person, queue, f"judge: {run.name}", choices)})


def _choice(margin: float) -> str:
    return "skip" if math.isnan(margin) else "tie" if margin == 0 else "left" if margin > 0 else "right"


def _arena_queue(studio: Studio, queue: int) -> Any:
    found = studio.labels.queue(queue)
    if "arena" not in found.meta:
        raise Refused(404, f"queue {queue} is not an arena")
    return found
