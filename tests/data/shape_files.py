"""Small files in the shapes that people bring, each with what it is for.

`python tests/data/shape_files.py FOLDER` writes them all.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Records = list[dict[str, Any]]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def bot(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def jsonl(path: Path, records: Records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def zipped(path: Path, records: Records) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))


def zipped_list(path: Path, records: Records) -> None:
    path.write_bytes(gzip.compress(json.dumps(records).encode()))


def table(path: Path, records: Records) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows([{k: v if isinstance(v, str) else json.dumps(v) for k, v in r.items()} for r in records])


def zipped_table(path: Path, records: Records) -> None:
    table(path.with_suffix(""), records)
    path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))
    path.with_suffix("").unlink()


def parquet(path: Path, records: Records) -> None:
    import pyarrow as arrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.Table.from_pylist(records), path)


def several(path: Path, records: Records) -> None:
    path.mkdir()
    for number, record in enumerate(records):
        jsonl(path / f"part-{number}.jsonl", [record])


def saved(path: Path, records: Records) -> None:
    import datasets

    datasets.Dataset.from_list(records).save_to_disk(path)


def saved_splits(path: Path, records: Records) -> None:
    import datasets

    whole = datasets.Dataset.from_list(records)
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(path)


@dataclass(frozen=True)
class ShapeFile:
    """One file, the method that it is trained with, the recipe's keys that it needs, and the shape to be understood."""

    name: str
    method: str
    records: Records
    shape: str
    flags: tuple[str, ...] = ()
    write: Callable[[Path, Records], None] = jsonl
    named: str = ""  # as the source is named, where that is not the file itself
    needs_template: bool = False

    def source(self, folder: Path) -> str:
        return str(folder / (self.named or self.name))


NAMES = ("red", "green", "blue")
QUESTIONS = [f"Name something {colour}." for colour in NAMES]
ANSWERS = ["A cherry.", "A leaf in spring.", "The sky."]
HH = "\n\nHuman: {}\n\nAssistant: Do you mean a thing?\n\nHuman: Yes.\n\nAssistant: {}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
}
RESULT = {"role": "tool", "name": "weather", "content": "rain"}

