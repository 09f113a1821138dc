"""The user's own parts, named in a recipe: loaded before a model, loaded again at resume, planned as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import tether
from tether.algorithms.algorithm import Passes
from tether.algorithms.select import build_algorithm
from tether.cli import main
from tether.config.load import load_recipe
from tether.errors import ConfigError, DataError
from tether.plan.machine import Machine
from tether.plan.plan import make_plan
from tether.plan.workload import Lengths, shape_of, work_of
from tether.protocols import RolloutEngine
from tether.rollout.native import check_rollouts
from tether.train.objects import Objects, with_named_code
from tether.train.run import train_recipe
from tether.types import Prompt

MINE = """
from dataclasses import dataclass, replace
from tether.algorithms.algorithm import AdvantageSettings, Controllers, CriticWarmup
from tether.algorithms.estimators import LeaveOneOut, PolicyGradientWeights
from tether.algorithms.objectives import Clip, PolicyObjective, ValueObjective
from tether.ops.kl import FixedKL
from tether.types import Loss, Metrics
from tether.doctor.findings import Finding
from tether.hub.tiny_model import tiny_model, tiny_tokenizer
from tether.rollout.native import NativeEngine

NUMBER = 7
SEEN = []

def without_reference(ppo):
    return replace(ppo, name="mine", advantage_settings=AdvantageSettings(kl_apply_to="none"))

def from_recipe(recipe, algorithm):
    own = {"needs_critic": False, "critic_warmup": None, "estimator": LeaveOneOut(), "objective": objective}
    return replace(algorithm, name=f"of-{recipe.method}", needs_groups=True, **own)

def objective(coefficients):
    return PolicyObjective(Clip(0.2, 0.2))

def wrong(ppo):
    return "ppo"

def two(first, second):
    return first

def none():
    return None

def broken(anything):
    raise KeyError("lost")

def grouped(ppo):
    return replace(ppo, needs_groups=True)

def class_inside(ppo):
    return replace(ppo, estimator=type(ppo.estimator))

@dataclass(frozen=True)
class Stair:
    coef: float
    height: float
    def after(self, kl, samples):
        return replace(self, coef=self.coef + self.height)

@dataclass(frozen=True)
class Unwritable:
    coef: float
    seen: tuple = (1.0, 2.0)
    def after(self, kl, samples):
        return self

def stair(ppo):
    return replace(ppo, controllers=Controllers(Stair(0.1, 0.05), FixedKL(0.0)))

def unwritable(ppo):
    return replace(ppo, controllers=Controllers(Unwritable(0.1), FixedKL(0.0)))

def half_controller(ppo):
    return replace(ppo, controllers=Controllers(FixedKL(0.1), 3))

def deaf_to_kl(ppo):
    return replace(ppo, objective=objective)

def keeps_coefficients(ppo):
    class Kept:
        def __init__(self, coefficients):
            self.coefficients = coefficients
        def size(self, batch):
            return ppo.objective(self.coefficients).size(batch)
        def __call__(self, outputs, batch):
            return ppo.objective(self.coefficients)(outputs, batch)
    return replace(ppo, objective=lambda coefficients: Kept(coefficients))

class Silent(PolicyObjective):
    def __call__(self, outputs, batch):
        super().__call__(outputs, batch)

class Rowwise(PolicyObjective):
    def __call__(self, outputs, batch):
        return Loss(-outputs.logprobs.sum(dim=1), Metrics())

def silent(ppo):
    return replace(ppo, objective=lambda coefficients: Silent(Clip(0.2, 0.2)))

def rowwise(ppo):
    return replace(ppo, objective=lambda coefficients: Rowwise(Clip(0.2, 0.2)))

def no_objective(ppo):
    return replace(ppo, objective=lambda coefficients: None)

def kl_without_reference(ppo):
    own = lambda coefficients: PolicyObjective(Clip(0.2, 0.2), kl_coef=0.1)
    return replace(ppo, objective=own, advantage_settings=AdvantageSettings(kl_apply_to="none"))

