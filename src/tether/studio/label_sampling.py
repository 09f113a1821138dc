"""Filling a queue with answers of any model to any prompts: a plan, and a process of its own that carries it out.

`python -m tether.studio.label_sampling PLAN.json` samples the answers and puts them into the queue, batch by batch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.errors import DataError, TetherError
from tether.store.folder import write_whole
from tether.studio.label_queues import NewItem
from tether.studio.label_records import item_from_record, prompt_of
from tether.studio.queue_items import with_repeats
from tether.studio.votes import MAX_RANKED, MIN_RANKED

if TYPE_CHECKING:
    from tether.evaluation.sample_answers import Sampled

Plan = dict[str, Any]


def write_sampling_plan(folder: Path, plan: Plan, records: Sequence[dict[str, Any]]) -> Path:
    """The plan and its prompts as files; the plan's. Prompts that make no sense are told here."""
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
    """Sample, and put the items into the queue; how many there are."""
    from tether.data.prompts import read_prompts
    from tether.data.sampled import tokenizer_digest
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
    waiting: list[NewItem] = []
    origin = {"from": "model", "model": plan["model"], "prompts": plan["prompts"]}

    def put() -> None:
        nonlocal added, waiting
        if waiting:
            labels.add_items(owner, plan["queue"], with_repeats(waiting, plan["repeats"]), origin=origin)
            added += len(waiting)
            waiting = []

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
            waiting += items_of(kind, sampled, digest, plan["model"])
            if len(waiting) >= PUT_AT:
                put()
        put()
    finally:
        opened.close()
    return added


PUT_AT = 50  # items in one transaction


def _report(done: int, of: int) -> None:
    print(f"sampled {done} of {of} prompts", flush=True)


def items_of(kind: str, sampled: Sampled, digest: str, model: str) -> Iterator[NewItem]:
    """A ranking of all different answers to a prompt, or pairs with each answer in one of them."""
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
    """The exit code."""
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
