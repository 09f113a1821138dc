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

from tether.config.code_names import SEAL, CodeName, code_names, seal_record
from tether.config.demo import DemoRecipe
from tether.config.recipes import Recipe
from tether.demo.rater import PersonRater, StandInRater
from tether.demo.rule import rule_score
from tether.demo.stages import Judged, Places, collect_preferences, judge, load, ppo_stage, reward_stage, sft_stage
from tether.demo.task import DemoTask
from tether.errors import ConfigError, Stopped
from tether.evaluation.table import visible
from tether.progress import PlainProgress, working
from tether.rewards import consent
from tether.rewards.agree import agree_to_names
from tether.store.folder import DEMO, is_run, write_whole
from tether.store.read import open_workspace, read_run
from tether.train.run import interruptions, train_recipe
from tether.types import Rollout

PROGRESS, SUMMARY = "progress.json", "summary.json"
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
        with open_workspace(self.recipe.directory) as opened:
            return [dict(row) for row in read_run(opened, f"{self.recipe.name}/{stage}").metrics]

    def note_progress(self) -> None:
        """Keep what is known, for a demo that is resumed."""
        write_whole(self.places.root / PROGRESS, {"seconds": self.seconds, "preferences": self.preferences})

    def take_up_progress(self) -> None:
        """Read what an earlier attempt knew."""
        file = self.places.root / PROGRESS
        if file.is_file():
            known = json.loads(file.read_text(encoding="utf-8"))
            self.seconds, self.preferences = known["seconds"], known["preferences"]

    def reward_report(self) -> dict[str, Any]:
        """How far the reward model can be trusted."""
        return json.loads((self.places.root / "reward" / "report.json").read_text(encoding="utf-8"))


def run_demo(recipe: DemoRecipe, *, human: bool, json_output: bool, resume: bool = False) -> int:
    """Run every stage and write the report; the exit code. With `resume`, go on in the stage that it was stopped in."""
    from tether.demo.demo_report import write_demo_report

    there = len(DemoTask().held_out())
    if recipe.judging.prompts > there:
        raise ConfigError(
            f"judging.prompts is {recipe.judging.prompts}, but only {there} prompts are held out: ask for fewer"
        )
    console = Console(stderr=True)
    root = Path(recipe.directory) / recipe.name
    if not resume and is_unfinished(root, recipe):
        console.print(f"An earlier demo was stopped in {root}: going on with it.", style="dim", markup=False)
    elif not resume:
        prepare_folder(recipe, human=human)
    run = DemoRun(recipe, Places(root))
    run.take_up_progress()
    with interruptions() as stop, stages(console) as show:
        judged = run_stages(run, stop=stop, show=show, human=human, console=console)
        with timed(run, "report"):
            report, summary = write_demo_report(run, judged)
    write_whole(run.places.root / SUMMARY, summary)
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


def resume_demo(root: Path, *, json_output: bool) -> int:
    """Go on with the demo in this folder."""
    record = json.loads((root / DEMO).read_text(encoding="utf-8"))
    human = record.pop("human", False)
    recipe = DemoRecipe.model_validate_json(json.dumps(record), strict=True)
    recipe = recipe.model_copy(update={"directory": str(root.parent), "name": root.name})
    names = demo_names(recipe)
    agree_to_names(names, names, root)
    return run_demo(recipe, human=human, json_output=json_output, resume=True)


def is_unfinished(root: Path, recipe: DemoRecipe) -> bool:
    """Whether a demo of this very recipe was begun here and not ended; one of another recipe is refused."""
    if not (root / DEMO).is_file() or (root / SUMMARY).is_file():
        return False
    record = json.loads((root / DEMO).read_text(encoding="utf-8"))
    record.pop("human", None)
    if record != recipe.model_dump(mode="json"):
        raise ConfigError(
            f"{root} holds a demo with other settings that was stopped: go on with it (tether resume {root}), "
            "choose another --name, or remove it"
        )
    return True


