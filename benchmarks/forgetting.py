"""One run that is made to forget, and three healthy ones: does the doctor tell them apart?

    python benchmarks/forgetting.py [--out FOLDER]            SmolLM2-135M
    python benchmarks/forgetting.py --tiny [--out FOLDER]     a byte-level model that first learns to read this
                                                              project's documentation

The runs follow `recipes/forgetting.yaml` and are ordinary runs in FOLDER: what is finished is not repeated, and what
was stopped is resumed. The table has each capability before and after, and what the doctor says.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from rich.console import Console

from tether.config.load import load_recipe
from tether.config.recipes import Recipe
from tether.doctor.doctor import Doctor
from tether.errors import Stopped
from tether.progress import say
from tether.reports.capability_table import changes_of
from tether.store.folder import RunFolder, is_run, run_path
from tether.store.read import open_workspace, read_run
from tether.train.run import Watch, interruptions, train_watched

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "forgetting.yaml"
NEAR = ["--kl.coef", "0.05", "--optimizer.policy_lr", "3e-5"]
RUNS: dict[str, tuple[str, list[str]]] = {
    "forgets": ("rloo", []),
    "remembers-rloo": ("rloo", [*NEAR, "--kl.apply_to", "reward", "--run.seed", "1"]),
    "remembers-grpo": ("grpo", [*NEAR, "--kl.apply_to", "loss", "--run.seed", "2"]),
    "remembers-ppo": ("ppo", [*NEAR, "--kl.apply_to", "reward", "--run.seed", "3"]),
}
MIN_PROSE, MAX_PROSE = 60, 220  # characters of a paragraph that the tiny model reads


def train(recipe: Recipe) -> Path:
    """Train or resume one run, unless it is finished."""
    folder = run_path(recipe)
    say(f"{folder.name}: {recipe.method}")
    with interruptions() as stop:
        resume = is_run(folder) and not RunFolder(folder).is_free
        done = train_watched(recipe, Watch(), Console(quiet=True), stop=stop, resume=resume)
    if not done.finished:
        raise Stopped(f"stopped in {folder}; the same command goes on from there")
    return folder


def first_reader(out: Path) -> str:
    """A byte-level model that has learned from the documentation's paragraphs how English is spelled."""
    records = out / "paragraphs.jsonl"
    if not records.exists():
        texts = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
        blocks = [" ".join(block.split()) for text in texts for block in re.split(r"\n\s*\n", text)]
        prose = [block for block in blocks if len(block) >= MIN_PROSE and block[0].isupper()]
        rows = [{"prompt": block[:8], "completion": block[8:MAX_PROSE]} for block in prose]
        records.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = ["--data.train", str(records), "--run.directory", str(out), "--run.name", "reader", "--run.steps", "150"]
    flags += ["--sft.batch_size", "16", "--optimizer.policy_lr", "4e-3", "--model.device", "cpu"]
    return str(train(load_recipe("sft", None, flags)) / "model")


def recipe_of(name: str, out: Path, start: str | None) -> Recipe:
    """The recipe of a run; a tiny model takes a larger learning rate."""
    method, flags = RUNS[name]
    own = ["--run.directory", str(out), "--run.name", name]
    if start is not None:
        rate = "1e-2" if name == "forgets" else "3e-4"
        flags = [word for word in flags if word not in ("--optimizer.policy_lr", "3e-5")]
        own += ["--model.path", start, "--roles.trainable_layers", "1", "--optimizer.policy_lr", rate]
    return load_recipe(method, str(RECIPE), [*flags, *own])


def table(out: Path) -> str:
    """What each run changed, and what the doctor says of it, in Markdown."""
    lines = ["| run | method | capability | before | after | difference | doctor |", "|---|---|---|---|---|---|---|"]
    for name, (method, _) in RUNS.items():
        with open_workspace(str(out)) as opened:
            run = read_run(opened, name)
            found = [each.severity for each in Doctor().examine(run) if each.audit == "capability-loss"]
        for change in changes_of(run):
            verdict = f"{found[0]}" if found and change.is_loss else "no finding" if not found else ""
            lines.append(f"| {name} | {method} | {change.label} | {' | '.join(change.texts)} | {verdict} |")
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tiny", action="store_true", help="a byte-level model in place of SmolLM2-135M")
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--out", help="the folder of the runs (runs/forgetting, or runs/forgetting-tiny)")
    options = parser.parse_args()
    out = Path(options.out or f"runs/forgetting{'-tiny' if options.tiny else ''}")
    out.mkdir(parents=True, exist_ok=True)
    start = first_reader(out) if options.tiny else None
    for name in options.only:
        train(recipe_of(name, out, start))
    if options.only == list(RUNS):
        print(table(out))


if __name__ == "__main__":
    main()
