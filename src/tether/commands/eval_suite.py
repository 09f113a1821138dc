"""`tether eval --suite`: measure a suite of capabilities on one model, or on two and compare them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from tether.commands.options import load_named
from tether.config.suite_names import split_suite
from tether.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from tether.evaluation.suite.capability_suite import MetricChange, SuiteResult

NOT_WITH_SUITE = ("prompts", "task", "task_options", "judge", "metric", "temperature", "max_new_tokens", "answers")


def suite_command(options: argparse.Namespace) -> int:
    """Measure and print a table, or one JSON object."""
    names = _names(options)

    from rich.console import Console

    from tether.evaluation.suite.capability_suite import compare_suites, run_suite
    from tether.evaluation.suite.suite_model import SuiteModel
    from tether.models.precision import dtype_name
    from tether.progress import working
    from tether.store.find import find_run_or_model

    console = Console(stderr=True, quiet=options.json)
    places = [find_run_or_model(each) for each in (options.model, options.against) if each]
    results: list[SuiteResult] = []
    dtype = ""
    for place in places:
        loaded = load_named(place, options, console)
        dtype = dtype or dtype_name(loaded.model.dtype)
        model = SuiteModel.of_loaded(loaded, options.max_num_seqs or "auto")
        with working(f"{place}: {', '.join(names)}", quiet=console.quiet):
            results.append(run_suite(model, names, items=options.limit, seed=options.seed))
    changes = compare_suites(*results) if len(results) == 2 else {}
    settings = {"suite": list(names), "items": options.limit, "seed": options.seed, "dtype": dtype}
    if options.json:
        print(json.dumps(_as_json(settings, places, results, changes)))
    else:
        _print(_table(settings, places, results, changes))
    return 0


def _names(options: argparse.Namespace) -> tuple[str, ...]:
    for name in NOT_WITH_SUITE:
        if getattr(options, name) not in (None, [], ()):
            raise UsageError(f"--{name.replace('_', '-')} does not go with --suite, which brings its own prompts")
    if options.samples != 1 or options.pass_at:
        raise UsageError("--samples and --pass-at do not go with --suite, which asks for one answer to each prompt")
    try:
        return split_suite(options.suite)
    except ValueError as error:
        raise UsageError(f"--suite: {error}") from None


def _as_json(
    settings: dict[str, Any], names: list[str], results: list[SuiteResult], changes: dict[str, MetricChange]
) -> dict[str, Any]:
    models = [
        {"name": name, "metrics": {key: dataclasses.asdict(each) for key, each in result.estimates.items()}}
        for name, result in zip(names, results, strict=True)
    ]
    differences = {
        name: {**dataclasses.asdict(change.difference), "adjusted": list(change.adjusted)}
        for name, change in changes.items()
    }
    return {**settings, "level": 0.95, "models": models, "differences": differences}


def _table(
    settings: dict[str, Any], names: list[str], results: list[SuiteResult], changes: dict[str, MetricChange]
) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from tether.evaluation.measure import cell

    size = "all items" if settings["items"] is None else f"at most {settings['items']} items a part"
    title = f"{size}, seed {settings['seed']}, {settings['dtype']}; 95% intervals"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("better")
    for name in names:
        table.add_column(escape(name), justify="right")
    if changes:
        table.add_column("difference", justify="right")
    estimates = [result.estimates for result in results]
    for key in dict.fromkeys(key for each in estimates for key in each):
        metric = next(result.metric(key) for result in results if key in result.columns)
        row = [cell(each[key]) if key in each else "" for each in estimates]
        row += [cell(changes[key].difference)] if key in changes else []
        table.add_row(escape(metric.label), metric.better, *map(escape, row))
    return table


def _print(table: Table) -> None:
    import os
    import sys

    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120, highlight=False)
    with console.capture() as captured:  # rich would exit on a closed pipe
        console.print(table)
    print(captured.get(), end="")
