"""The demo's stages. Each is what a user would do with a recipe of their own; the pipeline only passes files along."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.config.demo import DemoRecipe
from tether.config.recipes import PPORecipe, RewardRecipe, SFTRecipe
from tether.config.rewards import ModelPart, TaskPart
from tether.config.sections import DataSettings, RolesSettings, TaskSettings
from tether.data.cursor import DataOrder
from tether.demo.rater import Rater
from tether.demo.rule import rule_reward
from tether.demo.task import DemoTask, data_file
from tether.errors import DataError
from tether.evaluation.evaluate import Evaluation, WinRate, compare, evaluate_model, with_kl
from tether.evaluation.judges import ScoreJudge
from tether.models.backbone_cache import BackboneCache
from tether.models.forward import backbone_of
from tether.models.load import LoadedModel, load_causal_lm
from tether.protocols import Sampling
from tether.rollout.native import NativeEngine
from tether.seeds import derive_seed
from tether.types import Rollout

MAX_AT_ONCE = 96  # answers: from 64 on more of them take as much longer, and fewer steps are taken with a few left


@dataclass(frozen=True)
class Places:
    """Where the demo keeps its stages."""

    root: Path

    def model(self, stage: str) -> str:
        """The model that a stage trained."""
        return str(self.root / stage / "model")

    @property
    def train_pairs(self) -> Path:
        """The choices that the reward model learns from."""
        return self.root / "preferences" / "train.jsonl"

    @property
    def held_out_pairs(self) -> Path:
        """The choices that it is tested on."""
        return self.root / "preferences" / "held_out.jsonl"

    @property
    def states(self) -> Path:
        """What the backbone gave for the texts of one stage, for the next."""
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
    """The reward model: starts from the SFT model, learns the choices, is centred on the demonstrations."""
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
    """PPO against the reward model. The true rule is measured beside it with weight 0: the policy never feels it."""
    ppo = recipe.ppo
    shared = ppo.roles.mode != "separate"
    proxy = ModelPart(kind="model", name="proxy", path=places.model("reward"), dtype=ppo.model.dtype, shared=shared)
    truth = TaskPart(kind="task", name="true", weight=0.0)
    return ppo.model_copy(
        update={
            "model": ppo.model.model_copy(update={"path": places.model("sft")}),
            "task": TaskSettings(name="tether.demo.task:DemoTask"),
            "reward": ppo.reward.model_copy(update={"parts": (proxy, truth, *ppo.reward.parts)}),
            "run": _run(recipe, "ppo", places),
        }
    )


def _run(recipe: DemoRecipe, stage: str, places: Places) -> Any:
    """The stage as a run of the workspace that the demo is in."""
    settings = getattr(recipe, stage).run
    directory = str(places.root.parent)
    return settings.model_copy(
        update={"name": f"{places.root.name}/{stage}", "directory": directory, "seed": recipe.seed}
    )


def _roles(stage: SFTRecipe | RewardRecipe, places: Places) -> RolesSettings:
    """The stage's roles; where they share a backbone, with what it gave for the texts of the stages before."""
    shared = stage.roles.mode == "shared_backbone"
    return stage.roles.model_copy(update={"backbone_cache": str(places.states)}) if shared else stage.roles


def load(path: str, seed: int) -> LoadedModel:
    """A stage's model, for sampling."""
    return load_causal_lm(path, dtype="float32", device="auto", seed=seed)


def collect_preferences(recipe: DemoRecipe, places: Places, rater: Rater, model: LoadedModel) -> dict[str, float]:
    """Sample several answers a prompt, let the rater rank them, and keep the rankings in two files, split by prompt."""
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
        records.append(_record(answers, ranks))
    held_out = math.ceil(settings.held_out * len(records))
    if len(records) - held_out < 8 or held_out < 8:
        raise DataError(f"the answers to only {len(records)} prompts could be ranked: raise rater.prompts")
    places.train_pairs.parent.mkdir(parents=True, exist_ok=True)
    for path, part in ((places.held_out_pairs, records[:held_out]), (places.train_pairs, records[held_out:])):
        path.write_text("".join(json.dumps(record) + "\n" for record in part), encoding="utf-8")
    return {"prompts": len(records), "pairs": pairs, "held_out_prompts": held_out, "agrees_with_rule": agreed / pairs}


def _states_for_reward(recipe: DemoRecipe, places: Places, model: LoadedModel) -> BackboneCache | None:
    """Where sampling leaves what the reward model's backbone would give for the same tokens, if it has one."""
    roles, backbone = recipe.reward.roles, backbone_of(model.model)
    depth = backbone.config.num_hidden_layers - roles.trainable_layers
    return BackboneCache(places.states, backbone, depth) if roles.mode == "shared_backbone" and depth > 0 else None


def _record(answers: Sequence[Rollout], ranks: Sequence[int]) -> dict[str, Any]:
    """One ranking in the usual columns; an answer that was cut off is marked, for it must not be read as ended."""
    return {
        "prompt": list(answers[0].prompt.messages),
        "answers": [answer.completion.strip() or "(empty)" for answer in answers],
        "ranks": list(ranks),
        "ended": [answer.finish == "stop" for answer in answers],
    }


@dataclass(frozen=True)
class Judged:
    """The start and the result, side by side, on prompts that no stage has seen."""

    before: Evaluation
    after: Evaluation
    win_rate: WinRate


def judge(recipe: DemoRecipe, before: LoadedModel, after: LoadedModel) -> Judged:
    """Both models answer the same prompts; the true rule says which answer is better."""
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
