"""The commands that read recorded runs: `tether runs`, `tether show` and `tether report`."""

from __future__ import annotations

from tether.commands.options import CommandParser, add_run_option, add_workspace_options

SHOW_EPILOG = """examples:
  tether show ppo                        the run: settings, where it came from, last metrics, events
  tether show ppo --diff ppo-2           the settings in which the two differ, and their last metrics
  tether show ppo --step 10              the answers of step 10 with their scores
  tether show ppo --step 10 --sample 3   answer 3, token by token, coloured by advantage
"""


def runs_command(words: list[str]) -> int:
    """List the runs of a workspace, the latest first."""
    parser = CommandParser(
        "runs", "List the runs of a workspace: how far each got, its score, and what it was made from."
    )
    add_workspace_options(parser)
    parser.add_argument("--tag", action="append", metavar="TAG", help="only runs with this tag; repeatable")
    parser.add_argument("--group", metavar="NAME", help="only runs of this group")
    options = parser.parse_args(words)

    from tether.reports.run_table import print_runs

    return print_runs(options)


def show_command(words: list[str]) -> int:
    """Print one run, one of its steps, or one answer token by token."""
    summary = "Show what a run recorded: an overview, the answers of one step, or one answer token by token."
    parser = CommandParser("show", summary, SHOW_EPILOG)
    add_run_option(parser)
    parser.add_argument(
        "--diff", action="append", metavar="RUN", help="compare its settings with this run's; repeatable"
    )
    parser.add_argument("--step", type=int, metavar="N", help="a step; -1 is the last whose answers were kept")
    parser.add_argument("--sample", type=int, metavar="K", help="a sample of that step (default: of the last step)")
    options = parser.parse_args(words)

    from tether.reports.run_table import show

    return show(options)


def report_command(words: list[str]) -> int:
    """Write a run's report and print where it is."""
    parser = CommandParser(
        "report", "Write a run's report: report.html, which is self-contained, and report.md with its charts."
    )
    add_run_option(parser)
    parser.add_argument("--to", metavar="DIR", help="where to write it (default: the run's own folder)")
    options = parser.parse_args(words)

    from tether.reports.run_report import report

    return report(options)
