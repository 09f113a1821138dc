"""A run as an object: what it recorded, its answers, its model, and going on with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tether.api.given import prompts_of, reward_of
from tether.config.recipes import Recipe, RLRecipe
from tether.errors import ConfigError
from tether.evaluation.sample_answers import sample_answers, unique_prompts
from tether.models.load import LoadedModel, load_causal_lm
from tether.ops.sampling import check_sampling
from tether.protocols import Sampling, StepHook, Tracker
from tether.reports.export_data import copy_model
from tether.seeds import derive_seed
from tether.store.folder import RunFolder
from tether.store.read import OpenWorkspace, RunSummary, find_run, open_workspace, read_run, recorded
from tether.store.recorded import Event
from tether.train.inputs import Objects
from tether.train.resume import checkpoint_model, forked_recipe, resumable_recipe, run_folder, stored_recipe

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_NEW_TOKENS = 128  # of a run that sampled nothing itself


@dataclass(frozen=True)
class Answer:
    """One answer of a model."""

    prompt: str  # the last message that was answered
    text: str
    ended: bool  # by itself; False where the length limit cut it off
    score: float | None = None  # None where nothing scored it
    parts: Mapping[str, float] = field(default_factory=dict[str, float])  # of the score
    messages: Sequence[Mapping[str, Any]] = ()  # the whole prompt


class Run:
    """A run in its folder. Get one from a training function, or from `load_run`."""

    def __init__(self, path: Path, *, objects: Objects | None = None, store_url: str | None = None) -> None:
        self.path = Path(path)
        self._objects = objects or Objects()
        self._store_url = store_url  # with its password, which no file keeps
        self._loaded: LoadedModel | None = None

    def __repr__(self) -> str:
        summary = self._summary()
        return (
            f"<Run {self.path}: {summary.method}, {summary.steps_done} of {summary.steps_target} steps, {self.state}>"
        )

    # -- what it is -----------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Its name in the workspace."""
        return self._recipe().run.name or self.path.name

    @property
    def method(self) -> str:
        """Such as ppo."""
        return self._recipe().method

    @property
    def state(self) -> str:
        """Such as done or stopped."""
        return self._summary().state

    @property
    def finished(self) -> bool:
        """Whether every step was taken; False for a run that can be resumed."""
        return RunFolder(self.path).is_finished

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return self._summary().steps_done

    @property
    def settings(self) -> dict[str, Any]:
        """Every key of its recipe, by section."""
        return self._recipe().model_dump(mode="json")

    # -- what it recorded -----------------------------------------------------------------------------------------

    @property
    def metrics(self) -> DataFrame:
        """One row a step, as a pandas DataFrame; `metrics_rows` needs no pandas."""
        try:
            import pandas
        except ImportError:
            raise ConfigError(
                "run.metrics needs the package pandas, which is not installed: pip install pandas, or use "
                "run.metrics_rows()"
            ) from None
        return pandas.DataFrame(self.metrics_rows()).set_index("step")

    def metrics_rows(self) -> list[dict[str, float]]:
        """One mapping a step, each with its "step"; what was not finite is NaN."""
        with self._opened() as opened:
            return [dict(row) for row in read_run(opened, str(self.path)).metrics]

    def answers(self, step: int = -1) -> list[Answer]:
        """The answers that a step learned from, with their scores; -1 is the last step whose answers were kept."""
        with self._opened() as opened:
            run = recorded(opened, find_run(opened, str(self.path)), metrics=())
            kept = list(run.rollout_steps)
            if not kept:
                raise ConfigError(
                    f"{self.path} kept no answers: {self.method} samples none, or store.rollouts_every is 0"
                )
            chosen = kept[-1] if step == -1 else step
            if chosen not in kept:
                shown = ", ".join(map(str, kept[-8:]))
                raise ConfigError(f"step: the answers of step {step} were not kept; the last that were: {shown}")
            return [
                Answer(
                    prompt=str(each.messages[-1]["content"]) if each.messages else each.prompt_text,
                    text=each.completion,
                    ended=each.finish == "stop",
                    score=each.score,
                    parts=dict(each.parts),
                    messages=tuple(each.messages),
                )
                for each in run.rollouts(chosen)
            ]

    @property
    def events(self) -> list[Event]:
        """What happened: resumed, stopped, a finding of the doctor."""
        with self._opened() as opened:
            return list(recorded(opened, find_run(opened, str(self.path)), metrics=()).events)

    @property
    def report(self) -> dict[str, Any]:
        """What was measured at its end; for a reward model, its accuracy on held-out records."""
        file = self.path / "report.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    # -- its model ------------------------------------------------------------------------------------------------

    @property
    def model_path(self) -> Path:
        """The folder of its model, which every function takes as `model`; there once the run is finished."""
        return RunFolder(self.path).model_path

    @property
    def best_path(self) -> Path:
        """The folder of the model with the best held-out score, where there were evaluations."""
        return RunFolder(self.path).best_path

    def save(self, folder: str | Path) -> Path:
        """Write the model, or the adapters that were trained, to a new folder.

        A run that was stopped gives the model of its newest checkpoint.
        """
        target = Path(folder).expanduser()
        if target.exists():
            raise ConfigError(f"folder: {target} exists already; name a new folder")
        if self.finished and self.model_path.is_dir():
            return copy_model(self._summary(), target)
        checkpoint_model(self.path, -1, target, self._objects)
        return target

    def generate(
        self,
        prompts: str | Sequence[Any],
        n: int = 1,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[Answer]:
        """`n` answers to each prompt, those to one prompt side by side.

        A prompt is a text or a mapping such as {"messages": [...]}. Length and temperature are by default those that
        the run sampled with. Temperature 0 is greedy. The model stays loaded until `release`.
        """
        if n < 1:
            raise ConfigError(f"n is {n}: it must be at least 1")
        rollout = self.settings.get("rollout", {})
        sampling = Sampling(
            max_new_tokens=rollout.get("max_new_tokens", MAX_NEW_TOKENS) if max_new_tokens is None else max_new_tokens,
            temperature=rollout.get("temperature", 1.0) if temperature is None else temperature,
            top_p=top_p,
        )
        check_sampling(sampling)
        asked = unique_prompts(prompts_of([prompts] if isinstance(prompts, str) else prompts))
        return [
            Answer(
                prompt=str(sampled.prompt.messages[-1]["content"]),
                text=rollout.completion,
                ended=rollout.finish == "stop",
                messages=tuple(dict(message) for message in sampled.prompt.messages),
            )
            for sampled in sample_answers(self._model(), asked, n, sampling, derive_seed(seed, "generate"))
            for rollout in sampled.rollouts
        ]

    def release(self) -> None:
        """Let go of the model that `generate` loaded."""
        self._loaded = None

    def _model(self) -> LoadedModel:
        if self._loaded is not None:
            return self._loaded
        recipe = self._recipe()
        if recipe.method == "reward":
            raise ConfigError(f"{self.path} is a reward model, which scores answers and writes none")
        held = {
            "dtype": "auto" if recipe.model.dtype == "bfloat16" else recipe.model.dtype,
            "device": recipe.model.device,
            "seed": derive_seed(recipe.run.seed, "model"),
        }
        if self.finished and self.model_path.is_dir():
            self._loaded = load_causal_lm(str(self.model_path), **held)
            return self._loaded
        with TemporaryDirectory(prefix="tether-") as folder:
            self._loaded = load_causal_lm(str(self.save(Path(folder) / "model")), **held)
        return self._loaded

    # -- going on with it -----------------------------------------------------------------------------------------

    def resume(
        self,
        *,
        reward: Any = None,
        task: Any = None,
        engine: Any = None,
        algorithm: Any = None,
        trackers: Sequence[Tracker] | None = None,
        hooks: Sequence[StepHook] | None = None,
        on_step: Callable[[Any], object] | None = None,
        progress: bool = True,
    ) -> Run:
        """Go on with a run that was stopped, to its last step: the result has the same bits as without the stop.

        Pass again the objects that the run was started with, except those that this `Run` still holds.
        """
        from tether.api.training import go

        recipe = resumable_recipe(self.path)
        objects = self._with(reward, task, engine, algorithm, trackers, hooks)
        if reward is not None:
            _check_weights(recipe, reward)
        self.release()
        recipe = _with_url(recipe, self._store_url)
        return go(recipe, objects, on_step=on_step, progress=progress, resume=True)

    def fork(
        self,
        *,
        steps: int | None = None,
        step: int | None = None,
        settings: Mapping[str, Any] | None = None,
        name: str | None = None,
        reward: Any = None,
        task: Any = None,
        engine: Any = None,
        algorithm: Any = None,
        trackers: Sequence[Tracker] | None = None,
        hooks: Sequence[StepHook] | None = None,
        on_step: Callable[[Any], object] | None = None,
        progress: bool = True,
    ) -> Run:
        """Go on with more steps or other settings, as a run of its own, from the checkpoint after `step` steps.

        By default that is the newest checkpoint. A `reward` takes the place of the run's own.
        """
        from tether.api.training import go

        given = dict(settings or {})
        given |= {key: value for key, value in (("run.steps", steps), ("run.name", name)) if value is not None}
        objects = self._with(reward, task, engine, algorithm, trackers, hooks)
        if reward is not None:
            given["reward.parts"] = reward_of(reward)[0]
        passed = {name.partition(" ")[0] for name in objects.names()}
        kept = [name for name in self._recipe().run.objects if name.partition(" ")[0] not in passed]
        if kept or passed:
            given["run.objects"] = [*kept, *objects.names()]
        child, forked = forked_recipe(self.path, step, settings=given)
        self.release()
        return go(_with_url(child, self._store_url), objects, on_step=on_step, progress=progress, forked=forked)

    def _with(
        self,
        reward: Any,
        task: Any,
        engine: Any,
        algorithm: Any,
        trackers: Sequence[Tracker] | None,
        hooks: Sequence[StepHook] | None,
    ) -> Objects:
        """The objects that this run holds, with those that are passed in their place."""
        functions = None if reward is None else reward_of(reward)[1]
        changed = {"rewards": functions, "task": task, "engine": engine, "algorithm": algorithm, "trackers": trackers}
        changed["hooks"] = hooks
        return replace(self._objects, **{role: one for role, one in changed.items() if one is not None})

    # -- reading --------------------------------------------------------------------------------------------------

    def _recipe(self) -> Recipe:
        return stored_recipe(self.path)

    def _summary(self) -> RunSummary:
        with self._opened() as opened:
            return find_run(opened, str(self.path))

    @contextmanager
    def _opened(self) -> Iterator[OpenWorkspace]:
        recipe = self._recipe()
        with open_workspace(recipe.run.directory, self._store_url or recipe.store.url) as opened:
            yield opened


def load_run(path: str | Path, directory: str | Path = "runs") -> Run:
    """A run that is on disk, by its folder or by its name in the workspace `directory`."""
    return Run(run_folder(str(path), str(directory)))


def _with_url(recipe: Recipe, url: str | None) -> Recipe:
    if url is None:
        return recipe
    return recipe.model_copy(update={"store": recipe.store.model_copy(update={"url": url})})


def _check_weights(recipe: Recipe, reward: Any) -> None:
    """Raise where a weight is given that is not the run's: resuming changes nothing."""
    begun = {part.label: part.weight for part in recipe.reward.parts} if isinstance(recipe, RLRecipe) else {}
    for part in reward_of(reward)[0]:
        name = part.get("name") or part["kind"]
        if "weight" in part and name in begun and part["weight"] != begun[name]:
            raise ConfigError(
                f"reward: {name} had weight {begun[name]:g} as the run began, and {part['weight']:g} is given: leave "
                "it out, or continue with the new one in a fork"
            )
