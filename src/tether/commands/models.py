"""`tether models`: list the models known by name, and download one into the cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tether.commands.options import CommandParser
from tether.hub.catalog import EMBEDDED, CachedModel, cached_model, megabytes
from tether.progress import PlainProgress, on_terminal


def models_command(words: list[str]) -> int:
    """List the models, or pull one."""
    pulling = words[:1] == ["pull"]
    if pulling:
        parser = CommandParser("models pull", "Download a model that Tether knows by name into the cache.")
        parser.add_argument("name", metavar="NAME", help="as `tether models` lists it")
        parser.add_argument("--force", action="store_true", help="download it even if it is in the cache")
    else:
        parser = CommandParser(
            "models", "List the models that Tether knows by name; `tether models pull NAME` downloads one."
        )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words[pulling:])
    if pulling:
        return pull_and_show(options.name, force=options.force, json_output=options.json)
    return show_models(json_output=options.json)


def show_models(*, json_output: bool) -> int:
    """Print every model that Tether knows by name."""
    rows = [_row(name, cached_model(name)) for name in EMBEDDED]
    if json_output:
        print(json.dumps(rows))
        return 0
    width = max(len(name) for name in EMBEDDED)
    for row in rows:
        size = megabytes(row["size"])
        where = row["path"] or f"available: tether models pull {row['name']}"
        print(f"{row['name']:<{width}}  {size:>7}  {row['licence']}  {where}")
        print(f"{'':<{width}}  {row['about']}")
    print("\nAny folder of a saved model and any Hugging Face id is a model.path too; tiny-bytes is built in.")
    return 0


def pull_and_show(name: str, *, force: bool, json_output: bool) -> int:
    """Pull a model with a bar or plain lines on stderr, and print where it is."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from tether.hub.catalog import pull

    if not on_terminal():
        found = pull(name, progress=_lines(name), force=force)
    else:
        columns = (TextColumn("{task.description:<12}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            tasks = {}

            def progress(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, total=total)
                bar.update(tasks[what], completed=done)

            found = pull(name, progress=progress, force=force)
    print(json.dumps(_row(name, found)) if json_output else f"{name}  {megabytes(found.size)}  {found.path}")
    return 0


def _lines(name: str) -> Callable[[str, int, int], None]:
    """Progress as plain lines; large counts are bytes and are shown in megabytes."""
    stages: dict[str, PlainProgress] = {}

    def progress(what: str, done: int, total: int) -> None:
        unit = 10**6 if total >= 10**7 else 1
        if what not in stages:
            stages[what] = PlainProgress(f"{name}: {what}", -(-total // unit))
        stages[what].advance(-(-done // unit), "MB" if unit > 1 else "")

    return progress


def _row(name: str, found: CachedModel | None) -> dict[str, Any]:
    """One model of the list; `size` is the size on disk, or the size that a download will have."""
    model = EMBEDDED[name]
    return {
        "name": name,
        "cached": found is not None,
        "size": found.size if found else model.size,
        "path": str(found.path) if found else None,
        "licence": model.licence,
        "about": model.about,
    }
