"""reasoning-gym as a task: seeds that never meet, scorers that cannot hurt. With a stand-in, and with the package."""

import ast
import dataclasses
import inspect
import random
import sys
import textwrap
import types

import pytest
from rollout_factory import rollout_of

from tether.config.sections import TaskSettings
from tether.errors import ConfigError
from tether.rewards.scoring import part_metrics
from tether.rewards.tasks import HELD_OUT_SEEDS, REFUSED, ReasoningTask, build_task

try:
    import reasoning_gym
except ImportError:
    reasoning_gym = None
installed = pytest.mark.skipif(reasoning_gym is None, reason="the extra `reasoning` is not installed")


@dataclasses.dataclass
class StandInConfig:
    largest: int = 9
    seed: int | None = None
    size: int = 5

    def validate(self) -> None:
        assert self.largest > 0, "largest must be positive"


class StandInData:
    """Items are a function of seed + index alone, as in the package; the scorer has the package's two bad habits."""

    def __init__(self, config: StandInConfig) -> None:
        self.config, self.seed = config, config.seed

    def __getitem__(self, index: int) -> dict:
        value = random.Random(self.seed + index).randint(0, self.config.largest)
        return {"question": f"say {value}", "answer": str(value), "metadata": {"made_from": self.seed + index}}

    def score_answer(self, answer: str, entry: dict) -> float:
        if answer == "666":
            raise ZeroDivisionError
        if answer == "777":
            return float("nan")
        return 1.0 if answer == entry["answer"] else 0.3


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = types.ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"say": (StandInData, StandInConfig), "countdown": (StandInData, StandInConfig)}

    def create_dataset(name, **options):
        config = StandInConfig(**options)
        config.validate()
        return StandInData(config)

    factory.create_dataset = create_dataset
    package = types.ModuleType("reasoning_gym")
    package.factory = factory
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


def seeds(task: ReasoningTask, prompts) -> set[int]:
    return {task.entries[prompt.id][1]["metadata"]["made_from"] for prompt in prompts}


@pytest.mark.parametrize("seed", [0, 1, 2**30 - 1])
def test_train_and_held_out_seeds_never_meet(gym, seed: int):
    task = ReasoningTask("say", {"size": 300, "held_out": 200, "seed": seed})
    training, held_out = seeds(task, task.prompts()), seeds(task, task.held_out())
    assert len(training) == 300 and len(held_out) == 200
    assert max(training) < HELD_OUT_SEEDS <= min(held_out) and max(held_out) < 2**32


def test_the_same_options_make_the_same_prompts(gym):
    first, second = (ReasoningTask("say", {"largest": 99}) for _ in range(2))
    assert first.prompts() == second.prompts() and first.held_out() == second.held_out()
    assert len(first.prompts()) == 4096 and len(first.held_out()) == 256


def test_unseen_questions(gym):
    task = ReasoningTask("say", {"largest": 200, "size": 500, "held_out": 20, "unseen_questions": True})
    asked = {prompt.messages[0]["content"] for prompt in task.held_out()}
    assert asked and asked.isdisjoint(prompt.messages[0]["content"] for prompt in task.prompts())


def test_scores_are_contained_and_thresholded(gym):
    task = ReasoningTask("say", {"instruction": "Only the number."})
    prompt = task.prompts()[0]
    assert prompt.messages[0]["content"].endswith("\nOnly the number.")

    def score(completion: str):
        rollout = dataclasses.replace(rollout_of(completion), prompt=prompt)
        return task.reward()([rollout])[0]

    assert score(f"It is {prompt.answer}.").value == 1.0
    assert score("It is 1234").value == 0.0 and score("It is 1234").parts["scorer"] == 0.3, "no credit for wrong prose"
    assert score("no number").value == 0.0
    assert score("666").value == 0.0 and score("666").valid and score("666").parts["scorer_error"] == 1.0
    assert score("777").value == 0.0 and score("777").valid and score("777").parts["scorer_error"] == 1.0
    assert part_metrics([score("666"), score("1")])["reward/scorer_error"] == 0.5
    assert not task.reward()([rollout_of("1", id="another's")])[0].valid


