"""What the commands that read the run store share: their options, and printing."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from tether.store.read import OpenWorkspace


def add_run_option(parser: argparse.ArgumentParser) -> None:
    """RUN, the workspace, and --json."""
    parser.add_argument("run", metavar="RUN", help="a run's name as `tether runs` lists it, or its folder")
    add_workspace_options(parser)


def add_workspace_options(parser: argparse.ArgumentParser) -> None:
    """The workspace, and --json."""
    parser.add_argument("--workspace", metavar="DIR", help="the folder of runs (by default runs, or what RUN lies in)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def open_for(options: argparse.Namespace) -> OpenWorkspace:
    """The workspace that the options mean, open for reading."""
    from tether.store.read import open_workspace, store_of

    return open_workspace(*store_of(getattr(options, "run", ""), options.workspace))


@contextmanager
def printing() -> Iterator[Console]:
    """A console whose text is printed at the end, all at once; rich would exit by itself on a closed pipe."""
    from rich.console import Console

    wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if wide else 140, highlight=False)
    with console.capture() as captured:
        yield console
    print(captured.get(), end="")
