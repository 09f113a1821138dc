"""The order of a pipeline's stages, and what a value such as `stage:sft` stands for at each place in it.

stage:NAME              what the stage NAME made last: a model, or records
stage:NAME@all          the ratings of NAME in this round and in all earlier ones
stage:policy            the newest policy
stage:policy@previous   the policy at the end of the previous round; in round 1 the policy before the rounds
stage:policy@first      the policy before the rounds, to which the report measures the KL
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tether.config.base import Settings
from tether.config.pipeline_recipe import ALL, FIRST, POLICY, PREVIOUS, STAGE, Makes, Pipeline, Stage
from tether.config.recipes import Recipe, SFTRecipe
from tether.errors import ConfigError

RANDOM, START_FOLDER = "tiny-bytes", "start-policy"
TRAIN_FILE, HELD_OUT_FILE, BEST_FILE = "train.jsonl", "held_out.jsonl", "best.jsonl"
REWARD_MODEL = re.compile(r"roles\.critic_init|(reward\.|)parts\.\d+\.path")
POLICY_KEY = re.compile(r"model\.path|kl\.reference")
RECORDS = re.compile(r"data\.(train|held_out)(\.\d+)?|ptx\.data(\.\d+)?")
KINDS: dict[Makes, str] = {
    "policy": "a policy",
    "reward": "a reward model",
    "ratings": "ratings",
    "answers": "answers",
}


@dataclass(frozen=True)
class PipelineStep:
    """One stage in one round; round 0 is before the rounds."""

    place: int
    round: int
    stage: Stage

    @property
    def folder(self) -> str:
        """The name of its folder in the pipeline's."""
        return f"round-{self.round}-{self.stage.name}" if self.round else self.stage.name


def steps_of(pipeline: Pipeline) -> tuple[PipelineStep, ...]:
    """Every stage of every round, in order."""
    stages = [(0, stage) for stage in pipeline.stages]
    for number in range(1, pipeline.settings.rounds + 1):
        stages += [(number, stage) for stage in pipeline.each_round]
    return tuple(PipelineStep(place, number, stage) for place, (number, stage) in enumerate(stages))


@dataclass(frozen=True)
class StagePlaces:
    """Where the steps of a pipeline keep what they make, and what a reference stands for."""

    pipeline: Pipeline
    root: Path

    @property
    def steps(self) -> tuple[PipelineStep, ...]:
        """Every step, in order."""
        return steps_of(self.pipeline)

    def folder(self, step: PipelineStep) -> Path:
        """The step's folder."""
        return self.root / step.folder

    @property
    def first_policy(self) -> str | None:
        """The policy that the file names. One with random weights is saved once, so that every stage has the same."""
        policy = self.pipeline.settings.policy
        return str(self.root / START_FOLDER) if policy == RANDOM else policy

    def model(self, step: PipelineStep) -> str:
        """The model that a step trained."""
        return str(self.folder(step) / "model")

    def policy_before(self, round: int) -> str | None:
        """The newest policy before a round begins; None where there is none."""
        found = [step for step in self.steps if step.stage.makes == "policy" and step.round < round]
        return self.model(found[-1]) if found else self.first_policy

    def resolved(self, step: PipelineStep) -> Settings:
        """The step's settings with paths in place of references."""
        plain = step.stage.settings.model_dump(mode="json")
        replaced = _replaced(plain, "", lambda key, reference: self._paths(step, key, reference))
        return type(step.stage.settings).model_validate_json(json.dumps(replaced), strict=True)

    def _paths(self, step: PipelineStep, key: str, reference: str) -> str | list[str]:
        name, _, which = reference.removeprefix(STAGE).partition("@")
        if name == POLICY:
            return self._policy(step, key, which)
        made = self._made(step, key, name, which)
        makes = made[-1].stage.makes
        if makes in ("policy", "reward"):
            return self.model(made[-1])
        if makes == "answers":
            return str(self.folder(made[-1]) / BEST_FILE)
        file = HELD_OUT_FILE if "held_out" in key else TRAIN_FILE
        paths = [str(self.folder(each) / file) for each in made]
        return paths if which == ALL else paths[-1]

    def _policy(self, step: PipelineStep, key: str, which: str) -> str:
        if which not in ("", PREVIOUS, FIRST):
            raise _error(step, key, f"{STAGE}{POLICY}@{which} is unknown: write @{PREVIOUS} or @{FIRST}")
        if which and not step.round:
            raise _error(step, key, f"{STAGE}{POLICY}@{which} is for stages of each_round")
        earlier = [each for each in self.steps[: step.place] if each.stage.makes == "policy"]
        newest = self.model(earlier[-1]) if earlier else self.first_policy
        found = newest if not which else self.policy_before(1 if which == FIRST else step.round)
        if found is None:
            raise _error(step, key, "no stage before it makes a policy: add one, such as sft, or set `policy:`")
        return found

    def _made(self, step: PipelineStep, key: str, name: str, which: str) -> list[PipelineStep]:
        """The steps of a stage that are done before this one."""
        stages = {stage.name: stage for stage in self.pipeline.all_stages}
        if name not in stages:
            close = get_close_matches(name, [*stages, POLICY], n=1)
            hint = f"did you mean {STAGE}{close[0]}?" if close else f"the stages are {', '.join(stages)}"
            raise _error(step, key, f"there is no stage {name}: {hint}")
        if which and (which != ALL or stages[name].makes != "ratings"):
            raise _error(step, key, f"@{which} of {name} is unknown: @{ALL} is for the ratings of a collect stage")
        made = [each for each in self.steps[: step.place] if each.stage.name == name]
        if not made:
            itself = "itself" if name == step.stage.name else f"{STAGE}{name}, which runs after it"
            raise _error(step, key, f"it uses {itself}: stages use what stages before them made")
        return made