def warmed_without_critic(ppo):
    own = {"needs_critic": False, "estimator": LeaveOneOut(), "needs_groups": True}
    return replace(ppo, **own, critic_warmup=CriticWarmup(1, ValueObjective(), ppo.update))

def baselined(ppo):
    own = {"needs_critic": False, "critic_warmup": None}
    return replace(ppo, **own, estimator=PolicyGradientWeights("baselined", 1.0, 1.0))

def n_step(ppo):
    return replace(ppo, estimator=PolicyGradientWeights("n_step", 1.0, 1.0))

def totl(ppo):
    return replace(ppo, estimator=PolicyGradientWeights("totl", 1.0, 1.0))

class PathTracker(list):
    def __init__(self, path):
        open(path)
    def record(self, step, metrics): ...
    def close(self): ...

class Engine(NativeEngine):
    notices = ("my own engine",)

class NoEngine:
    pass

class Tracker:
    def __init__(self, run):
        self.file = open(run.folder / "tracked.txt", "a")
    def record(self, step, metrics):
        self.file.write(f"{step}\\n")
    def close(self):
        self.file.close()

class Deaf:
    def __init__(self, run): ...

class Fresh(Tracker):
    def __init__(self): ...

def rule(run):
    return Finding("mine", "note", "A note of mine", f"{len(run.metrics)} steps")

def load(path, seed):
    assert path == "anything goes" and seed > 0
    return tiny_model(0), tiny_tokenizer()

def load_half(path):
    return tiny_model(0)

def load_headless(path):
    return tiny_model(0).base_model, tiny_tokenizer()
"""
SMALL = {"rollout.prompts_per_step": 2, "rollout.samples_per_prompt": 2, "rollout.max_new_tokens": 4}
SMALL |= {"ppo.minibatch_size": 4, "ppo.epochs": 1, "run.steps": 3, "checkpoint.every": 1}
NAMED = {
    "algorithm": "mine.py:without_reference",
    "rollout.engine": "mine.py:Engine",
    "store.trackers": ["mine.py:Tracker"],
    "run.doctor_rules": ["mine.py:rule"],
    "run.doctor_every": 1,
    "model.loader": "mine.py:load",
    "model.path": "anything goes",
}


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch) -> Path:
    """The user's file in their folder."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def recipe_of(settings, name):
    return load_recipe("ppo", settings=SMALL | settings | {"run.name": name})


def train(settings, name, steps=None, **more):
    taken: list[str] = []
    told: list[str] = []
    train_recipe(
        recipe_of(settings, name),
        stop=lambda: steps is not None and len(taken) >= steps,
        advance=lambda step, metrics: taken.append(str(step)),
        notify=told.append,
        **more,
    )
    return told


