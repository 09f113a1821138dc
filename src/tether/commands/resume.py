"""`tether resume`: go on with a run that was stopped or killed."""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "Go on with a run that was stopped or killed, from its newest whole checkpoint: the result is the same bits."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `tether resume` can be told."""
    parser.add_argument("run", metavar="RUN", help="the run's folder, or its name as `tether runs` lists it")
    parser.add_argument("--workspace", metavar="DIR", default="runs", help="the folder of runs (runs)")
    parser.add_argument("--json", action="store_true", help="print one JSON line a step")
    parser.add_argument("--nproc", metavar="N", help="go on with N processes on this machine (docs/distributed.md)")


def run(options: argparse.Namespace) -> int:
    """Resume a run, or the demo in the stage that it was in."""
    from tether.store.folder import DEMO

    for folder in (Path(options.run).expanduser(), Path(options.workspace) / options.run):
        if (folder / DEMO).is_file():
            from importlib import import_module

            return import_module("tether.commands.demo").resume(folder, json_output=options.json)

    from tether.train.resume import resume_run

    return resume_run(options.run, options.workspace, json_output=options.json)
