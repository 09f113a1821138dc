"""From the words of `tether data` to a report on the screen."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tether.config.base import Paths, ReadSettings, read_columns
from tether.config.load import load_recipe
from tether.config.recipes import Recipe
from tether.data.records import read_records
from tether.evaluation.data_report import QUANTILES, DataReport, Shown, guessed_method, report_on
from tether.hub.catalog import cached_model
from tether.models.load import NO_LIMIT, TINY
from tether.models.tokenizer import TextModel, read_tokenizer
from tether.reports.run_table import printing
from tether.reports.safe_text import clean
from tether.store.find import find_model

DEFAULT = "smollm2-135m"
RECORDS = ("sft", "reward", "dpo")


def show_data(options: argparse.Namespace) -> int:
    """Read the source as training would, and print what was understood."""
    paths: Paths = options.source[0] if len(options.source) == 1 else tuple(options.source)
    columns = read_columns(options.columns) if options.columns else {}
    guess = ReadSettings(columns=columns, split=options.split or "train", config=options.config)
    method = options.method or guessed_method(read_records(paths, guess)[0])
    model = tokenizer_named(options.model)
    recipe = recipe_for(method, paths, guess, options.flags)
    report = report_on(recipe, model, options.examples)
    if options.json:
        print(json.dumps(asdict(report) | {"method_guessed": options.method is None}, ensure_ascii=False))
        return 0
    with printing() as console:
        show(
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
    """The tokenizer of a model, or of one that needs no download."""
    if name is None:
        name = DEFAULT if cached_model(DEFAULT) is not None else TINY
    return read_tokenizer(find_model(name))


def recipe_for(method: str, paths: Paths, settings: ReadSettings, flags: list[str]) -> Recipe:
    """The method's defaults with this source in them, and what the flags say."""
    source = paths if isinstance(paths, str) else json.dumps(list(paths))
    words = ["--data.train", source] if method in RECORDS else ["--task.prompts", source]
    words += [] if method in RECORDS else ["--reward.parts", "[{kind: ended}]"]
    words += ["--data.columns", json.dumps(settings.columns)] if settings.columns else []
    words += ["--data.split", settings.split]
    words += ["--data.config", settings.config] if settings.config else []
    return load_recipe(method, None, [*words, *flags])


def show(report: DataReport, console: Console, *, mapped: dict[str, str], guessed: bool, default_model: bool) -> None:
    """The report as text: trained tokens in colour on a terminal, and in [[ ]] elsewhere."""
    facts = Table.grid(padding=(0, 2))
    told = " (told from the columns; --method names another)" if guessed else ""
    named = " (by default; --model names another)" if default_model else ""
    context = "" if report.context >= NO_LIMIT else f", context {report.context}"
    facts.add_row("source", Text(clean(report.source)))
    facts.add_row("for", Text(report.method + told))
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
            console.print(_pieces(row, console.is_terminal), soft_wrap=True)
            for note in row.notes:
                console.print(Text(f"    {clean(note)}"))


def _lengths(report: DataReport) -> Table:
    heads = ["shortest", *(f"{share:.0%}" for share in QUANTILES[1:-1]), "longest"]
    table = Table("tokens", *heads, box=None, pad_edge=False)
    for name, values in report.lengths.items():
        table.add_row(name, *map(str, values))
    return table


def _pieces(row: Shown, colour: bool) -> Text:
    text = Text()
    for piece in row.pieces:
        said = clean(piece.text)
        if colour:
            text.append(said, style="bold green" if piece.trained else "dim")
        else:
            text.append(f"[[{said}]]" if piece.trained else said)
    return text


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counts.items())


def _columns(report: DataReport) -> str:
    """Each column, with how many records have it where not all do."""
    return ", ".join(name if n == report.records else f"{name} ({n})" for name, n in report.columns.items())


def _used(report: DataReport) -> str:
    what = {"sft": "rows to learn", "reward": "prompts with ranked answers", "dpo": "prompts with ranked answers"}
    return f"{report.used} {what.get(report.method, 'prompts')}"