def test_every_part_is_used_and_a_resumed_run_loads_it_again():
    told = train(NAMED, "whole")
    assert "my own engine" in told and any("A note of mine" in text for text in told)
    train(NAMED, "stopped", steps=1)
    assert main(["resume", "runs/stopped"]) == 0
    runs = [tether.load_run(name) for name in ("whole", "stopped")]
    rows = [[row["score"] for row in run.metrics_rows()] for run in runs]
    assert rows[0] == rows[1] and all("kl_ref_k3" not in row for row in runs[0].metrics_rows())
    weights = [(run.model_path / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1] and runs[0].settings["run"]["objects"] == []
    assert Path("runs/stopped/tracked.txt").read_text().split() == ["0", "1", "2"]


def test_changed_code_is_not_resumed_and_a_changed_tracker_is(mine):
    train(NAMED, "stopped", steps=1)
    mine.write_text(MINE.replace("NUMBER = 7", "NUMBER = 8"))
    with pytest.raises(ConfigError, match=r"the code that the recipe names as algorithm mine\.py:without_reference"):
        tether.load_run("stopped").resume(progress=False)
    mine.write_text(MINE)
    other = mine.with_name("tracker.py")
    other.write_text(MINE)
    train({"store.trackers": ["tracker.py:Tracker"], "run.doctor_rules": ["tracker.py:rule"]}, "watched", steps=1)
    other.write_text(MINE.replace("NUMBER = 7", "NUMBER = 8"))
    assert tether.load_run("watched").resume(progress=False).finished


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"algorithm": "mine.py:wrong"}, r"^algorithm: mine\.py:wrong gave a str: pass an Algorithm, or a function"),
        ({"algorithm": "mine.py:NUMBER"}, r"^algorithm: mine\.py:NUMBER is a int: pass an Algorithm"),
        ({"algorithm": "mine.py:Engine"}, r"^algorithm: mine\.py:Engine is a class: pass an Algorithm"),
        ({"algorithm": "mine.py:two"}, r"^algorithm: mine\.py:two takes 2 parameters: write f\(algorithm\)"),
        ({"algorithm": "mine.py:none"}, r"^algorithm: mine\.py:none takes 0 parameters"),
        ({"algorithm": "mine.py:broken"}, r"^algorithm: mine\.py:broken raised KeyError: 'lost' \(mine\.py, line \d+"),
        ({"algorithm": "mine.py:absent"}, r"^algorithm: mine\.py has no 'absent'"),
        ({"algorithm": "mine.py:without_refernce"}, r"has no 'without_refernce': did you mean without_reference\?$"),
        ({"algorithm": "mine.py:unwritable"}, r"controllers\.reference: Unwritable cannot be written to a checkpoint"),
        ({"algorithm": "mine.py:half_controller"}, r"controllers\.old int needs the number coef, and after\(kl, sam"),
        ({"algorithm": "mine.py:class_inside"}, r"^algorithm ppo: estimator is the class GAE: pass an object of it"),
        (
            {"algorithm": "mine.py:grouped", "rollout.samples_per_prompt": 1},
            r"^algorithm ppo compares the samples of a prompt, and rollout\.samples_per_prompt is 1",
        ),
        ({"rollout.engine": "mine.py:NUMBER"}, r"^rollout\.engine: mine\.py:NUMBER is a int: give a function"),
        (
            {"rollout.engine": "mine.py:NoEngine"},
            r"^rollout\.engine: mine\.py:NoEngine has no method generate: inherit",
        ),
        (
            {"store.trackers": ["mine.py:NUMBER"]},
            r"^store\.trackers: mine\.py:NUMBER is a int: name the tracker's class",
        ),
        ({"store.trackers": ["mine.py:Deaf"]}, r"^store\.trackers: mine\.py:Deaf has no method record"),
        ({"store.trackers": ["mine.py:Fresh"]}, r"^store\.trackers: mine\.py:Fresh does not take the run"),
        (
            {"run.doctor_rules": ["mine.py:Engine"]},
            r"^run\.doctor_rules\[0\]: mine\.py:Engine is a class: pass a function",
        ),
        ({"run.doctor_rules": ["mine.py:two"]}, r"^run\.doctor_rules\[0\]: mine\.py:two cannot be called with the run"),
        ({"model.loader": "mine.py:Engine"}, r"^model\.loader: mine\.py:Engine is a class: pass a function"),
        (
            {"model.loader": "mine.py:load", "roles.mode": "lora"},
            r"^model\.loader: mine\.py:load loads the model, and roles",
        ),
    ],
)
def test_a_wrong_part_is_refused_before_a_model_is_loaded(settings, pattern, monkeypatch):
    monkeypatch.setattr("tether.train.build.load_causal_lm", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=pattern):
        train(settings, "refused")
    assert not Path("runs/refused").exists()


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"model.loader": "mine.py:load_half"}, r"^model\.loader: mine\.py:load_half gave a \w+: return \(model, tok"),
        ({"model.loader": "mine.py:load_headless"}, r"mine\.py:load_headless gave a \w+ without a language-model head"),
        ({"model.loader": "mine.py:broken"}, r"^model\.loader: mine\.py:broken raised KeyError"),
        ({"rollout.engine": "mine.py:broken"}, r"^rollout\.engine: mine\.py:broken raised KeyError"),
        ({"rollout.engine": "mine.py:none"}, r"^rollout\.engine: mine\.py:none raised TypeError"),
    ],
)
def test_what_a_part_makes_is_checked(settings, pattern):
    with pytest.raises(ConfigError, match=pattern):
        train(settings, "refused")
    assert not Path("runs/refused").exists()


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("silent", r"^the objective returned a NoneType: it must return Loss\(total, metrics\)"),
        ("rowwise", r"^the objective returned a total of shape \(4,\): it must be a sum"),
        ("no_objective", r"^algorithm ppo: objective returned a NoneType: it must return an object with size"),
        ("kl_without_reference", r"^PolicyObjective: kl_coef is not 0, and the algorithm has no reference policy"),
        ("warmed_without_critic", r"^algorithm ppo: critic_warmup is set, and needs_critic is False"),
        ("baselined", r"^the weighting baselined reads the critic's values, and this algorithm has no critic"),
        ("n_step", r'PolicyGradientWeights\("n_step"\) needs n_steps'),
        ("totl", r"PolicyGradientWeights of 'totl': use total, to_go, baselined, advantage, n_step"),
    ],
)
def test_a_part_that_fails_in_the_first_step_is_told_in_one_sentence(name, pattern):
    with pytest.raises(ConfigError, match=pattern):
        train({"algorithm": f"mine.py:{name}"}, "refused")


