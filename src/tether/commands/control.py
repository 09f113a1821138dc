"""The command that trains on environments: `tether control`. Its flags are keys of a recipe."""

from __future__ import annotations

from tether.commands.train import take_resume
from tether.errors import UsageError

SUMMARY = "PPO and TRPO on gymnasium's environments, with the defaults of the PPO paper's control experiments"
USAGE = "tether control ENV [RECIPE.yaml] [--section.key VALUE ...]"

OPTIONS = """
Options:
  --json         print one JSON line an iteration, in place of the table
  --resume auto  resume the run of this name if there is one
  --help         this text; after an environment, every key, its default and what it means
"""
HELP = f"""Usage: {USAGE}

{SUMMARY}.
{OPTIONS}
Try: tether control CartPole-v1 --environment.count 8 --rollout.steps 128 --run.environment_steps 100000
"""


def control_command(words: list[str]) -> int:
    """Train a policy for an environment."""
    wants_help = any(word in ("--help", "-h") for word in words)
    if wants_help and words[0].startswith("-"):
        print(HELP, end="")
        return 0
    from tether.config.control_recipe import ControlRecipe

    if wants_help:
        from tether.config.schema import print_fields

        print_fields(ControlRecipe, "control ENV", SUMMARY)
        print(OPTIONS, end="")
        return 0
    json_output = "--json" in words
    words = [word for word in words if word != "--json"]
    given: list[str] = []
    while words and not words[0].startswith("-") and len(given) < 2:
        given.append(words.pop(0))
    paths = [word for word in given if word.endswith((".yaml", ".yml"))]
    names = [word for word in given if word not in paths]
    if len(paths) > 1 or len(names) > 1:
        raise UsageError(f"one environment and one recipe at most: {USAGE}")
    resume = take_resume(words)
    flags = [f"--environment.id={name}" for name in names] + words
    if not flags and not paths:
        raise UsageError(f"control needs an environment first: {USAGE}")

    from tether.config.load import load_settings

    path = paths[0] if paths else None
    recipe = load_settings(ControlRecipe, path, flags)  # before torch is imported: a wrong key is reported at once
    from tether.rewards.agree import agree_to_recipe

    agree_to_recipe(recipe, path, flags)

    from tether.control.run import run_control, start_or_resume

    return (start_or_resume if resume else run_control)(recipe, json_output=json_output)