def prepare_folder(recipe: DemoRecipe, *, human: bool) -> Path:
    """An empty folder; one that an earlier demo left is replaced, any other is refused."""
    root = Path(recipe.directory) / recipe.name
    if root.exists() and any(root.iterdir()):
        if not (root / DEMO).is_file():
            raise ConfigError(f"{root} is not an earlier demo's folder: choose another with --name, or remove it")
        shutil.rmtree(root)
    root.mkdir(parents=True, exist_ok=True)
    if seal := seal_record(demo_names(recipe), consent.current().root):
        write_whole(root / SEAL, seal)
    write_whole(root / DEMO, {"human": human, **recipe.model_dump(mode="json")})
    return root


def demo_names(recipe: DemoRecipe) -> tuple[CodeName, ...]:
    """What the stages name that lies outside their recipes."""
    return tuple(name for stage in (recipe.sft, recipe.reward, recipe.ppo) for name in code_names(stage))


Show = Callable[[str, str, int], "Advance"]
Advance = Callable[[int, str], None]


def run_stages(run: DemoRun, *, stop: Callable[[], bool], show: Show, human: bool, console: Console) -> Judged:
    """The stages in order; one that is done is passed over, one that was begun goes on."""
    recipe, places = run.recipe, run.places

    told: set[str] = set()

    def notify(text: str) -> None:
        if text not in told:  # every stage loads the same tokenizer, and would say the same of it
            told.add(text)
            console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def train(stage: str, title: str, settings: Recipe) -> None:
        advance = show(stage, title, settings.run.steps)

        def step(index: int, metrics: dict[str, float]) -> None:
            numbers = (f"{label} {metrics[name]:.3g}" for name, label in SHOWN[stage].items() if name in metrics)
            advance(index + 1, "  ".join(numbers))

        def look_at(index: int, sample: Rollout) -> None:
            if index % max(settings.run.steps // SAMPLES_SHOWN, 1) == 0:
                show_sample(console, index + 1, sample)

        with timed(run, stage):
            trained = train_recipe(
                settings,
                stop=stop,
                advance=step,
                notify=notify,
                look_at=look_at,
                resume=is_run(places.root / stage),
            )
        if not trained.finished:
            raise Stopped(f"stopped in stage {stage}; go on with: tether resume {places.root}")
        advance(settings.run.steps, "")

    def rank() -> None:
        advance = show("preferences", "2 Rank answers", recipe.rater.prompts)
        if not run.preferences:
            with timed(run, "preferences"), working("2 Rank answers", announce=False, spinner=False):
                rater = StandInRater(recipe.rater, recipe.seed)
                chooser = PersonRater(console, rater) if human else rater
                run.preferences = collect_preferences(recipe, places, chooser, load(places.model("sft"), recipe.seed))
        advance(recipe.rater.prompts, f"{run.preferences['pairs']:.0f} pairs")

    train("sft", "1 Learn from demonstrations", sft_stage(recipe, places))
    rank()
    if stop():
        raise Stopped(f"stopped after stage preferences; go on with: tether resume {places.root}")
    train("reward", "3 Learn what is preferred", reward_stage(recipe, places))
    shutil.rmtree(places.states, ignore_errors=True)  # large, and no later stage reads these texts
    train("ppo", "4 PPO against it", ppo_stage(recipe, places))
    advance = show("judging", "5 Compare on unseen prompts", recipe.judging.prompts)
    with timed(run, "judging"), working("5 Compare on unseen prompts", announce=False, spinner=False):
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
        f"    [italic]{escape(visible(sample.completion.strip()))}{cut}[/italic]",
        soft_wrap=True,
    )


@contextmanager
def timed(run: DemoRun, stage: str) -> Iterator[None]:
    """Note how long a stage takes, over all the attempts that it takes."""
    began = time.perf_counter()
    try:
        yield
    finally:
        run.seconds[stage] = round(run.seconds.get(stage, 0.0) + time.perf_counter() - began, 1)
        run.note_progress()


@contextmanager
def stages(console: Console) -> Iterator[Show]:
    """One bar a stage, with the few numbers that matter; plain lines where the output goes to a file."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda stage, title, total: PlainProgress(title, total).advance  # noqa: ARG005
        return
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
