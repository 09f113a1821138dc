"""Fill a queue: with answers of runs, with new samples from any model, or with the most uncertain pairs first.

A reward model is most uncertain about a pair whose two answers get nearly the same score. New samples are made by a
separate process: `python -m tether.studio.queue_items PLAN.json` samples the answers and adds them to the queue batch
by batch.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.errors import ConfigError, DataError, TetherError
from tether.store.find import find_model
from tether.store.folder import write_whole
from tether.store.read import OpenWorkspace, RunSummary, list_runs, read_rollouts
from tether.store.recorded import StoredRollout
from tether.studio.context import Studio
from tether.studio.label_queues import NewItem
from tether.studio.label_records import MAX_RANKED, MIN_RANKED, item_from_record, prompt_of
from tether.studio.model_host import Scored, answers_of_item
from tether.studio.people import Person
from tether.studio.replies import Refused
from tether.studio.run_queries import kept_steps, run_with_id, spread

if TYPE_CHECKING:
    from tether.evaluation.sample_answers import Sampled


STEPS_READ = 8  # steps that are read of each run, evenly spaced
REPEAT_AFTER = 8  # items between one and its hidden repeat
RANKED = 4  # default number of answers in a ranking


@dataclass(frozen=True)
class QueueAnswer:
    """An answer of a run, as it was sampled."""

    prompt_id: str
    messages: tuple[Mapping[str, Any], ...]
    text: str
    score: float
    run: str
    step: int
    row: int
    ended: bool = True
    ids: tuple[int, ...] = ()  # of the answer, with its end token; empty if they are not known
    prompt_ids: tuple[int, ...] = ()
    tokenizer: str | None = None  # digest of the tokenizer of the ids
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def source(self) -> dict[str, Any]:
        """The run and step of the answer, and its score there."""
        return {"run": self.run, "step": self.step, "row": self.row, "score": self.score}


def answers_of(opened: OpenWorkspace, run: RunSummary, step: int | None = None) -> list[QueueAnswer]:
    """Answers of a run: of one step, or of a few steps from the first to the last kept one."""
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
    """The messages of the prompt; runs of older versions stored only its text."""
    return tuple(rollout.messages) or ({"role": "user", "content": rollout.prompt_text},)


def _sampled_ids(rollout: StoredRollout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(prompt, answer) as token ids; empty if the answer is not one contiguous block at the end of the row."""
    tokens, response = rollout.columns["token"].tolist(), rollout.columns["response"]
    start = len(tokens) - int(response.sum())
    if not 0 < start < len(tokens) or not response[start:].all():
        return (), ()
    return tuple(tokens[:start]), tuple(tokens[start:])


def pair_items(answers: Sequence[QueueAnswer], count: int, *, uncertain: bool = False) -> list[NewItem]:
    """Pairs of different answers to the same prompt.

    The prompts take turns, and pairs from two runs or from distant steps come first. With `uncertain`, the pairs with
    the closest scores come first.
    """
    pairs = [pair for several in _by_prompt(answers).values() for pair in _ranked_pairs(several)]
    pairs.sort(key=lambda pair: pair[0])
    chosen = [(one, other) for _, one, other in pairs]
    if uncertain:
        chosen.sort(key=lambda pair: abs(pair[0].score - pair[1].score))
    return [_item([one, other]) for one, other in chosen[:count]]


def _by_prompt(answers: Sequence[QueueAnswer]) -> dict[str, list[QueueAnswer]]:
    """The distinct answers to each prompt."""
    found: dict[str, dict[str, QueueAnswer]] = defaultdict(dict)
    for answer in answers:
        if answer.text.strip() and answer.score == answer.score:  # no empty texts and no NaN scores
            found[json.dumps(answer.messages)].setdefault(answer.text, answer)
    return {prompt: list(texts.values()) for prompt, texts in found.items()}


def _ranked_pairs(answers: Sequence[QueueAnswer]) -> list[tuple[int, QueueAnswer, QueueAnswer]]:
    """Every pair with its turn: 0 for the most informative pair of a prompt, and so on."""

    def informative(pair: tuple[QueueAnswer, QueueAnswer]) -> tuple[bool, int]:
        one, other = pair
        return one.run == other.run, -abs(one.step - other.step)

    pairs = sorted(combinations(answers, 2), key=informative)
    return [(turn, one, other) for turn, (one, other) in enumerate(pairs)]


