"""Reward models on human preferences: held-out accuracy against "the longer answer wins", and K-wise against pairs.

    python benchmarks/human_feedback.py FILE --out DIR [--folds 0 1 2 3 4] [--losses kwise pairs] [--model smollm2-135m]
        [--rate 1e-5] [--epochs 2] [--batch 8] [--set KEY=VALUE ...] [--json]

FILE has one record per line, gzipped or not: either pairs of whole conversations (`chosen`, `rejected`, with turns
marked "Human:" and "Assistant:", as in HH-RLHF) or trees of messages whose replies have a `rank` (as in OpenAssistant).
There are five folds, split by prompt: pairs with the same first question, or a whole tree, are never on both sides.
Each fold is evaluated with a model trained on the other four.

"kwise" takes `--batch` rankings per step, with all pairs of a prompt as one example; "pairs" takes each pair as its own
record, with the batch size that gives the same number of steps and of passes. Both start from the same model, head and
seed. Results go to DIR/fold-N.json, so that folds may run in parallel; each run ends with the totals over DIR.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.config.load import load_recipe
from tether.data.examples import RowEncoder
from tether.evaluation.metrics import bootstrap_mean, wilson
from tether.models.scalar_models import ScalarModel
from tether.rewards.model import RewardModelReward, load_vocabulary
from tether.train.run import train_recipe
from tether.types import Message

FOLDS = 5
TURN = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True)
class Ranked:
    """The answers to one conversation, best first; everything with one `source` stays on one side of a split."""

    source: str
    messages: tuple[dict[str, str], ...]
    answers: tuple[str, ...]

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Each better answer with each worse one."""
        return itertools.combinations(self.answers, 2)


# -- reading -------------------------------------------------------------------------------------------------------


def read(file: Path) -> list[Ranked]:
    """Every ranking in the file."""
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    records = [json.loads(line) for line in content.decode().split("\n") if line.strip()]
    if "chosen" in records[0]:
        return [ranked for record in records for ranked in compared(record)]
    return [ranked for tree in records if not tree["prompt"].get("synthetic") for ranked in tree_rankings(tree)]


def compared(record: dict[str, str]) -> Iterator[Ranked]:
    """A pair, where both conversations are equal up to different answers; otherwise nothing."""
    (asked, chosen), (also, rejected) = (last_answer(record[name]) for name in ("chosen", "rejected"))
    if asked == also and asked and chosen and rejected and chosen != rejected:
        yield Ranked(asked[0]["content"], asked, (chosen, rejected))


def last_answer(text: str) -> tuple[tuple[dict[str, str], ...], str]:
    """`(the turns before, the last answer)` of a conversation; empty where the last turn is not an answer."""
    turns: list[dict[str, str]] = []
    for line in text.strip().split("\n\n"):
        name, colon, rest = line.partition(":")
        if colon and name in TURN:
            turns.append({"role": TURN[name], "content": rest.strip()})
        elif turns:
            turns[-1]["content"] += "\n\n" + line
    whole = len(turns) > 1 and turns[-1]["role"] == "assistant" and all(turn["content"] for turn in turns)
    return (tuple(turns[:-1]), turns[-1]["content"]) if whole else ((), "")


def tree_rankings(tree: dict[str, Any]) -> Iterator[Ranked]:
    """Every message of a tree with two or more ranked replies."""

    def walk(node: dict[str, Any], before: tuple[dict[str, str], ...]) -> Iterator[Ranked]:
        role = "user" if node["role"] == "prompter" else "assistant"
        messages = (*before, {"role": role, "content": node["text"]})
        replies = node.get("replies", [])
        ranked = sorted((reply for reply in replies if reply.get("rank") is not None), key=lambda reply: reply["rank"])
        if role == "user" and len(ranked) > 1:
            yield Ranked(tree["message_tree_id"], messages, tuple(reply["text"] for reply in ranked))
        for reply in replies:
            yield from walk(reply, messages)

    yield from walk(tree["prompt"], ())


def folds_of(rankings: list[Ranked]) -> list[list[Ranked]]:
    """Five lists; everything with the same source is in one of them."""
    sources = list(dict.fromkeys(ranked.source for ranked in rankings))
    order = list(range(len(sources)))
    random.Random(0).shuffle(order)
    fold = {sources[index]: place % FOLDS for place, index in enumerate(order)}
    return [[ranked for ranked in rankings if fold[ranked.source] == number] for number in range(FOLDS)]


# -- training ------------------------------------------------------------------------------------------------------


def records(rankings: list[Ranked], loss: str) -> list[dict[str, Any]]:
    """The training records of a loss."""
    if loss == "kwise":
        return [{"prompt": list(ranked.messages), "answers": list(ranked.answers)} for ranked in rankings]
    return [
        {"prompt": list(ranked.messages), "chosen": better, "rejected": worse}
        for ranked in rankings
        for better, worse in ranked.pairs()
    ]


