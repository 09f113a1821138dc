"""What to ask people: answers that runs gave, as items of a queue."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from tether.errors import DataError
from tether.store.read import OpenWorkspace, RunSummary, read_rollouts
from tether.store.recorded import StoredRollout
from tether.studio.label_queues import NewItem
from tether.studio.run_queries import kept_steps, spread
from tether.studio.votes import MIN_RANKED

STEPS_READ = 8  # of each run, spread from the first to the last
REPEAT_AFTER = 8  # items between one and its hidden repeat
RANKED = 4  # answers of a ranking, unless told otherwise


@dataclass(frozen=True)
class QueueAnswer:
    """An answer that a run gave, as it was sampled."""

    prompt_id: str
    messages: tuple[Mapping[str, Any], ...]
    text: str
    score: float
    run: str
    step: int
    row: int
    ended: bool = True
    ids: tuple[int, ...] = ()  # of the answer, with the token that ended it; none where they are not known
    prompt_ids: tuple[int, ...] = ()
    tokenizer: str | None = None  # the digest of the one that the ids are of
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def source(self) -> dict[str, Any]:
        """Where it came from, and what it scored there."""
        return {"run": self.run, "step": self.step, "row": self.row, "score": self.score}


def answers_of(opened: OpenWorkspace, run: RunSummary, step: int | None = None) -> list[QueueAnswer]:
    """Answers of a run: those of one step, or of a few from its first kept step to its last."""
    kept = kept_steps(opened, run.id)
    if step is not None and step not in kept:
        raise DataError(f"step: the answers of step {step} of {run.name} were not kept")
    steps = [step] if step is not None else spread(kept, STEPS_READ)
    return [_answer(run, rollout) for at in steps for rollout in read_rollouts(opened, run.id, at)]


def _answer(run: RunSummary, rollout: StoredRollout) -> QueueAnswer:
    prompt_ids, ids = _sampled_ids(rollout)
    return QueueAnswer(
        prompt_id=rollout.prompt_id,
        messages=messages_of(rollout),
        text=rollout.completion,
        score=rollout.score,
        run=run.name,
        step=rollout.step,
        row=rollout.row,
        ended=rollout.finish == "stop",
        ids=ids,
        prompt_ids=prompt_ids,
        tokenizer=run.environment.get("tokenizer"),
        tools=tuple(rollout.tools),
    )


def messages_of(rollout: StoredRollout) -> tuple[Mapping[str, Any], ...]:
    """The prompt as it was asked; runs of older versions kept its text alone."""
    return tuple(rollout.messages) or ({"role": "user", "content": rollout.prompt_text},)


def _sampled_ids(rollout: StoredRollout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(prompt, answer) as token ids; empty where the answer is not the one stretch that ends the row."""
    tokens, response = rollout.columns["token"].tolist(), rollout.columns["response"]
    start = len(tokens) - int(response.sum())
    if not 0 < start < len(tokens) or not response[start:].all():
        return (), ()
    return tuple(tokens[:start]), tuple(tokens[start:])


def pair_items(answers: Sequence[QueueAnswer], count: int, *, uncertain: bool = False) -> list[NewItem]:
    """Pairs of different answers to the same prompt.

    In turn over the prompts, answers of two runs or two steps that are far apart first. With `uncertain`, the pairs
    whose scores are closest: those that the reward is least sure of.
    """
    pairs = [pair for several in _by_prompt(answers).values() for pair in _ranked_pairs(several)]
    pairs.sort(key=lambda pair: pair[0])
    chosen = [(one, other) for _, one, other in pairs]
    if uncertain:
        chosen.sort(key=lambda pair: abs(pair[0].score - pair[1].score))
    return [_item([one, other]) for one, other in chosen[:count]]


def _by_prompt(answers: Sequence[QueueAnswer]) -> dict[str, list[QueueAnswer]]:
    """The answers to each prompt, each text once."""
    found: dict[str, dict[str, QueueAnswer]] = defaultdict(dict)
    for answer in answers:
        if answer.text.strip() and answer.score == answer.score:  # nothing can be said of an empty one
            found[json.dumps(answer.messages)].setdefault(answer.text, answer)
    return {prompt: list(texts.values()) for prompt, texts in found.items()}