def ranking_items(answers: Sequence[QueueAnswer], count: int, size: int = RANKED) -> list[NewItem]:
    """Up to `size` different answers to each prompt, to be ranked."""
    groups = [several[:size] for several in _by_prompt(answers).values() if len(several) >= MIN_RANKED]
    return [_item(group) for group in groups[:count]]


def demonstration_items(answers: Sequence[QueueAnswer], count: int) -> list[NewItem]:
    """Only the prompts."""
    prompts = {json.dumps(answer.messages): answer for answer in answers}
    return [
        NewItem(_messages(one), (), _meta(one) | {"source": {"run": one.run, "step": one.step}})
        for one in list(prompts.values())[:count]
    ]


def _item(answers: Sequence[QueueAnswer]) -> NewItem:
    """Token ids are kept if all answers have the same prompt tokens and the same tokenizer."""
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
    """Items of a kind from the answers of one or several runs; `rescore` may replace the scores."""
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
        raise DataError("among the kept answers, no prompt has two different ones: choose another run")
    return found


def with_repeats(items: Sequence[NewItem], fraction: float) -> list[NewItem]:
    """The items with hidden repeats of a fraction of them, each well after the item that it repeats."""
    early = range(max(1, len(items) - REPEAT_AFTER))
    again = set(spread(early, min(round(fraction * len(items)), len(early))))
    mixed: list[NewItem] = []
    places: dict[int, int] = {}  # positions in `mixed` of the items that are repeated
    for number in range(len(items) + REPEAT_AFTER):
        if number < len(items):
            places[number] = len(mixed)
            mixed.append(items[number])
        if number - REPEAT_AFTER in again:
            place = places[number - REPEAT_AFTER]
            mixed.append(replace(mixed[place], repeats=place))
    return mixed


# -- uncertain pairs first ----------------------------------------------------------------------------------------

MAX_SCORED = 4000  # answers per request


def reward_model(studio: Studio, run_id: int | None) -> RunSummary | None:
    """The given reward model, or the newest finished one; None if there is none."""
    if run_id is not None:
        named = run_with_id(studio.opened, run_id)
        if named.method != "reward":
            raise Refused(422, f"reward_run: {named.name} is not a reward model")
        return named
    found = [run for run in list_runs(studio.opened) if run.method == "reward" and _has_model(run)]
    return max(found, key=lambda run: run.id, default=None)  # by id, because the clock may go back


def _has_model(run: RunSummary) -> bool:
    try:
        return run.state == "done" and bool(find_model(str(run.folder)))
    except ConfigError:
        return False


def scored_by(studio: Studio, model: RunSummary, answers: Sequence[QueueAnswer]) -> list[QueueAnswer]:
    """The answers with this reward model's scores instead of their recorded ones."""
    few = answers[:MAX_SCORED]
    asked = [Scored(one.messages, one.text, one.ended, one.ids, one.prompt_ids, one.tokenizer) for one in few]
    scores = studio.models.scores(model.folder, asked)
    return [replace(one, score=score) for one, score in zip(few, scores, strict=True)]


