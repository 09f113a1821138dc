"""`tether doctor`: its options, read before anything heavy is imported."""

from __future__ import annotations

import argparse

from tether.errors import StorageError, UsageError
from tether.reports.run_table import add_workspace_options

SUMMARY = "Say what is wrong with a run: what was seen, why it matters, and what to change."
EPILOG = """examples:
  tether doctor ppo                       what training did
  tether doctor ppo --verify              whether every file and record of it is what was written
  tether doctor ppo --verify --repair     and put back what can be put back
  tether doctor --verify                  the same for every run, and for the votes
  tether doctor ppo --rule my_rule.py:rule    with a rule of your own as well
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The run, its workspace, --verify, and --json."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="a run's name as `tether runs` lists it, or its folder; --verify needs none",
    )
    add_workspace_options(parser)
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="FILE.PY:NAME",
        help="a rule of your own: a function of the run that returns findings; can be given more than once",
    )
    parser.add_argument("--verify", action="store_true", help="check files and records against their digests instead")
    parser.add_argument("--repair", action="store_true", help="with --verify: put back what the run keeps a copy of")


def run(options: argparse.Namespace) -> int:
    """Examine and print; 0 whatever was found, for looking worked. With --verify 6 where something is damaged."""
    if options.repair and not options.verify:
        raise UsageError("--repair goes with --verify: tether doctor RUN --verify --repair")
    if options.verify and options.rule:
        raise UsageError("--rule looks at what training did, and --verify at files: give one of them")
    if options.verify:
        return _verify(options)
    if options.run is None:
        raise UsageError("say which run: tether doctor RUN; with --verify all of them are checked")
    from tether.commands.diagnosis import examine_and_print

    return examine_and_print(options)


def _verify(options: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    from tether.store.database.open import workspace_at
    from tether.store.folder import is_run
    from tether.store.read import store_of
    from tether.store.verify_run import run_folders, summary_lines, verify_run, verify_store

    workspace = workspace_at(*store_of(options.run or "", options.workspace))
    if options.run is None:
        folders = run_folders(workspace.directory)
    else:
        places = (Path(options.run).expanduser(), workspace.directory / options.run)
        folders = [place for place in places if is_run(place)][:1]
        if not folders:
            raise UsageError(f"there is no run at {places[0]}, nor at {places[1]}: `tether runs` lists what there is")
    results = [verify_run(workspace, folder, repair=options.repair) for folder in folders]
    results.append(verify_store(workspace))
    faults = sum(len(one.faults) for one in results)
    if options.json:
        print(json.dumps({"whole": not faults, "results": [one.as_json() for one in results]}))
    else:
        print("\n".join(summary_lines(results)))
    return StorageError.exit_code if faults else 0