PLAIN = [{"prompt": q, "completion": a} for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
TURNS = [{"messages": [user("Hi!"), bot("Hello."), user(q), bot(a)]} for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
PAIRS = [{"prompt": q, "chosen": a, "rejected": "No."} for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
SHAREGPT = [
    {"system": "Be brief.", "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
    for q, a in zip(QUESTIONS, ANSWERS, strict=True)
]
IMPLICIT = [
    {"chosen": [user(q), bot(a)], "rejected": [user(q), bot("No.")]} for q, a in zip(QUESTIONS, ANSWERS, strict=True)
]
ALPACA = [
    {"instruction": q, "input": "in one word" * (n % 2), "output": a}
    for n, (q, a) in enumerate(zip(QUESTIONS, ANSWERS, strict=True))
]
KTO = [
    {"prompt": q, "completion": c, "label": good}
    for q, a in zip(QUESTIONS, ANSWERS, strict=True)
    for c, good in ((a, True), ("No.", False))
]
MATHS = [{"question": f"What is {n} + {n}?", "solution": 2 * n, "level": "easy"} for n in range(3)]
TOOLS = [{"messages": [user("Rain in Oslo?"), CALL, RESULT, bot("Yes.")], "tools": [WEATHER]}] * 2
TOOL_PAIRS = [
    {
        "prompt": [user("Rain in Oslo?")],
        "chosen": [CALL, RESULT, bot("Yes.")],
        "rejected": [bot("No.")],
        "tools": [WEATHER],
    }
] * 2

FILES = [
    ShapeFile("text.jsonl", "sft", [{"text": f"{q} {a}"} for q, a in zip(QUESTIONS, ANSWERS, strict=True)], "text"),
    ShapeFile("prompt-completion.jsonl", "sft", PLAIN, "prompt and completion"),
    ShapeFile(
        "prompt-completion-chat.jsonl",
        "sft",
        [{"prompt": [user(r["prompt"])], "completion": [bot(r["completion"])]} for r in PLAIN],
        "prompt and completion",
    ),
    ShapeFile("messages.jsonl", "sft", TURNS, "messages"),
    ShapeFile("messages-all-turns.jsonl", "sft", TURNS, "messages", ("--data.assistant_turns", "all")),
    ShapeFile(
        "sharegpt.json", "sft", SHAREGPT, "conversations", write=lambda p, r: p.write_text(json.dumps(r)) and None
    ),
    ShapeFile("alpaca.json.gz", "sft", ALPACA, "instruction", write=zipped_list),
    ShapeFile("kto.jsonl", "sft", KTO, "unpaired preference"),
    ShapeFile("kto-paired.csv", "dpo", KTO, "unpaired preference", write=table),
    ShapeFile("messages.jsonl.gz", "sft", TURNS, "messages", write=zipped),
    ShapeFile("plain.csv.gz", "sft", PLAIN, "prompt and completion", write=zipped_table),
    ShapeFile(
        "mapped.csv",
        "sft",
        [{"q": r["prompt"], "a": r["completion"]} for r in PLAIN],
        "prompt and completion",
        ("--data.columns", "{prompt: q, completion: a}"),
        write=table,
    ),
    ShapeFile("chosen-only.jsonl", "sft", IMPLICIT, "messages", ("--data.columns", "{messages: chosen}")),
    ShapeFile("parts", "sft", PLAIN, "prompt and completion", write=several, named="parts/*.jsonl"),
    ShapeFile(
        "system.jsonl", "sft", PLAIN, "prompt and completion", ("--data.system_prompt", "Answer in one sentence.")
    ),
    ShapeFile("tools.jsonl", "sft", TOOLS, "messages", needs_template=True),
    ShapeFile(
        "tools-all-turns.jsonl", "sft", TOOLS, "messages", ("--data.assistant_turns", "all"), needs_template=True
    ),
    ShapeFile("tool-pairs.parquet", "dpo", TOOL_PAIRS, "preference", write=parquet, needs_template=True),
    ShapeFile("pairs.jsonl", "reward", PAIRS, "preference"),
    ShapeFile(
        "pairs-chat.jsonl",
        "dpo",
        [{"prompt": [user(r["prompt"])], "chosen": [bot(r["chosen"])], "rejected": [bot("No.")]} for r in PAIRS],
        "preference",
    ),
    ShapeFile("pairs-implicit-chat.parquet", "dpo", IMPLICIT, "preference, prompt implied", write=parquet),
    ShapeFile(
        "pairs-ultra.jsonl",
        "reward",
        [{"prompt": r["chosen"][0]["content"], **r, "score_chosen": 8.5} for r in IMPLICIT],
        "preference",
    ),
    ShapeFile(
        "hh.jsonl",
        "reward",
        [{"chosen": HH.format(q, a), "rejected": HH.format(q, "No.")} for q, a in zip(QUESTIONS, ANSWERS, strict=True)],
        "preference, prompt implied",
    ),
    ShapeFile(
        "pairs-implicit-text.jsonl",
        "dpo",
        [{"chosen": f"{q} {a}", "rejected": f"{q} No."} for q, a in zip(QUESTIONS, ANSWERS, strict=True)],
        "preference, prompt implied",
    ),
    ShapeFile(
        "ranked.jsonl",
        "reward",
        [
            {"prompt": q, "answers": [a, "Hm.", "No."], "ranks": [0, 1, 1]}
            for q, a in zip(QUESTIONS, ANSWERS, strict=True)
        ],
        "ranking",
    ),
    ShapeFile("prompts.jsonl", "ppo", [{"prompt": q} for q in QUESTIONS], "prompt"),
    ShapeFile(
        "prompts-chat.jsonl",
        "grpo",
        [{"prompt": [{"role": "system", "content": "Be brief."}, user(q)]} for q in QUESTIONS],
        "prompt",
    ),
    ShapeFile("maths.jsonl", "ppo", MATHS, "prompt", ("--data.columns", "{prompt: question, answer: solution}")),
    ShapeFile(
        "nested.jsonl",
        "ppo",
        [
            {"prompt": [user(r["question"])], "reward_model": {"style": "rule", "ground_truth": r["solution"]}}
            for r in MATHS
        ],
        "prompt",
        ("--data.columns", "{answer: reward_model.ground_truth}"),
    ),
    ShapeFile("sharegpt-prompts.jsonl", "ppo", SHAREGPT, "conversations"),
    ShapeFile("alpaca-prompts.csv", "reinforce", ALPACA, "instruction", write=table),
    ShapeFile(
        "saved-dataset", "ppo", MATHS, "prompt", ("--data.columns", "{prompt: question, answer: solution}"), write=saved
    ),
    ShapeFile("saved-splits", "sft", TURNS, "messages", ("--data.held_out_split", "test"), write=saved_splits),
]


def write_all(folder: Path) -> None:
    for file in FILES:
        if not (folder / file.name).exists():
            file.write(folder / file.name, file.records)


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    write_all(Path(sys.argv[1]))