def _ranked_pairs(answers: Sequence[QueueAnswer]) -> list[tuple[int, QueueAnswer, QueueAnswer]]:
    """Every pair with its turn: 0 for the most telling of a prompt, and so on."""

    def telling(pair: tuple[QueueAnswer, QueueAnswer]) -> tuple[bool, int]:
        one, other = pair
        return one.run == other.run, -abs(one.step - other.step)

    pairs = sorted(combinations(answers, 2), key=telling)
    return [(turn, one, other) for turn, (one, other) in enumerate(pairs)]


def ranking_items(answers: Sequence[QueueAnswer], count: int, size: int = RANKED) -> list[NewItem]:
    """Up to `size` different answers to each prompt, to be put in order."""
    groups = [several[:size] for several in _by_prompt(answers).values() if len(several) >= MIN_RANKED]
    return [_item(group) for group in groups[:count]]


def demonstration_items(answers: Sequence[QueueAnswer], count: int) -> list[NewItem]:
    """The prompts alone."""
    prompts = {json.dumps(answer.messages): answer for answer in answers}
    return [
        NewItem(_messages(one), (), _meta(one) | {"source": {"run": one.run, "step": one.step}})
        for one in list(prompts.values())[:count]
    ]


def _item(answers: Sequence[QueueAnswer]) -> NewItem:
    """The token ids are kept where all answers were sampled after the same tokens, by the same tokenizer."""
    first, meta = answers[0], _meta(answers[0])
    same = all((one.tokenizer, one.prompt_ids) == (first.tokenizer, first.prompt_ids) and one.ids for one in answers)
    has_ids = same and first.tokenizer is not None and bool(first.prompt_ids)
    if has_ids:
        meta |= {"prompt_ids": list(first.prompt_ids), "tokenizer": first.tokenizer}
    texts = [
        {"text": one.text, "ended": one.ended, "source": one.source} | ({"ids": list(one.ids)} if has_ids else {})
        for one in answers
    ]
    return NewItem(_messages(first), texts, meta)


def _meta(answer: QueueAnswer) -> dict[str, Any]:
    tools = {"tools": [dict(tool) for tool in answer.tools]} if answer.tools else {}
    return {"prompt_id": answer.prompt_id} | tools


def _messages(answer: QueueAnswer) -> list[dict[str, Any]]:
    return [dict(message) for message in answer.messages]


def items_from_run(opened: OpenWorkspace, kind: str, runs: Sequence[RunSummary], **wanted: Any) -> list[NewItem]:
    """Items of a kind from the answers of one run or several; `rescore` may give the answers other scores."""
    answers = [answer for run in runs for answer in answers_of(opened, run, wanted.get("step"))]
    if (rescore := wanted.get("rescore")) is not None:
        answers = rescore(answers)
    count = wanted["count"]
    if kind == "pair":
        found = pair_items(answers, count, uncertain=wanted.get("uncertain", False))
    elif kind == "ranking":
        found = ranking_items(answers, count, wanted.get("size") or RANKED)
    else:
        found = demonstration_items(answers, count)
    if not found:
        raise DataError("there are no two different answers to one prompt among those that were kept: name another run")
    return found


def with_repeats(items: Sequence[NewItem], fraction: float) -> list[NewItem]:
    """The items with hidden repeats of a fraction of them among them, each well after the one that it repeats."""
    early = range(max(1, len(items) - REPEAT_AFTER))
    again = set(spread(early, min(round(fraction * len(items)), len(early))))
    mixed: list[NewItem] = []
    places: dict[int, int] = {}  # where the items that are asked again stand in `mixed`
    for number in range(len(items) + REPEAT_AFTER):
        if number < len(items):
            places[number] = len(mixed)
            mixed.append(items[number])
        if number - REPEAT_AFTER in again:
            place = places[number - REPEAT_AFTER]
            mixed.append(replace(mixed[place], repeats=place))
    return mixed