def ask_uncertain_first(studio: Studio, person: Person, queue: int, model: RunSummary) -> int:
    """Order a queue's pairs by this reward model's uncertainty, the closest scores first; returns their number."""
    if studio.labels.queue(queue).kind != "pair":
        raise DataError(f"queue {queue} holds no pairs: only pairs can be ordered by uncertainty")
    rows = studio.labels.items(queue)[: MAX_SCORED // 2]
    scores = studio.models.scores(model.folder, [answer for row in rows for answer in answers_of_item(row)])
    margins = [abs(one - other) for one, other in zip(scores[0::2], scores[1::2], strict=True)]
    priorities = {row.id: -margin for row, margin in zip(rows, margins, strict=True) if margin == margin}
    studio.labels.set_priorities(person, queue, priorities, model=model.name)
    return len(priorities)


# -- new samples --------------------------------------------------------------------------------------------------

Plan = dict[str, Any]


def write_sampling_plan(folder: Path, plan: Plan, records: Sequence[dict[str, Any]]) -> Path:
    """Write the plan and its prompts to files; returns the plan's file. Invalid prompts raise here."""
    place = folder / f"sample-{plan['queue']}-{plan['uid']}.json"
    if records:
        prompts = place.with_suffix(".prompts.jsonl")
        asked = [_prompt_record(record, f"record {number}") for number, record in enumerate(records, start=1)]
        prompts.write_text("".join(json.dumps(record) + "\n" for record in asked), encoding="utf-8")
        plan |= {"prompts": str(prompts)}
    write_whole(place, plan)
    return place


def _prompt_record(record: dict[str, Any], place: str) -> dict[str, Any]:
    kept = {name: record[name] for name in ("id", "tools", "tags", "category") if record.get(name) is not None}
    return {"prompt": prompt_of(record, place)} | kept


def carry_out(plan: Plan) -> int:
    """Sample, and add the items to the queue; returns their number."""
    from tether.data.prompts import read_prompts
    from tether.data.records import tokenizer_digest
    from tether.evaluation.sample_answers import sample_answers, unique_prompts
    from tether.models.load import load_causal_lm
    from tether.protocols import Sampling
    from tether.store.database.open import workspace_at
    from tether.store.find import find_model
    from tether.store.read import OpenWorkspace, open_store
    from tether.studio.label_store import Labels

    prompts = unique_prompts(read_prompts(plan["prompts"]))[: plan["count"]]
    loaded = load_causal_lm(find_model(plan["model"]), dtype="auto", device="auto", seed=plan["seed"])
    sampling = Sampling(plan["max_new_tokens"], plan["temperature"], plan["top_p"])
    workspace = workspace_at(plan["workspace"])
    opened = OpenWorkspace(workspace, open_store(workspace))
    labels, added = Labels(opened), 0
    owner, digest = labels.owner(), tokenizer_digest(loaded.tokenizer)
    kind = labels.queue(plan["queue"]).kind
    batch: list[NewItem] = []
    origin = {"from": "model", "model": plan["model"], "prompts": plan["prompts"]}

    def put() -> None:
        nonlocal added, batch
        if batch:
            labels.add_items(owner, plan["queue"], with_repeats(batch, plan["repeats"]), origin=origin)
            added += len(batch)
            batch = []

    try:
        for sampled in sample_answers(
            loaded,
            prompts,
            plan["answers"],
            sampling,
            plan["seed"],
            _report,
            skip=lambda _, why: print(f"skipped: {why}"),
        ):
            batch += items_of(kind, sampled, digest, plan["model"])
            if len(batch) >= PUT_AT:
                put()
        put()
    finally:
        opened.close()
    return added


PUT_AT = 50  # items in one transaction


def _report(done: int, of: int) -> None:
    print(f"sampled {done} of {of} prompts", flush=True)


def items_of(kind: str, sampled: Sampled, digest: str, model: str) -> Iterator[NewItem]:
    """A ranking of all different answers to a prompt, or pairs in which each answer occurs once."""
    rollouts = sampled.different().rollouts[:MAX_RANKED]
    groups = [rollouts[at : at + 2] for at in range(0, len(rollouts) - 1, 2)] if kind == "pair" else [rollouts]
    for group in groups:
        if len(group) < MIN_RANKED:
            continue
        prompt = group[0].prompt
        record = {name: prompt.meta[name] for name in ("tags", "category") if name in prompt.meta}
        record |= {"tools": list(prompt.tools)} if prompt.tools else {}
        record |= {
            "prompt": [dict(message) for message in prompt.messages],
            "prompt_id": prompt.id,
            "answers": [one.completion for one in group],
            "ended": [one.finish == "stop" for one in group],
            "token_ids": [one.token_ids[one.response_mask].tolist() for one in group],
            "prompt_token_ids": group[0].token_ids[~group[0].response_mask].tolist(),
            "tokenizer": digest,
        }
        item = item_from_record(kind, record, f"prompt {prompt.id}")
        answers = [dict(answer) | {"source": {"model": model}} for answer in item.answers]
        yield NewItem(item.prompt, answers, item.meta)


def main(words: Sequence[str]) -> int:
    """Run the plan; returns the exit code."""
    try:
        added = carry_out(json.loads(Path(words[0]).read_text(encoding="utf-8")))
        if not added:
            raise DataError("no prompt got two different answers: raise the temperature or the number of answers")
    except TetherError as error:
        print(f"tether: {error}", flush=True)
        return 2
    print(f"{added} items are in the queue", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
