"""What to ask people: answers that runs gave, or records that were handed in, as items of a queue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from tether.errors import DataError
from tether.runs.read import OpenWorkspace, RunSummary, read_rollouts
from tether.runs.recorded import StoredRollout
from tether.studio.ballots import FEWEST_RANKED, MOST_RANKED
from tether.studio.label_queues import NewItem
from tether.studio.run_queries import kept_steps, spread

STEPS_READ = 8  # of each run, spread from the first to the last
REPEAT_AFTER = 8  # items between one and its hidden repeat


@dataclass(frozen=True)
class Answer:
    """An answer that a run gave."""

    prompt_id: str
    prompt: str
    text: str
    score: float
    run: str
    step: int
    row: int

    @property
    def source(self) -> dict[str, Any]:
        """Where it came from, and what it scored there."""
        return {"run": self.run, "step": self.step, "row": self.row, "score": self.score}


def answers_of(opened: OpenWorkspace, run: RunSummary, step: int | None = None) -> list[Answer]:
    """Answers of a run: those of one step, or of a few from its first kept step to its last."""
    kept = kept_steps(opened, run.id)
    if step is not None and step not in kept:
        raise DataError(f"step: the answers of step {step} of {run.name} were not kept")
    steps = [step] if step is not None else spread(kept, STEPS_READ)
    return [_answer(run.name, rollout) for at in steps for rollout in read_rollouts(opened, run.id, at)]


def _answer(run: str, rollout: StoredRollout) -> Answer:
    texts = (rollout.prompt_id, rollout.prompt_text, rollout.completion)
    return Answer(*texts, rollout.score, run, rollout.step, rollout.row)


def pair_items(answers: Sequence[Answer], count: int, *, uncertain: bool = False) -> list[NewItem]:
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


def _by_prompt(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """The answers to each prompt, each text once."""
    found: dict[str, dict[str, Answer]] = defaultdict(dict)
    for answer in answers:
        if answer.text.strip() and answer.score == answer.score:  # nothing can be said of an empty one
            found[answer.prompt].setdefault(answer.text, answer)
    return {prompt: list(texts.values()) for prompt, texts in found.items()}


def _ranked_pairs(answers: Sequence[Answer]) -> list[tuple[int, Answer, Answer]]:
    """Every pair with its turn: 0 for the most telling of a prompt, and so on."""

    def telling(pair: tuple[Answer, Answer]) -> tuple[bool, int]:
        one, other = pair
        return one.run == other.run, -abs(one.step - other.step)

    pairs = sorted(combinations(answers, 2), key=telling)
    return [(turn, one, other) for turn, (one, other) in enumerate(pairs)]


def ranking_items(answers: Sequence[Answer], count: int, size: int = 4) -> list[NewItem]:
    """Up to `size` different answers to each prompt, to be put in order."""
    groups = [several[:size] for several in _by_prompt(answers).values() if len(several) >= FEWEST_RANKED]
    return [_item(group) for group in groups[:count]]


def demonstration_items(answers: Sequence[Answer], count: int) -> list[NewItem]:
    """The prompts alone."""
    prompts = dict.fromkeys(answer.prompt for answer in answers)
    return [NewItem(_messages(prompt)) for prompt in list(prompts)[:count]]


def _item(answers: Sequence[Answer]) -> NewItem:
    texts = [{"text": answer.text, "source": answer.source} for answer in answers]
    return NewItem(_messages(answers[0].prompt), texts, {"prompt_id": answers[0].prompt_id})


def _messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def items_from_run(opened: OpenWorkspace, kind: str, runs: Sequence[RunSummary], **wanted: Any) -> list[NewItem]:
    """Items of a kind from the answers of one run or several; `rescore` may give the answers other scores."""
    answers = [answer for run in runs for answer in answers_of(opened, run, wanted.get("step"))]
    if (rescore := wanted.get("rescore")) is not None:
        answers = rescore(answers)
    count = wanted["count"]
    if kind == "pair":
        found = pair_items(answers, count, uncertain=wanted.get("uncertain", False))
    elif kind == "ranking":
        found = ranking_items(answers, count)
    else:
        found = demonstration_items(answers, count)
    if not found:
        raise DataError("there are no two different answers to one prompt among those that were kept: name another run")
    return found


# -- records ------------------------------------------------------------------------------------------------------


def item_from_record(kind: str, record: dict[str, Any], place: str) -> NewItem:
    """A record in the usual columns, as something to ask: what it says about which answer is better is left out."""
    prompt = prompt_of(record, place)
    category = {"category": record["category"]} if isinstance(record.get("category"), str) else {}
    if kind == "demonstration":
        return NewItem(prompt, (), category)
    given = record.get("answers", [record.get("chosen"), record.get("rejected")])
    if not isinstance(given, list) or not all(isinstance(text, str) and text for text in given):
        raise DataError(f"{place}: needs `chosen` and `rejected`, or `answers`: texts that are not empty")
    fewest, most = (2, 2) if kind == "pair" else (FEWEST_RANKED, MOST_RANKED)
    if not fewest <= len(given) <= most:
        raise DataError(f"{place}: a {kind} has {fewest} to {most} answers, and this has {len(given)}")
    return NewItem(prompt, [{"text": text} for text in given], category)


def prompt_of(record: dict[str, Any], place: str) -> list[dict[str, str]]:
    """The prompt as messages; `messages` may end with the answer, which is not part of it."""
    prompt = record.get("prompt")
    if isinstance(prompt, str) and prompt:
        return _messages(prompt)
    given = prompt if prompt is not None else record.get("messages")
    if isinstance(given, list) and given and all(_is_message(turn) for turn in given):
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in given]
        ends_with_answer = prompt is None and len(turns) > 1 and turns[-1]["role"] == "assistant"
        return turns[:-1] if ends_with_answer else turns
    raise DataError(f"{place}: needs `prompt`, a text or a list of messages")


def _is_message(turn: Any) -> bool:
    return isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("role", "content"))


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
