"""Recorded runs: `runs`, `show` and `report` read them; `resume`, `fork` and `replay` start from them."""

from __future__ import annotations

from pathlib import Path

from tether.commands.options import CommandParser, add_run_option, add_workspace_options, count
from tether.errors import UsageError

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


# -- starting from a run -------------------------------------------------------------------------------------------

FORK_EPILOG = """examples:
  tether fork ppo --step 40 --ppo.clip_range 0.1
  tether fork ppo --run.name gentle --optimizer.policy_lr 1e-6
Every key of the recipe is a flag; a key that you do not set keeps the run's value.
"""
REPLAY_EPILOG = """examples:
  tether replay ppo --step 10                    with nothing changed: the stored advantages, to the bit
  tether replay ppo --step 10 --ppo.lam 1.0 --ppo.gamma 0.99
  tether replay ppo --step 10 --kl.coef 0 --ppo.whiten_advantages false
"""


def resume_command(words: list[str]) -> int:
    """Resume a run, or a demo or a pipeline in the stage that it was in."""
    parser = CommandParser(
        "resume",
        "Resume a run that was stopped or killed, from its newest complete checkpoint: the result is the same, bit for "
        "bit.",
    )
    _add_checkpoint_options(parser)
    parser.add_argument("--rounds", type=count, metavar="N", help="for a pipeline: go on until round N")
    options = parser.parse_args(words)

    from tether.store.folder import DEMO, PIPELINE

    for folder in (Path(options.run).expanduser(), Path(options.workspace) / options.run):
        if (folder / DEMO).is_file():
            from tether.demo.pipeline import resume_demo

            return resume_demo(folder, json_output=options.json)
        if (folder / PIPELINE).is_file():
            from tether.pipeline.run_pipeline import resume_pipeline

            return resume_pipeline(folder, json_output=options.json, rounds=options.rounds)
    if options.rounds is not None:
        raise UsageError(f"--rounds is for a pipeline, and {options.run} is none")

    from tether.control.run import is_control_run, resume_control

    if is_control_run(options.run, options.workspace):
        return resume_control(options.run, options.workspace, json_output=options.json)

    from tether.train.resume import resume_run

    return resume_run(options.run, options.workspace, json_output=options.json)


def fork_command(words: list[str]) -> int:
    """Start a new run from a checkpoint."""
    summary = "Continue from one of a run's checkpoints with changed settings, as a new run."
    parser = CommandParser("fork", summary, FORK_EPILOG)
    _add_checkpoint_options(parser)
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint after N steps (default: the newest)")
    options, flags = parser.parse_known_args(words)

    from tether.train.resume import fork_run

    return fork_run(options.run, options.workspace, options.step, flags, json_output=options.json)


def replay_command(words: list[str]) -> int:
    """Recompute a step and print how it differs."""
    summary = "Recompute advantages and losses of a step's stored answers under other settings; nothing is generated."
    parser = CommandParser("replay", summary, REPLAY_EPILOG)
    add_run_option(parser)
    parser.add_argument("--step", type=int, metavar="N", help="the step (default: the last whose answers were kept)")
    options, options.flags = parser.parse_known_args(words)

    from tether.train.replay import replay

    return replay(options)


def _add_checkpoint_options(parser: CommandParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's folder, or its name as `tether runs` lists it")
    parser.add_argument("--workspace", metavar="DIR", default="runs", help="the folder of runs (runs)")
    parser.add_argument("--json", action="store_true", help="print one JSON line a step")
    parser.add_argument("--nproc", metavar="N", help="train with N processes on this machine (docs/distributed.md)")
    parser.add_argument("--restarts", metavar="M", help="with --nproc: start lost processes again, up to M times")
    parser.add_argument("--ray", metavar="ADDRESS", help="with --nproc: on a Ray cluster (auto, local or host:port)")
    parser.add_argument("--min-nproc", metavar="K", help="with --restarts: one process fewer each time, down to K")
