"""The commands that start from a recorded run: `tether resume`, `tether fork` and `tether replay`."""

from __future__ import annotations

from pathlib import Path

from tether.commands.options import CommandParser, add_run_option

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
    """Resume a run, or a demo in the stage that it was in."""
    parser = CommandParser(
        "resume",
        "Resume a run that was stopped or killed, from its newest complete checkpoint: the result is the same, bit for "
        "bit.",
    )
    _add_checkpoint_options(parser)
    options = parser.parse_args(words)

    from tether.store.folder import DEMO

    for folder in (Path(options.run).expanduser(), Path(options.workspace) / options.run):
        if (folder / DEMO).is_file():
            from tether.demo.pipeline import resume_demo

            return resume_demo(folder, json_output=options.json)

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