def test_an_objective_that_ignores_the_kl_in_the_loss_is_told():
    settings = {"kl.apply_to": "loss", "kl.coef": 0.1, "kl.estimator": "k3"}
    told = train(settings | {"algorithm": "mine.py:deaf_to_kl"}, "deaf", steps=1)
    (notice,) = [text for text in told if "kl.apply_to" in text]
    assert "is measured and not penalized" in notice
    for number, more in enumerate([{}, {"algorithm": "mine.py:keeps_coefficients"}, {"kl.coef": 0.0}]):
        assert not [text for text in train(settings | more, f"hears-{number}", steps=1) if "kl.apply_to" in text]


def test_a_controller_of_the_users_own_is_in_the_checkpoint():
    train({"algorithm": "mine.py:stair"}, "whole")
    train({"algorithm": "mine.py:stair"}, "stopped", steps=1)
    assert main(["resume", "runs/stopped"]) == 0
    for name in ("whole", "stopped"):
        coefs = [row["kl_coef"] for row in tether.load_run(name).metrics_rows()]
        assert coefs == pytest.approx([0.1, 0.15, 0.2])


def test_a_tracker_that_cannot_open_is_told_what_it_was_given():
    told = train({"store.trackers": ["mine.py:PathTracker"]}, "tracked", steps=1)
    (notice,) = [text for text in told if "could not be opened" in text]
    assert "TrackedRun" in notice
    assert notice.endswith("it is given the run, which has run.name, run.folder (a path) and run.config")


def test_python_takes_trackers_by_name():
    few = {key: value for key, value in SMALL.items() if key != "run.steps"}
    words = {"steps": 1, "name": "by-name", "settings": few, "progress": False}
    run = tether.ppo("tiny-bytes", ["one", "two"], len_reward, trackers=["mine.py:Tracker"], **words)
    assert Path("runs/by-name/tracked.txt").read_text().split() == ["0"]
    assert list(run.settings["store"]["trackers"]) == ["mine.py:Tracker"]
    with pytest.raises(ConfigError, match=r"^trackers\[0\]: wandb is a name: pass an object here, or set store\.track"):
        run.fork(steps=2, trackers=["wandb"])


def len_reward(prompt, completion):
    del prompt
    return float(len(completion))


