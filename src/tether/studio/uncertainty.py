"""Which pairs a reward model is least sure of: those whose two answers it scores most alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tether.errors import ConfigError, DataError
from tether.store.find import find_model
from tether.store.read import RunSummary, list_runs
from tether.studio.context import Studio
from tether.studio.model_host import Scored, answers_of_item
from tether.studio.people import Person
from tether.studio.queue_items import QueueAnswer
from tether.studio.replies import Refused
from tether.studio.run_queries import run_with_id

MAX_SCORED = 4000  # answers in one go


def reward_model(studio: Studio, run_id: int | None) -> RunSummary | None:
    """The reward model that is named, or else the newest that is finished; None where there is none yet."""
    if run_id is not None:
        named = run_with_id(studio.opened, run_id)
        if named.method != "reward":
            raise Refused(422, f"reward_run: {named.name} is no reward model")
        return named
    found = [run for run in list_runs(studio.opened) if run.method == "reward" and _has_model(run)]
    return max(found, key=lambda run: run.id, default=None)  # ids grow, and the clock may go back


def _has_model(run: RunSummary) -> bool:
    try:
        return run.state == "done" and bool(find_model(str(run.folder)))
    except ConfigError:
        return False


def scored_by(studio: Studio, model: RunSummary, answers: Sequence[QueueAnswer]) -> list[QueueAnswer]:
    """The answers with this reward model's scores in place of those that they were given when they were sampled."""
    few = answers[:MAX_SCORED]
    asked = [Scored(one.messages, one.text, one.ended, one.ids, one.prompt_ids, one.tokenizer) for one in few]
    told = studio.models.scores(model.folder, asked)
    return [replace(one, score=score) for one, score in zip(few, told, strict=True)]


def ask_doubtful_first(studio: Studio, person: Person, queue: int, model: RunSummary) -> int:
    """Put a queue's pairs into the order of this reward model's doubt, the closest first; how many there are."""
    if studio.labels.queue(queue).kind != "pair":
        raise DataError(f"queue {queue} holds no pairs, and only of those can a reward model be unsure")
    rows = studio.labels.items(queue)[: MAX_SCORED // 2]
    told = studio.models.scores(model.folder, [answer for row in rows for answer in answers_of_item(row)])
    margins = [abs(one - other) for one, other in zip(told[0::2], told[1::2], strict=True)]
    priorities = {row.id: -margin for row, margin in zip(rows, margins, strict=True) if margin == margin}
    studio.labels.set_priorities(person, queue, priorities, model=model.name)
    return len(priorities)
