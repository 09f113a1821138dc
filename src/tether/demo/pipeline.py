"""`tether demo`: supervised fine-tuning, preferences, a reward model, PPO and a report in one command.

Each stage is what a user would do with their own recipe; the pipeline only passes files along.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from tether.config.allowed_code import SEAL, CodeName, code_names, seal_record
from tether.config.recipes import DemoRecipe, PPORecipe, Recipe, RewardRecipe, SFTRecipe
from tether.config.rewards import ModelPart, TaskPart
from tether.config.sections import DataSettings, RolesSettings, TaskSettings
from tether.data.examples import DataOrder
from tether.demo.rule import DemoTask, PersonRater, Rater, StandInRater, data_file, rule_reward, rule_score
from tether.errors import ConfigError, DataError, Stopped
from tether.evaluation.evaluate import Evaluation, WinRate, compare, evaluate_model, with_kl
from tether.evaluation.judges import ScoreJudge
from tether.evaluation.measure import visible
from tether.models.backbones import backbone_of
from tether.models.load import LoadedModel, load_causal_lm
from tether.models.shared_backbone import BackboneCache
from tether.pipeline.rankings import ranking_record, write_split
from tether.pipeline.stage_progress import Show, notify_once, stage_progress, train_stage
from tether.progress import working
from tether.protocols import Sampling
from tether.rewards import consent
from tether.rewards.agree import agree_to_names
from tether.rollout.native import NativeEngine
from tether.seeds import derive_seed
from tether.store.folder import DEMO, write_whole
from tether.store.read import open_workspace, read_run
from tether.train.run import interruptions
from tether.types import Rollout

MAX_AT_ONCE = 96  # answers: above 64 the time grows in proportion, and fewer steps run with only a few answers left


@dataclass(frozen=True)
class Places:
    """The folders and files of the demo's stages."""

    root: Path

    def model(self, stage: str) -> str:
        """The folder of the model that a stage trained."""
        return str(self.root / stage / "model")

    @property
    def train_pairs(self) -> Path:
        """The rankings that the reward model is trained on."""
        return self.root / "preferences" / "train.jsonl"

    @property
    def held_out_pairs(self) -> Path:
        """The rankings that it is tested on."""
        return self.root / "preferences" / "held_out.jsonl"

    @property
    def states(self) -> Path:
        """The cache of the backbone's hidden states, shared between stages."""
        return self.root / "states"


def sft_stage(recipe: DemoRecipe, places: Places) -> SFTRecipe:
    """Supervised fine-tuning on the shipped demonstrations."""
    return recipe.sft.model_copy(
        update={
            "data": DataSettings(train=str(data_file("demonstrations.jsonl"))),
            "roles": _roles(recipe.sft, places),
            "run": _run(recipe, "sft", places),
        }
    )


def reward_stage(recipe: DemoRecipe, places: Places) -> RewardRecipe:
    """The reward model: starts from the SFT model, learns the rankings, is centered on the demonstrations."""
    reward = recipe.reward
    return reward.model_copy(
        update={
            "model": reward.model.model_copy(update={"path": places.model("sft")}),
            "data": DataSettings(train=str(places.train_pairs), held_out=str(places.held_out_pairs)),
            "reward": reward.reward.model_copy(update={"center_on": str(data_file("demonstrations.jsonl"))}),
            "roles": _roles(reward, places),
            "run": _run(recipe, "reward", places),
        }
    )


def ppo_stage(recipe: DemoRecipe, places: Places) -> PPORecipe:
    """PPO against the reward model. The true rule has weight 0: it is measured, and the policy is not trained on it."""
    ppo = recipe.ppo
    shared = ppo.roles.mode != "separate"
    proxy = ModelPart(kind="model", name="proxy", path=places.model("reward"), dtype=ppo.model.dtype, shared=shared)
    truth = TaskPart(kind="task", name="true", weight=0.0)
    return ppo.model_copy(
        update={
            "model": ppo.model.model_copy(update={"path": places.model("sft")}),
            "task": TaskSettings(name="tether.demo.rule:DemoTask"),
            "reward": ppo.reward.model_copy(update={"parts": (proxy, truth, *ppo.reward.parts)}),
            "run": _run(recipe, "ppo", places),
        }
    )


def _run(recipe: DemoRecipe, stage: str, places: Places) -> Any:
    """The run settings of a stage, in the demo's workspace."""
    settings = getattr(recipe, stage).run
    directory = str(places.root.parent)
    return settings.model_copy(
        update={"name": f"{places.root.name}/{stage}", "directory": directory, "seed": recipe.seed}
    )


def _roles(stage: SFTRecipe | RewardRecipe, places: Places) -> RolesSettings:
    """The stage's roles; with a shared backbone, they use the cached states of earlier stages."""
    shared = stage.roles.mode == "shared_backbone"
    return stage.roles.model_copy(update={"backbone_cache": str(places.states)}) if shared else stage.roles


def load(path: str, seed: int) -> LoadedModel:
    """A stage's model, loaded for sampling."""
    return load_causal_lm(path, dtype="float32", device="auto", seed=seed)