def test_warnings_before_the_rewind_of_a_resume_stay_in_the_store():
    train({"checkpoint.keep": 3}, "stopped", steps=2)
    newest = max(Path("runs/stopped/checkpoints").iterdir())
    weights = max(newest.rglob("*.safetensors"), key=lambda file: file.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main(["resume", "runs/stopped"]) == 0
    events = tether.load_run("stopped").events
    assert [event.step for event in events if event.kind == "warning" and newest.name in event.text] == [1]


def test_an_object_and_a_name_for_one_part_are_refused():
    objects = Objects(algorithm=lambda ppo: ppo)
    with pytest.raises(ConfigError, match=r"^algorithm is passed as an object, and algorithm names mine\.py"):
        with_named_code(recipe_of({"algorithm": "mine.py:without_reference"}, "x"), objects)


def test_an_argument_of_the_python_api_takes_a_name():
    run = tether.ppo(
        *("tiny-bytes", ["red:", "blue:"], lambda completion: 1.0),
        algorithm="mine.py:from_recipe",
        settings={**SMALL, "run.steps": 1},
        steps=None,
        progress=False,
    )
    assert run.settings["algorithm"] == "mine.py:from_recipe" and "value_loss" not in run.metrics_rows()[0]
    assert run.settings["run"]["objects"] == ["reward lambda"]


def test_a_checkpoint_is_exported_without_running_the_algorithm_and_is_not_replayed(mine, capsys):
    train({"algorithm": "mine.py:from_recipe"}, "stopped", steps=2)
    mine.write_text("raise RuntimeError('it ran')\n")
    assert main(["export", "runs/stopped", "--checkpoint", "-1", "--model", "out"]) == 0
    assert main(["replay", "stopped"]) == 2
    assert "trained with an algorithm of its own (mine.py:from_recipe)" in capsys.readouterr().err


def test_a_plan_asks_the_algorithm():
    recipe, lengths = recipe_of({"model.dtype": "float32"}, "x"), Lengths.assumed(8, "as given")
    machine = Machine("cpu", "a machine", 2**34, 1.0, 1.0, "not measured")
    shipped = make_plan(recipe, shape_of("tiny-bytes"), lengths, machine)
    own = with_named_code(recipe_of({"algorithm": "mine.py:from_recipe"}, "x"), Objects()).algorithm_for(recipe)
    plan = make_plan(recipe, shape_of("tiny-bytes"), lengths, machine, own)
    assert "critic" in [role.role for role in shipped.memory.roles]
    assert "critic" not in [role.role for role in plan.memory.roles] and plan.memory.peak < shipped.memory.peak
    algorithm = replace(build_algorithm(recipe), minibatch_size=1, update=_Twice())
    assert (work_of(recipe, lengths, algorithm).steps, work_of(recipe, lengths, algorithm).epochs) == (8 + 4, 2)
    without = with_named_code(recipe_of({"algorithm": "mine.py:without_reference"}, "x"), Objects()).algorithm_for(
        recipe
    )
    assert not work_of(recipe, lengths, without).reference


class _Twice:
    """An update rule that states its passes."""

    passes = Passes(epochs=2, critic_epochs=1)

    def __call__(self, *_):
        """It is never called."""


def test_tether_plan_runs_no_named_code_and_says_so(mine, capsys):
    mine.write_text("raise RuntimeError('it ran')\n")
    assert main(["plan", "ppo", "--algorithm", "mine.py:anything", "--json"]) == 0
    assert (
        "(as ppo: a plan does not run mine.py:anything)" in json.loads(capsys.readouterr().out)["optimizer_steps_why"]
    )


def test_an_engine_without_generate_and_answers_that_are_no_rollouts_are_refused():
    class Nothing(RolloutEngine):
        pass

    with pytest.raises(ConfigError, match="engine: Nothing has no method generate of its own: write it"):
        Objects(engine=Nothing)
    with pytest.raises(DataError, match=r"engine: rollout 0 of Nothing is a str: return tether\.types\.Rollout"):
        check_rollouts(Nothing(), ["a text"], [Prompt("p", [])], 1)  # pyright: ignore[reportArgumentType]