def check_references(pipeline: Pipeline) -> None:
    """Raise ConfigError where a reference cannot be resolved, or leads to something of another kind."""
    places = StagePlaces(pipeline, Path(pipeline.settings.directory) / pipeline.settings.name)
    stages = {stage.name: stage for stage in pipeline.all_stages}
    for step in places.steps:
        if step.round > 1:
            continue  # what holds in the first round holds in every round
        for key, reference in references(step.stage.settings):
            wanted = _wanted(step, key)
            name = reference.removeprefix(STAGE).partition("@")[0]
            makes = "policy" if name == POLICY else stages[name].makes if name in stages else None
            if makes is not None and makes not in wanted:
                needed = " or ".join(KINDS[each] for each in wanted)
                raise _error(step, key, f"{reference} makes {KINDS[makes]}, and it needs {needed}")
            maker = stages.get(name)
            if maker is not None and isinstance(maker.settings, Recipe) and not maker.settings.run.save:
                raise _error(step, key, f"{reference} has run.save false, so it leaves no model: set it to true")
        places.resolved(step)


def references(settings: Settings) -> list[tuple[str, str]]:
    """(dotted key, value) of every value that stands for what a stage makes."""
    found: list[tuple[str, str]] = []

    def note(key: str, reference: str) -> str:
        found.append((key, reference))
        return reference

    _replaced(settings.model_dump(mode="json"), "", note)
    return found


def _wanted(step: PipelineStep, key: str) -> tuple[Makes, ...]:
    if POLICY_KEY.fullmatch(key):
        return ("policy",)
    if REWARD_MODEL.fullmatch(key):
        return ("reward",)
    if RECORDS.fullmatch(key):
        return ("answers",) if isinstance(step.stage.settings, SFTRecipe) or key.startswith("ptx") else ("ratings",)
    raise _error(step, key, "this key takes no stage")


def _replaced(plain: Any, key: str, replace: Callable[[str, str], str | list[str]]) -> Any:
    """Plain data with every reference replaced; one in a list may become several items."""
    if isinstance(plain, dict):
        return {name: _replaced(value, f"{key}.{name}" if key else name, replace) for name, value in plain.items()}
    if isinstance(plain, list):
        return list(_items(plain, key, replace))
    return replace(key, plain) if isinstance(plain, str) and plain.startswith(STAGE) else plain


def _items(plain: list[Any], key: str, replace: Callable[[str, str], str | list[str]]) -> Iterator[Any]:
    for place, value in enumerate(plain):
        found = _replaced(value, f"{key}.{place}", replace)
        if isinstance(value, str) and isinstance(found, list):
            yield from found
        else:
            yield found


def _error(step: PipelineStep, key: str, message: str) -> ConfigError:
    return ConfigError(f"stage {step.stage.name}, {key}: {message}")


def order_lines(pipeline: Pipeline) -> list[str]:
    """The stages of round 0 and 1 in order, with what each reads of others."""
    lines: list[str] = []
    for step in steps_of(pipeline):
        if step.round <= 1:
            where = "each round" if step.round else "once"
            read = ", ".join(f"{key}: {reference}" for key, reference in references(step.stage.settings))
            lines.append(f"{where:10}  {step.stage.name:16}  {step.stage.method:18}  {read}".rstrip())
    return [*lines, f"{pipeline.settings.rounds} rounds, {len(steps_of(pipeline))} stages in all"]