def collect_preferences(recipe: DemoRecipe, places: Places, rater: Rater, model: LoadedModel) -> dict[str, float]:
    """Sample several answers per prompt, let the rater rank them, and write two files of rankings, split by prompt."""
    settings = recipe.rater
    prompts = DataOrder(DemoTask().prompts(), derive_seed(recipe.seed, "preferences")).take(0, settings.prompts)
    states = _states_for_reward(recipe, places, model)
    rollouts = NativeEngine(model, max_num_seqs=MAX_AT_ONCE, states_for=states).generate(
        prompts,
        Sampling(max_new_tokens=settings.max_new_tokens, temperature=settings.temperature),
        samples_per_prompt=settings.answers,
        seed=derive_seed(recipe.seed, "preferences"),
    )
    if states is not None:
        states.write()
    records, pairs, agreed = [], 0, 0
    for start in range(0, len(rollouts), settings.answers):
        answers = rollouts[start : start + settings.answers]
        ranks = rater(answers)
        if ranks is None:
            continue
        answers = answers[: len(ranks)]
        scores = [score.value for score in rule_reward(answers)]
        chosen = [(i, j) for i, one in enumerate(ranks) for j, other in enumerate(ranks) if one < other]
        pairs += len(chosen)
        agreed += sum(scores[i] > scores[j] for i, j in chosen)
        records.append(ranking_record(answers, ranks))
    held_out = math.ceil(settings.held_out * len(records))
    if len(records) - held_out < 8 or held_out < 8:
        raise DataError(f"the answers to only {len(records)} prompts could be ranked: raise rater.prompts")
    write_split(records, held_out, places.train_pairs, places.held_out_pairs)
    return {"prompts": len(records), "pairs": pairs, "held_out_prompts": held_out, "agrees_with_rule": agreed / pairs}


def _states_for_reward(recipe: DemoRecipe, places: Places, model: LoadedModel) -> BackboneCache | None:
    """A cache in which sampling stores the hidden states that the reward model's training needs, if it can use one."""
    roles, backbone = recipe.reward.roles, backbone_of(model.model)
    depth = backbone.config.num_hidden_layers - roles.trainable_layers
    return BackboneCache(places.states, backbone, depth) if roles.mode == "shared_backbone" and depth > 0 else None


@dataclass(frozen=True)
class Judged:
    """The initial and the final model, compared on prompts that no stage has seen."""

    before: Evaluation
    after: Evaluation
    win_rate: WinRate


def judge(recipe: DemoRecipe, before: LoadedModel, after: LoadedModel) -> Judged:
    """Both models answer the same prompts; the true rule chooses the better answer."""
    settings = recipe.judging
    prompts: Sequence[Any] = DemoTask().held_out()[: settings.prompts]
    sampling = Sampling(max_new_tokens=settings.max_new_tokens, temperature=settings.temperature)
    seed = derive_seed(recipe.seed, "judging")
    sides = [
        evaluate_model(
            model,
            prompts,
            sampling=sampling,
            name=name,
            rewards={"true": rule_reward},
            seed=seed,
            max_num_seqs=MAX_AT_ONCE,
        )
        for name, model in (("SFT", before), ("PPO", after))
    ]
    after_with_kl = with_kl(sides[1], after, before, seed=seed)
    return Judged(sides[0], after_with_kl, compare(after_with_kl, sides[0], ScoreJudge(rule_reward), seed=seed))


PROGRESS, SUMMARY = "progress.json", "summary.json"
SAMPLES_SHOWN = 5  # approximate number of answers shown while PPO runs
SHOWN = {
    "sft": {"loss": "loss"},
    "reward": {"loss": "loss", "accuracy": "accuracy"},
    "ppo": {"reward/proxy": "proxy", "reward/true": "true", "kl_ref_k3": "KL", "response_length": "length"},
}


@dataclass
class DemoRun:
    """The state of a demo."""

    recipe: DemoRecipe
    places: Places
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    preferences: dict[str, float] = field(default_factory=dict[str, float])

    def metrics(self, stage: str) -> list[dict[str, Any]]:
        """The recorded metrics of a stage, step by step."""
        with open_workspace(self.recipe.directory) as opened:
            return [dict(row) for row in read_run(opened, f"{self.recipe.name}/{stage}").metrics]

    def note_progress(self) -> None:
        """Write the state to disk, so that the demo can be resumed."""
        write_whole(self.places.root / PROGRESS, {"seconds": self.seconds, "preferences": self.preferences})

    def take_up_progress(self) -> None:
        """Read the state that an earlier attempt wrote."""
        file = self.places.root / PROGRESS
        if file.is_file():
            known = json.loads(file.read_text(encoding="utf-8"))
            self.seconds, self.preferences = known["seconds"], known["preferences"]

    def reward_report(self) -> dict[str, Any]:
        """The reward model's evaluation."""
        return json.loads((self.places.root / "reward" / "report.json").read_text(encoding="utf-8"))


