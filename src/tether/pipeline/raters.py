"""The raters of a collect stage: a score, a judge over HTTP, or people in Tether Studio.

Each turns the sampled answers into ranking records, in groups of one prompt. What a judge or a person said is on disk
as soon as it is said, so a stage that is stopped or killed asks nothing twice.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import combinations
from typing import Any

from tether.config.pipeline_recipe import CollectRecipe, JudgeSettings
from tether.config.rewards import RemotePart
from tether.errors import ConfigError, DataError
from tether.evaluation.judges import ChatJudge, HTTPJudge, RemoteJudge, Verdict
from tether.files import file_digest, read_plain_json
from tether.pipeline.rankings import noisy_ranks, read_lines, write_lines
from tether.pipeline.stage_context import StageContext, resume_words
from tether.rewards.remote import token_from
from tether.seeds import derive_seed
from tether.store.folder import write_whole

ANSWERS, VERDICTS, QUEUE = "answers.jsonl", "verdicts.jsonl", "queue.json"
Sampled = Mapping[str, Any]  # a line of answers.jsonl: id, prompt, answers, ended, and scores where there are some
Groups = list[list[dict[str, Any]]]
PAIRS_AT_ONCE = 16  # pairs that are judged between two writes


def rated(context: StageContext, settings: CollectRecipe, sampled: Sequence[Sampled]) -> tuple[Groups, dict[str, Any]]:
    """(ranking records, in groups of one prompt; figures about the rater)."""
    if settings.rater == "judge":
        return by_judge(context, settings.judge, sampled)
    if settings.rater == "person":
        return by_people(context, settings, sampled)
    return by_score(context, settings, sampled)


def record(sampled: Sampled, places: Sequence[int], ranks: Sequence[int]) -> dict[str, Any]:
    """One ranking of some of the answers, in the usual columns."""
    return {
        "prompt": sampled["prompt"],
        "answers": [sampled["answers"][place] for place in places],
        "ranks": list(ranks),
        "ended": [sampled["ended"][place] for place in places],
    }


# -- a score ------------------------------------------------------------------------------------------------------


def by_score(
    context: StageContext, settings: CollectRecipe, sampled: Sequence[Sampled]
) -> tuple[Groups, dict[str, Any]]:
    """Rank by the scores that were recorded with the answers; an answer without one is left out."""
    groups: Groups = []
    for each in sampled:
        places = [place for place, score in enumerate(each["scores"]) if score is not None]
        draws = random.Random(derive_seed(context.round_seed, "rater", each["id"]))  # noqa: S311 (not a secret)
        scores = [each["scores"][place] for place in places]
        ranks = noisy_ranks(scores, draws, noise=settings.reward.noise, tie=settings.reward.tie)
        if ranks is not None:
            groups.append([record(each, places, ranks)])
    return groups, {"rater": "reward"}


# -- a judge over HTTP --------------------------------------------------------------------------------------------


def judge_of(settings: JudgeSettings, seed: int) -> HTTPJudge:
    """The judge that the settings name."""
    part = RemotePart(
        kind="remote",
        name="judge",
        url=settings.url,
        timeout_seconds=settings.timeout_seconds,
        retries=settings.retries,
        backoff_seconds=settings.backoff_seconds,
        concurrency=settings.concurrency,
        max_response_bytes=settings.max_response_bytes,
        token_env=settings.token_env,
    )
    token = token_from(settings.token_env)
    if settings.protocol == "choices":
        return RemoteJudge(part, token=token, seed=seed)
    own = {"model": settings.model, "instruction": settings.instruction, "max_tokens": settings.max_tokens}
    return ChatJudge(part, token=token, seed=seed, **own)


def by_judge(
    context: StageContext, settings: JudgeSettings, sampled: Sequence[Sampled]
) -> tuple[Groups, dict[str, Any]]:
    """Every pair of answers to a prompt, in both orders; a tie is no record, a failure is counted and left out."""
    judge = judge_of(settings, derive_seed(context.round_seed, "judge"))
    pairs = [
        (number, one, other)
        for number, each in enumerate(sampled)
        for one, other in combinations(range(len(each["answers"])), 2)
        if each["answers"][one] != each["answers"][other]
    ]
    known = _known_verdicts(context)
    advance = context.progress(len(pairs), "judge")
    failures: Counter[str] = Counter()
    for start in range(0, len(pairs), PAIRS_AT_ONCE):
        few = [pair for pair in pairs[start : start + PAIRS_AT_ONCE] if pair not in known]
        if few and context.stop():
            raise context.stopped()
        verdicts = judge.judge([_pair_item(sampled[number], one, other) for number, one, other in few])
        _keep_verdicts(context, few, verdicts)
        for pair, verdict in zip(few, verdicts, strict=True):
            if verdict.choice is None:
                failures[verdict.reason] += 1
            else:
                known[pair] = verdict
        _check_failures(context, settings, failures, len(pairs), judged=len(known))
        advance(
            min(start + PAIRS_AT_ONCE, len(pairs)), f"{sum(failures.values())} without a verdict" if failures else ""
        )
    groups: Groups = [[] for _ in sampled]
    for (number, one, other), verdict in sorted(known.items()):
        if verdict.choice in ("first", "second"):
            ranks = [0, 1] if verdict.choice == "first" else [1, 0]
            groups[number].append(record(sampled[number], (one, other), ranks))
    figures = {
        "rater": "judge",
        "judged_pairs": len(known),
        "tied_pairs": sum(verdict.choice == "tie" for verdict in known.values()),
        "order_disagreement": sum(not verdict.orders_agree for verdict in known.values()),
        "unjudged_pairs": sum(failures.values()),
    }
    return [group for group in groups if group], figures


def _pair_item(sampled: Sampled, one: int, other: int) -> dict[str, Any]:
    messages, answers = sampled["prompt"], sampled["answers"]
    return {
        "prompt": messages[-1]["content"],
        "messages": messages,
        "first": answers[one],
        "second": answers[other],
    }


def _known_verdicts(context: StageContext) -> dict[tuple[int, int, int], Verdict]:
    """What the judge said before the pipeline was stopped."""
    file = context.folder / VERDICTS
    lines = read_lines(file) if file.is_file() else []
    write_lines(file, lines)  # without a last line that a kill cut off
    return {tuple(line["pair"]): Verdict(line["choice"], line["orders_agree"]) for line in lines}


def _keep_verdicts(context: StageContext, pairs: Sequence[tuple[int, int, int]], verdicts: Sequence[Verdict]) -> None:
    with (context.folder / VERDICTS).open("a", encoding="utf-8") as file:
        for pair, verdict in zip(pairs, verdicts, strict=True):
            if verdict.choice is not None:
                line = {"pair": list(pair), "choice": verdict.choice, "orders_agree": verdict.orders_agree}
                file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _check_failures(
    context: StageContext, settings: JudgeSettings, failures: Counter[str], pairs: int, *, judged: int
) -> None:
    """Raise DataError as soon as more pairs have no verdict than the limit allows."""
    failed = sum(failures.values())
    if failed <= settings.max_failure_rate * pairs:
        return
    reasons = ", ".join(f"{reason}: {count}" for reason, count in failures.most_common())
    raise DataError(
        f"stage {context.step.folder}: the judge at {settings.url} gave no verdict on {failed} of {pairs} pairs "
        f"({reasons}), above judge.max_failure_rate = {settings.max_failure_rate}. Its {judged} verdicts are kept: "
        f"repair the judge, then {resume_words(context.root)}"
    )


# -- people in Tether Studio --------------------------------------------------------------------------------------


def by_people(
    context: StageContext, settings: CollectRecipe, sampled: Sequence[Sampled]
) -> tuple[Groups, dict[str, Any]]:
    """Fill a queue of the studio once, then wait until every item has its votes."""
    if find_spec("starlette") is None:
        raise ConfigError("rater person needs Tether Studio: pip install 'tether-rl[studio]'")
    from tether.store.database.open import workspace_at
    from tether.store.read import OpenWorkspace, open_store
    from tether.studio.import_export import export_records
    from tether.studio.label_store import Labels

    person = settings.person
    workspace = workspace_at(context.root.parent)
    with OpenWorkspace(workspace, open_store(workspace)) as opened:
        labels = Labels(opened)
        queue, items = _queue(context, settings, labels, sampled)
        advance = context.progress(items, "votes")
        context.notify(
            f"Waiting for votes on {items} items of queue {queue}: open `tether studio --workspace "
            f"{context.root.parent}`. Ctrl-C stops; {resume_words(context.root)} goes on."
        )
        while True:
            votes = labels.usable_votes(queue)
            said = Counter(vote.repeat_of or vote.item_id for vote in votes)
            complete = sum(count >= person.votes_per_item for count in said.values())
            advance(complete, "")
            if complete >= items:
                break
            _wait(context, person.poll_seconds)
        records = export_records(votes, "rankings")
    groups: dict[str, list[dict[str, Any]]] = {}
    for each in records:
        kept = {name: each[name] for name in ("prompt", "answers", "ranks", "ended")}
        groups.setdefault(json.dumps(kept["prompt"]), []).append(kept)
    return list(groups.values()), {"rater": "person", "queue": queue, "items": items, "votes": len(votes)}


def _wait(context: StageContext, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while True:
        if context.stop():
            raise context.stopped("waiting for votes: stopped")
        left = ends - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, 0.2))


def _queue(context: StageContext, settings: CollectRecipe, labels: Any, sampled: Sequence[Sampled]) -> tuple[int, int]:
    """(the queue of this stage, its number of items); made and filled where there is none yet."""
    from tether.studio.label_records import item_from_record

    person, file = settings.person, context.folder / QUEUE
    name = f"{context.root.name}/{context.step.folder}"
    owner = labels.owner()
    try:
        queue = int(read_plain_json(file)["queue"])
    except (OSError, ValueError, KeyError, TypeError):
        meta = {"votes_per_item": person.votes_per_item, "answers": file_digest(context.folder / ANSWERS)}
        named = [row["id"] for row in labels.queues(owner) if row["name"] == name]
        same = [queue for queue in named if labels.queue(queue).meta.get("answers") == meta["answers"]]
        queue = same[-1] if same else labels.add_queue(owner, name, person.kind, person.guidelines, meta)
        write_whole(file, {"queue": queue})
    there = len(labels.items(queue))
    if there:
        return queue, there
    items = []
    for each in sampled:
        places = [at for at, text in enumerate(each["answers"]) if text not in each["answers"][:at]]
        groups = [places[at : at + 2] for at in range(0, len(places) - 1, 2)] if person.kind == "pair" else [places]
        for group in groups:
            if len(group) > 1:
                one = {"prompt": each["prompt"], "prompt_id": each["id"]}
                one |= {"answers": [each["answers"][at] for at in group], "ended": [each["ended"][at] for at in group]}
                items.append(item_from_record(person.kind, one, f"prompt {each['id']}"))
    if not items:
        raise DataError(f"stage {context.step.folder}: no prompt got two different answers: raise answers.temperature")
    labels.add_items(owner, queue, items, origin={"from": "pipeline", "stage": context.step.folder})
    return queue, len(items)
