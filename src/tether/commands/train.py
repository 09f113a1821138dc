"""The commands that train: `tether train` and `tether demo`. Their flags are keys of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tether.commands.options import columns, suggestion
from tether.errors import UsageError

if TYPE_CHECKING:
    from tether.config.recipes import Recipe

HELP = ("--help", "-h")

METHODS = {
    "sft": "supervised fine-tuning on demonstrations",
    "reward": "a reward model from pairs or rankings",
    "ppo": "Proximal Policy Optimization: clipped, unclipped or with a KL penalty",
    "reinforce": "the plain policy gradient, with any of four weightings",
    "rloo": "REINFORCE with a leave-one-out baseline",
    "grpo": "group-relative advantages, no critic",
    "trpo": "a hard trust region",
    "dpo": "preferences without a reward model",
}

TRAIN_HELP = """Usage: tether train METHOD [RECIPE.yaml] [--section.key VALUE ...] [--json]

Train a model. A flag sets one key of the recipe: --ppo.clip_range 0.1. Flags win over the file, the file over defaults.

Methods:
{methods}

Options:
  --json         print one JSON line a step, in place of the table
  --resume auto  resume the run of this name if there is one
  --nproc N      train with N processes on this machine; see docs/distributed.md
  --restarts M   with --nproc: when a process is lost, start all of them again, up to M times
  --min-nproc K  with --restarts: each time with one process fewer, down to K
  --ray ADDRESS  with --nproc: on a Ray cluster (auto, local or host:port); see docs/distributed.md
  --allow-code   PACKAGE or FILE.py whose code the recipe may name; see docs/security.md
  --help         with a method: every key, its default and what it means

Try: tether train ppo recipes/tiny-ppo.yaml
"""

DEMO_HELP = """Usage: tether demo [RECIPE.yaml] [--human] [--section.key VALUE ...] [--json]

Resume a stopped demo with `tether resume runs/demo`; it continues in the stage that it was in.

The whole of RLHF on a real pretrained model: supervised fine-tuning, ranked answers, a reward model, PPO, and a report
that compares the result with its start on prompts that no stage has seen.

Options:
  --human  choose between answers yourself, for as many pairs as you like
  --json   print the summary as one JSON line at the end
  --help   this text; `tether demo --keys` lists every setting

Try: tether demo --seed 1 --name seed1
     tether demo --ppo.kl.coef 0 --ppo.run.steps 80 --name over
"""


@dataclass(frozen=True)
class TrainWords:
    """What the words of `tether train` ask for: a recipe, what it was made from, and the options beside it."""

    recipe: Recipe
    path: str | None
    flags: list[str]
    resume: bool
    json_output: bool


def train_command(words: list[str]) -> int:
    """Train from a recipe and flags."""
    asked = recipe_of(words)
    if asked is None:
        return print_help(words)
    from tether.rewards.agree import agree_to_recipe

    agree_to_recipe(asked.recipe, asked.path, asked.flags)
    from tether.train.resume import start, start_or_resume

    return (start_or_resume if asked.resume else start)(asked.recipe, json_output=asked.json_output)


def recipe_of(words: list[str]) -> TrainWords | None:
    """The recipe that the words ask for, or None where they ask for help. Torch is not imported."""
    json_output = "--json" in words
    wants_help = any(word in HELP for word in words)
    words = [word for word in words if word not in ("--json", *HELP)]
    if wants_help and not words:
        return None
    if not words or words[0].startswith("-"):
        raise UsageError(f"train needs a method first: tether train METHOD [RECIPE.yaml], one of {', '.join(METHODS)}")
    method, *rest = words
    if method not in METHODS:
        raise UsageError(f"unknown method {method}: {suggestion(method, METHODS)}")
    if wants_help:
        return None
    path = rest.pop(0) if rest and not rest[0].startswith("-") else None
    resume = take_resume(rest)

    from tether.config.load import load_recipe

    return TrainWords(load_recipe(method, path, rest), path, rest, resume, json_output)


def print_help(words: list[str]) -> int:
    """Print the help of the command, or every key of a method."""
    methods = [word for word in words if word in METHODS]
    if not methods:
        print(TRAIN_HELP.format(methods=columns(METHODS)), end="")
        return 0
    from tether.config.recipes import RECIPES
    from tether.config.schema import print_fields

    print_fields(RECIPES[methods[0]], f"train {methods[0]}", METHODS[methods[0]])
    return 0


def take_resume(words: list[str]) -> bool:
    """Whether `--resume auto` was given; the option is removed from the words."""
    for place, word in enumerate(words):
        if word.startswith("--resume="):
            words[place : place + 1] = word.split("=", 1)
    if "--resume" not in words:
        return False
    place = words.index("--resume")
    value = words[place + 1] if place + 1 < len(words) else "nothing"
    if value not in ("auto", "never"):
        raise UsageError(f"--resume: expected auto or never, got {value}")
    del words[place : place + 2]
    return value == "auto"


def demo_command(words: list[str]) -> int:
    """Run the demo."""
    if any(word in ("--help", "-h") for word in words):
        print(DEMO_HELP)
        return 0
    from tether.config.recipes import DemoRecipe

    if "--keys" in words:
        from tether.config.schema import describe

        for leaf in describe(DemoRecipe):
            print(f"{leaf.key:45} {leaf.default_text:20} {leaf.description}")
        return 0
    from importlib.resources import files

    from tether.config.load import load_settings

    switches = {name: f"--{name}" in words for name in ("human", "json")}
    words = [word for word in words if word not in ("--human", "--json")]
    path = words.pop(0) if words and not words[0].startswith("--") else str(files("tether.demo") / "demo.yaml")
    recipe = load_settings(DemoRecipe, path, words)
    from tether.demo.pipeline import run_demo
    from tether.rewards.agree import agree_to_recipe

    for name in ("sft", "reward", "ppo"):
        flags = [f"--{word.removeprefix(f'--{name}.')}" for word in words if word.startswith(f"--{name}.")]
        agree_to_recipe(getattr(recipe, name), path, flags)

    return run_demo(recipe, human=switches["human"], json_output=switches["json"])
