"""Rankings from scores, and the two files of a collect stage: ratings to train on, and held-out ratings."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.store.folder import write_text_whole
from tether.types import Rollout

Record = Mapping[str, Any]


def noisy_ranks(scores: Sequence[float], draws: random.Random, *, noise: float, tie: float) -> list[int] | None:
    """A rank per answer, 0 for the best; None where all are tied.

    With noise the answers are ordered by score / noise + Gumbel noise, so that P(prefers A to B) = sigmoid((score(A) -
    score(B)) / noise) (Plackett 1975, Luce 1959). Neighbors whose scores differ by less than `tie` share a rank. With
    noise and a `tie` of 0 the noise decides between equals; without noise equals are tied.
    """
    liking = [score / noise - math.log(-math.log(1.0 - draws.random())) for score in scores] if noise else [*scores]
    order = sorted(range(len(scores)), key=lambda index: -liking[index])
    ranks = [0] * len(scores)
    for better, worse in itertools.pairwise(order):
        gap = abs(scores[better] - scores[worse])
        tied = gap < tie or (gap == 0.0 and not noise)
        ranks[worse] = ranks[better] + (not tied)
    return ranks if max(ranks, default=0) > 0 else None


def ranking_record(answers: Sequence[Rollout], ranks: Sequence[int]) -> dict[str, Any]:
    """One ranking in the usual columns; a truncated answer is marked, so that it gets no end token."""
    return {
        "prompt": list(answers[0].prompt.messages),
        "answers": [answer.completion.strip() or "(empty)" for answer in answers],
        "ranks": list(ranks),
        "ended": [answer.finish == "stop" for answer in answers],
    }


def write_split(records: Sequence[Record], held_out: int, train_file: Path, held_out_file: Path) -> None:
    """Write the first `held_out` records to one file and the rest to the other."""
    train_file.parent.mkdir(parents=True, exist_ok=True)
    for path, part in ((held_out_file, records[:held_out]), (train_file, records[held_out:])):
        write_lines(path, part)


def write_lines(path: Path, records: Sequence[Record]) -> None:
    """Write records as JSON lines: after a crash the file is complete or absent."""
    write_text_whole(path, "".join(json.dumps(record) + "\n" for record in records))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; a last line that was cut off by a crash is left out."""
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records