def test_partial_credit_is_a_choice(gym):
    task = ReasoningTask("say", {"partial": True})
    rollout = dataclasses.replace(rollout_of("1234"), prompt=task.prompts()[0])
    assert task.reward()([rollout])[0].value == 0.3


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sey", {}, "no data set 'sey': did you mean say"),
        ("countdown", {}, "runs the model's answer as Python code"),
        ("say", {"larges": 1}, "say has no 'larges': did you mean largest"),
        ("say", {"largest": 0}, "say rejects them: largest must be positive"),
        ("say", {"size": 0}, "task.options.size"),
        ("say", {"size": True}, "task.options.size"),
        ("say", {"extract": "first"}, "task.options.extract"),
    ],
)
def test_what_is_wrong_is_told(gym, name: str, options: dict, said: str):
    with pytest.raises(ConfigError, match=said):
        build_task(TaskSettings(name=f"reasoning-gym:{name}", options=options))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'tether-rl\[reasoning\]'"):
        ReasoningTask("chain_sum", {})


# -- the package itself

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@installed
def test_one_digit_arithmetic():
    task = build_task(TaskSettings(name="reasoning-gym:chain_sum", options={**ONE_DIGIT, "size": 64, "held_out": 32}))
    for prompt in [*task.prompts(), *task.held_out()]:
        words = prompt.messages[0]["content"].split()
        left, operator, right = int(words[-4]), words[-3], int(words[-2])
        assert 0 <= left <= 9 and 0 <= right <= 9
        assert prompt.answer == str(left + right if operator == "+" else left - right)
        right_answer = dataclasses.replace(rollout_of(f"{left} {operator} {right} = {prompt.answer}"), prompt=prompt)
        rambling = dataclasses.replace(rollout_of(f"{prompt.answer} or maybe 77"), prompt=prompt)
        assert [score.value for score in task.reward()([right_answer, rambling])] == [1.0, 0.0]


@installed
def test_neighbouring_seeds_of_the_package_share_items():
    """Why held-out data is not just another seed."""
    zero, one = (reasoning_gym.create_dataset("chain_sum", seed=seed, size=9) for seed in (0, 1))
    assert zero[1]["question"] == one[0]["question"]


@installed
def test_answers_that_the_package_gets_wrong_are_refused():
    options = {"allow_parentheses": False, "max_terms": 3}
    with pytest.raises(ConfigError, match="wrong answers"):
        ReasoningTask("basic_arithmetic", options)
    task = ReasoningTask("basic_arithmetic", {**options, "operators": ["+", "-"], "size": 50, "held_out": 5})
    for prompt in task.prompts():
        total, sign = 0, 1
        for word in prompt.messages[0]["content"].removeprefix("Calculate ").rstrip(".").split():
            if word in "+-":
                sign = 1 if word == "+" else -1
            else:
                total += sign * int(word)
        assert prompt.answer == str(total)


@installed
def test_every_scorer_that_evaluates_the_answer_is_refused():
    from reasoning_gym.factory import DATASETS

    for name, (data, _) in DATASETS.items():
        method = data.score_answer
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = {getattr(node.func, "id", getattr(node.func, "attr", None)): node for node in called}
        runs = {"eval", "exec", "parse_expr", "sympify"} & set(names)
        on_the_answer = any(getattr(node.args[0], "id", None) == "answer" for run, node in names.items() if run in runs)
        assert not on_the_answer or name in REFUSED, f"{name} evaluates what the model wrote"
    assert set(REFUSED) <= set(DATASETS)


@installed
@pytest.mark.parametrize("name", ["chain_sum", "letter_counting", "propositional_logic", "family_relationships"])
def test_odd_text_is_a_wrong_answer_and_no_accident(name: str):
    task = ReasoningTask(name, {"size": 3, "held_out": 1})
    odd = ["", " ", "\x00", "(" * 500, "9" * 5000, "answer: ∞", "\\boxed{}", "None", "-", "1/0"]
    for prompt in task.prompts():
        scores = task.reward()([dataclasses.replace(rollout_of(text), prompt=prompt) for text in odd])
        assert all(score.valid and score.value in (0.0, 1.0) for score in scores)
