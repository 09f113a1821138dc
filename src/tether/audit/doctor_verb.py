"""`tether doctor`: its options, read before anything heavy is imported."""

from __future__ import annotations

import argparse

from tether.runs.verb_options import add_run_option

SUMMARY = "Say what is wrong with a run: what was seen, why it matters, and what to change."


def add_options(parser: argparse.ArgumentParser) -> None:
    """The run, its workspace, and --json."""
    add_run_option(parser)


def run(options: argparse.Namespace) -> int:
    """Examine and print; 0 whatever was found, for looking worked."""
    from tether.audit.consultation import examine_and_print

    return examine_and_print(options)
