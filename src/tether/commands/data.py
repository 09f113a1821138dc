"""`tether data`: how Tether reads your records, before you train on them."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from tether.commands.options import CommandParser, add_reading_options, count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tether.config.base import Paths, ReadSettings
    from tether.config.recipes import Recipe
    from tether.evaluation.data_report import DataReport, Shown
    from tether.models.tokenizer import TextModel

SUMMARY = (
    "Show how your data is read: its shape, lengths, examples with the trained tokens marked, and what is dropped."
)
RECORDS = ("sft", "reward", "dpo")
METHODS = (*RECORDS, "ppo", "grpo", "rloo", "reinforce", "trpo")
DEFAULT_MODEL = "smollm2-135m"
EPILOG = """A flag sets one key of the recipe, as for tether train: --data.max_length 512 --data.system_prompt Hi

examples:
  tether data demonstrations.jsonl
  tether data prompts.parquet --method ppo --model runs/sft --columns prompt=question
  tether data openai/gsm8k --config main --split test --columns prompt=question
"""


def data_command(words: list[str]) -> int:
    """Read the records and print how they were read."""
    parser = CommandParser("data", SUMMARY, EPILOG)
    parser.add_argument(
        "source",
        nargs="+",
        metavar="FILE_OR_ID",
        help="a file, a glob, the folder of a saved dataset, or a dataset's id; several are read as one",
    )
    parser.add_argument("--method", choices=METHODS, help="the method to read for (default: guessed from the columns)")
    parser.add_argument("--model", metavar="MODEL", help="whose tokenizer and template (smollm2-135m, or tiny-bytes)")
    add_reading_options(parser)
    parser.add_argument("--examples", type=count, default=3, metavar="N", help="examples to show (3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, flags = parser.parse_known_args(words)
    return report_data(options, flags)


def report_data(options: argparse.Namespace, flags: list[str]) -> int:
    """Read the source as training would, and print the report."""
    from tether.config.base import ReadSettings, read_columns
    from tether.data.records import read_records
    from tether.evaluation.data_report import guessed_method, report_on
    from tether.reports.run_table import printing

    paths: Paths = options.source[0] if len(options.source) == 1 else tuple(options.source)
    columns = read_columns(options.columns) if options.columns else {}
    guess = ReadSettings(columns=columns, split=options.split or "train", config=options.config)
    method = options.method or guessed_method(read_records(paths, guess)[0])
    model = tokenizer_named(options.model)
    recipe = recipe_for(method, paths, guess, flags)
    report = report_on(recipe, model, options.examples)
    if options.json:
        print(json.dumps(asdict(report) | {"method_guessed": options.method is None}, ensure_ascii=False))
        return 0
    with printing() as console:
        print_data_report(
            report,
            console,
            mapped=recipe_columns(recipe),
            guessed=options.method is None,
            default_model=options.model is None,
        )
    return 0


def recipe_columns(recipe: Recipe) -> dict[str, str]:
    """Which column is which field."""
    return dict(recipe.data.columns)  # pyright: ignore[reportAttributeAccessIssue]


def tokenizer_named(name: str | None) -> TextModel:
    """The tokenizer of the named model; by default of one that needs no download."""
    from tether.hub.catalog import cached_model
    from tether.models.load import TINY
    from tether.models.tokenizer import read_tokenizer
    from tether.store.find import find_model

    if name is None:
        name = DEFAULT_MODEL if cached_model(DEFAULT_MODEL) is not None else TINY
    return read_tokenizer(find_model(name))


def recipe_for(method: str, paths: Paths, settings: ReadSettings, flags: list[str]) -> Recipe:
    """The method's defaults with this source and the flags."""
    from tether.config.load import load_recipe

    source = paths if isinstance(paths, str) else json.dumps(list(paths))
    words = ["--data.train", source] if method in RECORDS else ["--task.prompts", source]
    words += [] if method in RECORDS else ["--reward.parts", "[{kind: ended}]"]
    words += ["--data.columns", json.dumps(settings.columns)] if settings.columns else []
    words += ["--data.split", settings.split]
    words += ["--data.config", settings.config] if settings.config else []
    return load_recipe(method, None, [*words, *flags])


def print_data_report(
    report: DataReport, console: Console, *, mapped: dict[str, str], guessed: bool, default_model: bool
) -> None:
    """Print the report: trained tokens are green on a terminal and in [[ ]] elsewhere."""
    from rich.table import Table
    from rich.text import Text

    from tether.models.load import NO_LIMIT
    from tether.reports.safe_text import clean

    facts = Table.grid(padding=(0, 2))
    guess = " (guessed from the columns; --method sets another)" if guessed else ""
    named = " (the default; --model sets another)" if default_model else ""
    context = "" if report.context >= NO_LIMIT else f", context {report.context}"
    facts.add_row("source", Text(clean(report.source)))
    facts.add_row("for", Text(report.method + guess))
    facts.add_row("shape", Text(_counts(report.shapes)))
    facts.add_row("columns", Text(clean(_columns(report))))
    if mapped:
        facts.add_row("mapped", Text(", ".join(f"{field} is {column}" for field, column in mapped.items())))
    facts.add_row("records", Text(f"{report.records} read, {_used(report)}"))
    facts.add_row("dropped", Text("\n".join(f"{number}: {why}" for why, number in report.dropped.items()) or "none"))
    facts.add_row("cut", Text(_counts(report.cut) or "none"))
    facts.add_row("tokenizer", Text(f"{clean(report.model)}{named}{context}"))
    facts.add_row("limit", Text(report.limit))
    if report.trained:
        facts.add_row(
            "learned",
            Text(f"{report.trained} tokens an epoch" if report.method != "reward" else "the score of each answer"),
        )
    console.print(facts)
    for note in report.notes:
        console.print(Text(note))
    console.print()
    console.print(_lengths(report))
    for number, rows in enumerate(report.examples, start=1):
        for row in rows:
            title = f"example {number}" + (f", {row.title}" if row.title else "")
            console.print(Text(f"\n--- {title}", style="bold"))
            console.print(_token_text(row, console.is_terminal), soft_wrap=True)
            for note in row.notes:
                console.print(Text(f"    {clean(note)}"))


def _lengths(report: DataReport) -> Table:
    from rich.table import Table

    from tether.evaluation.data_report import QUANTILES

    heads = ["shortest", *(f"{share:.0%}" for share in QUANTILES[1:-1]), "longest"]
    table = Table("tokens", *heads, box=None, pad_edge=False)
    for name, values in report.lengths.items():
        table.add_row(name, *map(str, values))
    return table


def _token_text(row: Shown, colour: bool) -> Text:
    from rich.text import Text

    from tether.reports.safe_text import clean

    text = Text()
    for piece in row.pieces:
        shown = clean(piece.text)
        if colour:
            text.append(shown, style="bold green" if piece.trained else "dim")
        else:
            text.append(f"[[{shown}]]" if piece.trained else shown)
    return text


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counts.items())


def _columns(report: DataReport) -> str:
    """The columns; a column that only some records have is followed by their number."""
    return ", ".join(name if n == report.records else f"{name} ({n})" for name, n in report.columns.items())


def _used(report: DataReport) -> str:
    what = {"sft": "rows to learn", "reward": "prompts with ranked answers", "dpo": "prompts with ranked answers"}
    return f"{report.used} {what.get(report.method, 'prompts')}"
