"""`tether demo` on the command line; light, so that help is instant."""

from __future__ import annotations

from pathlib import Path

SUMMARY = "the whole of RLHF on a real model, in minutes: SFT, rankings, reward model, PPO, a report"

HELP = """Usage: tether demo [RECIPE.yaml] [--human] [--section.key VALUE ...] [--json]

A demo that was stopped goes on with `tether resume runs/demo`, in the stage that it was in.

The whole of RLHF on a real pretrained model: supervised fine-tuning, ranked answers, a reward model, PPO, and a report
that compares the result with its start on prompts that no stage has seen.

Options:
  --human  choose between answers yourself, for as many pairs as you like
  --json   print the summary as one JSON line at the end
  --help   this text; `tether demo --keys` lists every setting

Try: tether demo --seed 1 --name seed1
     tether demo --ppo.kl.coef 0 --ppo.run.steps 80 --name over
"""


def main(words: list[str]) -> int:
    """Run the demo; the exit code."""
    if any(word in ("--help", "-h") for word in words):
        print(HELP)
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


def resume(folder: Path, *, json_output: bool) -> int:
    """Go on with a demo that was stopped or killed."""
    from tether.demo.pipeline import resume_demo

    return resume_demo(folder, json_output=json_output)
