"""`tether demo`: supervised fine-tuning, preferences, reward model, PPO, and a report, in one command."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tether.config.demo import DemoRecipe
from tether.config.recipes import Recipe
from tether.demo.rater import PersonRater, StandInRater
from tether.demo.rule import rule_score
from tether.demo.stages import Judged, Places, collect_preferences, judge, load, ppo_stage, reward_stage, sft_stage
from tether.errors import ConfigError, Stopped
from tether.loops.eval_report import visible
from tether.loops.run import interruptions, train_recipe
from tether.types import Rollout

MARKER = "demo.json"
SAMPLES_SHOWN = 5  # about so many answers are shown while PPO runs
SHOWN = {
    "sft": {"loss": "loss"},
    "reward": {"loss": "loss", "accuracy": "accuracy"},
    "ppo": {"reward/proxy": "proxy", "reward/true": "true", "kl_ref_k3": "KL", "response_length": "length"},
}


@dataclass
class DemoRun:
    """What is known so far."""

    recipe: DemoRecipe
    places: Places
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    preferences: dict[str, float] = field(default_factory=dict[str, float])

    def metrics(self, stage: str) -> list[dict[str, Any]]:
        """What a stage recorded, step by step."""
        lines = (self.places.root / stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def reward_report(self) -> dict[str, Any]:
        """How far the reward model can be trusted."""
        return json.loads((self.places.root / "reward" / "report.json").read_text(encoding="utf-8"))


def run_demo(recipe: DemoRecipe, *, human: bool, json_output: bool) -> int:
    """Run every stage and write the report; the exit code."""
    from tether.demo.report import write_demo_report

    console = Console(stderr=True)
    run = DemoRun(recipe, Places(prepare_folder(recipe)))
    with interruptions() as stop, stages(console) as show:
        judged = run_stages(run, stop=stop, show=show, human=human, console=console)
        with timed(run, "report"):
            report, summary = write_demo_report(run, judged)
    (run.places.root / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if json_output:
        print(json.dumps(summary))
    low, high = summary["win_rate_interval"]
    console.print(
        f"\nThe PPO model wins {summary['win_rate']:.0%} of {recipe.judging.prompts} unseen prompts against the SFT "
        f"model, by the true rule (95 % interval {low:.0%} to {high:.0%})."
    )
    console.print(f"Report: {report}", soft_wrap=True)
    console.print(
        f"Talk to it: tether chat {run.places.model('ppo')} --compare {run.places.model('sft')}", soft_wrap=True
    )
    return 0


def prepare_folder(recipe: DemoRecipe) -> Path:
    """An empty folder; one that an earlier demo left is replaced, any other is refused."""
    root = Path(recipe.directory) / recipe.name
    if root.exists() and any(root.iterdir()):
        if not (root / MARKER).is_file():
            raise ConfigError(f"{root} is not an earlier demo's folder: choose another with --name, or remove it")
        shutil.rmtree(root)
    root.mkdir(parents=True, exist_ok=True)
    (root / MARKER).write_text(json.dumps({"method": "demo", **recipe.model_dump(mode="json")}, indent=2) + "\n")
    return root


Show = Callable[[str, str, int], "Advance"]
Advance = Callable[[int, str], None]


def run_stages(run: DemoRun, *, stop: Callable[[], bool], show: Show, human: bool, console: Console) -> Judged:
    """The stages in order. Between two of them, an interruption ends the demo."""
    recipe, places = run.recipe, run.places

    def train(stage: str, title: str, settings: Recipe) -> None:
        advance = show(stage, title, settings.run.steps)

        def step(index: int, metrics: dict[str, float]) -> None:
            numbers = (f"{label} {metrics[name]:.3g}" for name, label in SHOWN[stage].items() if name in metrics)
            advance(index + 1, "  ".join(numbers))

        def look_at(index: int, sample: Rollout) -> None:
            if index % max(settings.run.steps // SAMPLES_SHOWN, 1) == 0:
                show_sample(console, index + 1, sample)

        with timed(run, stage):
            trained = train_recipe(settings, stop=stop, advance=step, notify=lambda _: None, look_at=look_at)
        if trained.steps < settings.run.steps:
            raise Stopped(f"stopped in stage {stage}; what was learned so far is in {places.root}")

    train("sft", "1 Learn from demonstrations", sft_stage(recipe, places))
    advance = show("preferences", "2 Rank answers", recipe.rater.prompts)
    with timed(run, "preferences"):
        rater = StandInRater(recipe.rater, recipe.seed)
        chooser = PersonRater(console, rater) if human else rater
        run.preferences = collect_preferences(recipe, places, chooser, load(places.model("sft"), recipe.seed))
        advance(recipe.rater.prompts, f"{run.preferences['pairs']:.0f} pairs")
    train("reward", "3 Learn what is preferred", reward_stage(recipe, places))
    train("ppo", "4 PPO against it", ppo_stage(recipe, places))
    advance = show("judging", "5 Compare on unseen prompts", recipe.judging.prompts)
    with timed(run, "judging"):
        models = [load(places.model(stage), recipe.seed) for stage in ("sft", "ppo")]
        judged = judge(recipe, *models)
        advance(recipe.judging.prompts, f"win rate {judged.win_rate.rate.value:.0%}")
    return judged


def show_sample(console: Console, step: int, sample: Rollout) -> None:
    """One answer of an iteration, above the bars."""
    cut = "" if sample.finish == "stop" else " ..."
    console.print(
        f"[dim]step {step}, true score {rule_score(sample).value:.2f}[/dim]  "
        f"{escape(visible(sample.prompt.messages[-1]['content']))}\n"
        f"    [italic]{escape(visible(sample.completion.strip()))}{cut}[/italic]"
    )


@contextmanager
def timed(run: DemoRun, stage: str) -> Iterator[None]:
    """Note how long a stage takes."""
    began = time.perf_counter()
    yield
    run.seconds[stage] = round(time.perf_counter() - began, 1)


@contextmanager
def stages(console: Console) -> Iterator[Show]:
    """One bar a stage, with the few numbers that matter."""
    columns = (
        TextColumn("{task.description:<30}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    with Progress(*columns, console=console) as progress:

        def show(stage: str, title: str, total: int) -> Advance:
            del stage
            task = progress.add_task(title, total=total, numbers="")
            return lambda done, numbers: progress.update(task, completed=done, numbers=numbers)

        yield show