def run_demo(recipe: DemoRecipe, *, human: bool, json_output: bool, resume: bool = False) -> int:
    """Run every stage and write the report; returns the exit code. `resume` continues in the interrupted stage."""
    from tether.demo.demo_report import write_demo_report

    there = len(DemoTask().held_out())
    if recipe.judging.prompts > there:
        raise ConfigError(
            f"judging.prompts is {recipe.judging.prompts}, but only {there} prompts are held out: ask for fewer"
        )
    console = Console(stderr=True)
    root = Path(recipe.directory) / recipe.name
    if not resume and is_unfinished(root, recipe):
        console.print(f"An earlier demo was stopped in {root}: resuming it.", style="dim", markup=False)
    elif not resume:
        prepare_folder(recipe, human=human)
    run = DemoRun(recipe, Places(root))
    run.take_up_progress()
    with interruptions() as stop, stage_progress(console) as show:
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
    """Resume the demo in this folder."""
    record = json.loads((root / DEMO).read_text(encoding="utf-8"))
    human = record.pop("human", False)
    recipe = DemoRecipe.model_validate_json(json.dumps(record), strict=True)
    recipe = recipe.model_copy(update={"directory": str(root.parent), "name": root.name})
    names = demo_names(recipe)
    agree_to_names(names, names, root)
    return run_demo(recipe, human=human, json_output=json_output, resume=True)


def is_unfinished(root: Path, recipe: DemoRecipe) -> bool:
    """Whether an unfinished demo of the same recipe is here; raises for one of another recipe."""
    if not (root / DEMO).is_file() or (root / SUMMARY).is_file():
        return False
    record = json.loads((root / DEMO).read_text(encoding="utf-8"))
    record.pop("human", None)
    if record != recipe.model_dump(mode="json"):
        raise ConfigError(
            f"{root} holds a demo with other settings that was stopped: resume it (tether resume {root}), "
            "choose another --name, or remove it"
        )
    return True


def prepare_folder(recipe: DemoRecipe, *, human: bool) -> Path:
    """Create an empty folder; replaces the folder of an earlier demo, and raises for any other."""
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
    """The code and addresses that the stages name."""
    return tuple(name for stage in (recipe.sft, recipe.reward, recipe.ppo) for name in code_names(stage))


def run_stages(run: DemoRun, *, stop: Callable[[], bool], show: Show, human: bool, console: Console) -> Judged:
    """Run the stages in order; skips finished ones and resumes an interrupted one."""
    recipe, places = run.recipe, run.places

    notify = notify_once(console)

    def train(stage: str, title: str, settings: Recipe) -> None:
        advance = show(title, settings.run.steps)

        def look_at(index: int, sample: Rollout) -> None:
            if index % max(settings.run.steps // SAMPLES_SHOWN, 1) == 0:
                show_sample(console, index + 1, sample)

        with timed(run, stage):
            trained = train_stage(
                settings, places.root / stage, advance, SHOWN[stage], stop=stop, notify=notify, on_sample=look_at
            )
        if not trained.finished:
            raise Stopped(f"stopped in stage {stage}; resume with: tether resume {places.root}")

    def rank() -> None:
        advance = show("2 Rank answers", recipe.rater.prompts)
        if not run.preferences:
            with timed(run, "preferences"), working("2 Rank answers", announce=False, spinner=False):
                rater = StandInRater(recipe.rater, recipe.seed)
                chooser = PersonRater(console, rater) if human else rater
                run.preferences = collect_preferences(recipe, places, chooser, load(places.model("sft"), recipe.seed))
        advance(recipe.rater.prompts, f"{run.preferences['pairs']:.0f} pairs")

    train("sft", "1 Learn from demonstrations", sft_stage(recipe, places))
    rank()
    if stop():
        raise Stopped(f"stopped after stage preferences; resume with: tether resume {places.root}")
    train("reward", "3 Train the reward model", reward_stage(recipe, places))
    shutil.rmtree(places.states, ignore_errors=True)  # large, and no later stage reads these texts
    train("ppo", "4 PPO on the reward model", ppo_stage(recipe, places))
    advance = show("5 Compare on unseen prompts", recipe.judging.prompts)
    with timed(run, "judging"), working("5 Compare on unseen prompts", announce=False, spinner=False):
        models = [load(places.model(stage), recipe.seed) for stage in ("sft", "ppo")]
        judged = judge(recipe, *models)
        advance(recipe.judging.prompts, f"win rate {judged.win_rate.rate.value:.0%}")
    return judged


def show_sample(console: Console, step: int, sample: Rollout) -> None:
    """Print one answer of an iteration above the progress bars."""
    cut = "" if sample.finish == "stop" else " ..."
    console.print(
        f"[dim]step {step}, true score {rule_score(sample).value:.2f}[/dim]  "
        f"{escape(visible(sample.prompt.messages[-1]['content']))}\n"
        f"    [italic]{escape(visible(sample.completion.strip()))}{cut}[/italic]",
        soft_wrap=True,
    )


@contextmanager
def timed(run: DemoRun, stage: str) -> Iterator[None]:
    """Record the duration of a stage, summed over its attempts."""
    began = time.perf_counter()
    try:
        yield
    finally:
        run.seconds[stage] = round(run.seconds.get(stage, 0.0) + time.perf_counter() - began, 1)
        run.note_progress()