def train(options: argparse.Namespace, loss: str, rankings: list[Ranked], folder: Path) -> Path:
    """Train a reward model; returns its folder."""
    steps = math.ceil(options.epochs * len(rankings) / options.batch)
    examples = records(rankings, loss)
    file = folder / f"{loss}.jsonl"
    file.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")
    flags = {
        "model.path": options.model, "data.train": file, "data.max_length": options.max_length,
        "reward.batch_size": max(1, round(options.epochs * len(examples) / steps)),
        "optimizer.critic_lr": options.rate, "optimizer.schedule": "linear", "run.steps": steps,
        "run.directory": folder, "run.name": loss, "store.url": f"sqlite:///{folder}/store.db", "checkpoint.every": 0,
    }  # fmt: skip
    arguments = [f"--{key}={value}" for key, value in flags.items()] + [f"--{each}" for each in options.set]
    trained = train_recipe(
        load_recipe("reward", None, arguments),
        stop=lambda: False,
        advance=lambda step, metrics: None,  # noqa: ARG005
        notify=lambda text: print(text, flush=True),
    )
    return trained.folder.path / "model"


def margins(options: argparse.Namespace, model: Path, rankings: list[Ranked]) -> list[float]:
    """Score of the better answer minus that of the worse, for every pair, with the saved model."""
    scalar = ScalarModel.load(model, "float32", "auto").requires_grad_(False)
    vocabulary = load_vocabulary(model, scalar.backbone.model)
    encode = RowEncoder(vocabulary.tokenizer, vocabulary.end_id, options.max_length)
    score = RewardModelReward(scalar, vocabulary, 8 * options.max_length)
    rows = [
        row.tokens
        for place, ranked in enumerate(rankings)
        for row in encode.rows(
            tuple(Message(role=each["role"], content=each["content"]) for each in ranked.messages),
            ranked.answers,
            str(place),
            "answers",
        )
    ]
    values = iter(score.values(rows))
    scored = [[next(values) for _ in ranked.answers] for ranked in rankings]
    return [better - worse for answers in scored for better, worse in itertools.combinations(answers, 2)]


def run_fold(options: argparse.Namespace, number: int, folds: list[list[Ranked]]) -> None:
    """Train each loss on the other folds, evaluate on this one, and write the result."""
    held_out, rest = folds[number], [ranked for other, fold in enumerate(folds) if other != number for ranked in fold]
    outcome: dict[str, Any] = {
        "fold": number, "rankings": len(rest), "sources": [r.source for r in held_out for _ in r.pairs()],
        "longer": [0.5 * (len(a) > len(b)) + 0.5 * (len(a) >= len(b)) for r in held_out for a, b in r.pairs()],
    }  # fmt: skip
    for loss in options.losses:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            found = margins(options, train(options, loss, rest, Path(scratch)), held_out)
        outcome[loss] = [float(margin > 0) for margin in found]
        seconds = time.perf_counter() - began
        print(f"fold {number}, {loss}: {sum(outcome[loss]):.0f} of {len(found)} right, {seconds:.0f} s", flush=True)
    (options.out / f"fold-{number}.json").write_text(json.dumps(outcome) + "\n", encoding="utf-8")


# -- totals --------------------------------------------------------------------------------------------------------


def totals(folder: Path, losses: list[str]) -> dict[str, Any]:
    """Accuracies over the folds that have results of all these losses, and each loss against the others."""
    found_there = [json.loads(file.read_text()) for file in sorted(folder.glob("fold-*.json"))]
    outcomes = [outcome for outcome in found_there if outcome.keys() >= set(losses)]
    right = {kind: [each for outcome in outcomes for each in outcome[kind]] for kind in ("longer", *losses)}
    sources = [source for outcome in outcomes for source in outcome["sources"]]
    found: dict[str, Any] = {"folds": [outcome["fold"] for outcome in outcomes], "judged": len(sources)}
    for kind, values in right.items():
        estimate = wilson(sum(values), len(values))
        found[kind] = {"right": sum(values), "accuracy": estimate.value, "interval": [estimate.low, estimate.high]}
    for one, other in itertools.combinations(right, 2):
        found[f"{other} less {one}"] = difference(right[other], right[one], sources)
    return found


def difference(one: list[float], other: list[float], sources: list[str]) -> dict[str, Any]:
    """McNemar's exact test, and the difference with an interval over sources, since their pairs are not independent."""
    only_one = sum(a == 1.0 and b == 0.0 for a, b in zip(one, other, strict=True))
    only_other = sum(a == 0.0 and b == 1.0 for a, b in zip(one, other, strict=True))
    n, k = only_one + only_other, min(only_one, only_other)
    p = min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0
    by_source: dict[str, float] = defaultdict(float)
    for source, a, b in zip(sources, one, other, strict=True):
        by_source[source] += a - b
    scale = len(by_source) / len(one)
    mean = bootstrap_mean(list(by_source.values()), seed=0)
    interval = [mean.low * scale, mean.high * scale]
    return {"only": [only_one, only_other], "p": p, "difference": mean.value * scale, "interval": interval}


def main() -> None:
    """Run the requested folds and print the totals of all results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folds", type=int, nargs="*", default=list(range(FOLDS)), choices=range(FOLDS))
    parser.add_argument("--losses", nargs="+", default=["kwise", "pairs"], choices=["kwise", "pairs"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--batch", type=int, default=8, help="rankings in one step")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the recipe")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.file.is_file():
        parser.error(f"{options.file} is not a file: name a .jsonl or .jsonl.gz with human preferences")
    options.out.mkdir(parents=True, exist_ok=True)
    folds = folds_of(read(options.file))
    for number in options.folds:
        run_fold(options, number, folds)
    found = totals(options.out, options.losses)
    for name, value in found.items():
        print(f"{name:24} {value}")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
