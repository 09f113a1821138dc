"""`tether sweep`: many runs of one recipe with other settings and seeds, and a report that compares them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tether.commands.options import CommandParser, count
from tether.errors import UsageError

if TYPE_CHECKING:
    from tether.sweeps.manifest import SweepManifest

SUMMARY = "Run a recipe with several settings and seeds, and report which settings are better and how sure that is."
EPILOG = """RECIPE is a recipe's file, or a method's name. The file's section `sweep:` may hold what is varied,
as in recipes/sensitivity.yaml; options win. A flag sets a key of the recipe for all trials: --run.steps 40

values of --vary:
  ppo.clip_range=0.1,0.2,0.3   these values
  kl.coef=0.01..0.3:log:5      five points from 0.01 to 0.3, evenly spaced in their logarithm
  kl.coef=0.01..0.3:log        any value of the range (samplers random and tpe)
  ppo.epochs=1..4              all whole numbers

The same command again resumes the sweep after a kill; so does --resume NAME. Finished trials are not repeated.

examples:
  tether sweep recipes/sensitivity.yaml
  tether sweep recipes/tiny-ppo.yaml --vary ppo.clip_range=0.1,0.2,0.3 --vary ppo.lam=0.9,0.95,1 --seeds 3
  tether sweep recipes/tiny-ppo.yaml --vary optimizer.policy_lr=1e-4..1e-2:log --sampler tpe --budget 16
"""


def sweep_command(words: list[str]) -> int:
    """Start a sweep, or resume one."""
    parser = _parser()
    source = words[0] if words and not words[0].startswith("-") else None
    options, flags = parser.parse_known_args(words[1:] if source is not None else words)
    if (source is None) == (options.resume is None):
        raise UsageError(
            "name a recipe, or the sweep to resume: tether sweep RECIPE --vary KEY=VALUES, or --resume NAME"
        )
    jobs = _jobs(options.jobs)
    if source is None:
        _check_alone(options, flags)
        return resume_sweep(options.resume, options.workspace, jobs, json_output=options.json)
    return start_sweep(source, options, flags, jobs)


def _parser() -> CommandParser:
    parser = CommandParser("sweep", SUMMARY, EPILOG)
    parser.usage = "tether sweep RECIPE --vary KEY=VALUES [--vary ...] [--seeds N] [options] [--section.key VALUE ...]"
    parser.add_argument("--vary", action="append", metavar="KEY=VALUES", help="a key of the recipe; repeatable")
    parser.add_argument("--seeds", metavar="N", help="runs of each setting, with seeds from run.seed on (3)")
    parser.add_argument("--sampler", metavar="NAME", help="grid, one-at-a-time, random or tpe (grid if all is listed)")
    parser.add_argument("--budget", metavar="N", help="settings that random and tpe draw (20)")
    parser.add_argument("--metric", metavar="NAME", help="what judges a setting (held_out/score, score or loss)")
    parser.add_argument("--direction", metavar="WHICH", help="max or min (min for a loss or a KL, else max)")
    parser.add_argument("--prune", action="store_true", help="stop hopeless settings at a quarter or half of the steps")
    parser.add_argument("--jobs", metavar="N", default="auto", help="trials at once; auto: as many as fit (auto)")
    parser.add_argument("--name", metavar="NAME", help="the sweep's folder and the group of its runs (the file's name)")
    parser.add_argument("--resume", metavar="NAME", help="resume a sweep, by its name or its folder")
    parser.add_argument("--workspace", metavar="DIR", help="with --resume: the folder of runs (runs)")
    parser.add_argument("--json", action="store_true", help="print one JSON line a trial, and the table at the end")
    return parser


def _jobs(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return count(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--jobs: {error}, or auto") from None


def _check_alone(options: argparse.Namespace, flags: list[str]) -> None:
    """--resume takes the settings of the sweep from its folder."""
    names = ("vary", "seeds", "sampler", "budget", "metric", "direction", "prune", "name")
    given = [f"--{name}" for name in names if getattr(options, name)] + flags
    if given:
        raise UsageError(
            f"{given[0]} does not go with --resume, which continues the sweep as it was asked for: repeat the whole "
            "command to add seeds or budget, or start another sweep with --name"
        )


def start_sweep(source: str, options: argparse.Namespace, flags: list[str], jobs: int | None) -> int:
    """Check everything, then run; the same sweep begun before is continued."""
    from tether.config.load import load_section
    from tether.config.recipe_file import any_recipe_named
    from tether.config.recipes import RECIPES
    from tether.config.sweep_settings import SweepSettings
    from tether.rewards.agree import agree_to_recipe
    from tether.sweeps.prepare import SweepRequest, prepare
    from tether.sweeps.variation import parse_options

    path = None if source in RECIPES else source
    recipe = any_recipe_named(source, flags)
    given = {name: getattr(options, name) for name in ("seeds", "sampler", "budget", "metric", "direction")}
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    words += ["--prune=true"] if options.prune else []
    vary = {"vary": parse_options(options.vary)} if options.vary else {}
    settings = load_section(SweepSettings, "sweep", path, words, vary)
    manifest = prepare(SweepRequest(recipe, source, settings, options.name))
    agree_to_recipe(recipe, path, flags)

    from tether.sweeps.run_sweep import run_sweep

    return _print_table(run_sweep(manifest, jobs=jobs, json_output=options.json), json_output=options.json)


def resume_sweep(name: str, workspace: str | None, jobs: int | None, *, json_output: bool) -> int:
    """Continue a sweep, by its name in the workspace or by its folder; a finished one writes its report again."""
    from tether.config.allowed_code import code_names
    from tether.errors import ConfigError
    from tether.rewards.agree import agree_to_names
    from tether.sweeps.manifest import find_sweeps, is_sweep, read_manifest

    directory = Path(workspace or "runs")
    folder = next((place for place in (directory / name, Path(name).expanduser()) if is_sweep(place)), None)
    if folder is None:
        from difflib import get_close_matches

        names = [each.name for each in find_sweeps(directory)]
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names) or 'none'}"
        raise ConfigError(f"there is no sweep {name} in {directory}: {hint}")
    manifest = read_manifest(folder)
    names = code_names(manifest.base)
    agree_to_names(names, names, folder)

    from tether.sweeps.run_sweep import run_sweep

    return _print_table(run_sweep(manifest, jobs=jobs, json_output=json_output), json_output=json_output)


def _print_table(ended: SweepManifest, *, json_output: bool) -> int:
    from tether.sweeps.sweep_table import print_sweep

    return print_sweep(ended, json_output=json_output)
