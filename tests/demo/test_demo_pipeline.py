"""The demo's raters by hand, and the whole pipeline on the tiny model."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest
import torch

from tether.config.load import load_settings
from tether.config.recipes import DemoRecipe, RaterSettings
from tether.demo.pipeline import Places, ppo_stage, reward_stage, run_demo, sft_stage
from tether.demo.rule import DemoTask, PersonRater, StandInRater
from tether.errors import ConfigError
from tether.store.read import open_workspace, read_run
from tether.types import Prompt, Rollout

RECIPE = "recipes/demo.yaml"


def answer(text: str, finish: str = "stop", sample: int = 0, prompt: str = "p") -> Rollout:
    meta = {"keywords": ["garlic", "peel"], "expected": ["crush", "skin", "knife", "clove"]}
    asked = Prompt(prompt, ({"role": "user", "content": "How do I peel garlic?"},), meta=meta)
    empty = torch.zeros(2)
    return Rollout(asked, 0, sample, empty.long(), empty.bool(), empty, empty, text, finish)


def test_the_stand_in_prefers_by_the_stated_odds():
    settings = RaterSettings(noise=0.1)
    better, worse = (
        answer("Crush it, and the skin comes off. Enjoy!"),
        answer("Crush it, and the skin comes right off.", sample=1),
    )
    wins = 0
    for index in range(2000):
        pair = [
            Rollout(**(vars(one) | {"prompt": Prompt(str(index), one.prompt.messages, meta=one.prompt.meta)}))
            for one in (better, worse)
        ]
        ranks = StandInRater(settings, seed=0)(pair)
        assert ranks in ([0, 1], [1, 0])
        wins += ranks == [0, 1]
    # The rule's difference is 0.2: sigmoid(2) = 0.8808; three standard errors of 2000 choices are 0.0217.
    assert wins / 2000 == pytest.approx(0.8808, abs=0.0217)


def test_the_stand_in_repeats_itself_and_lets_equals_tie():
    rater = StandInRater(RaterSettings(), seed=3)
    same = [answer("Crush it, and the skin comes right off.", sample=index) for index in range(3)]
    assert rater(same) is None
    mixed = [same[0], answer("Crush it, and the skin comes off. Enjoy!", sample=1), same[2]]
    assert rater(mixed) == rater(mixed)
    assert rater(mixed)[0] == rater(mixed)[2] or rater(mixed)[1] not in (0, 2)


def test_a_person_chooses_skips_and_leaves(capsys):
    from rich.console import Console

    words = iter(["what?", "2", "s", "q"])
    stand_in = lambda answers: [9] * len(answers)  # noqa: E731
    rater = PersonRater(Console(), stand_in, ask=lambda _: next(words))
    pair = [answer("[bold]one"), answer("two", "length", 1)]
    assert rater(pair) == [1, 0]
    assert rater(pair) is None
    assert rater(pair) == [9, 9]
    assert rater(pair) == [9, 9]  # and is not asked again
    assert "[bold]one" in capsys.readouterr().out


def test_prompts_of_the_stages_are_apart():
    task = DemoTask()
    assert not {prompt.id for prompt in task.prompts()} & {prompt.id for prompt in task.held_out()}


SMALL = [
    *("--sft.model.path", "tiny-bytes", "--sft.roles.mode", "separate", "--sft.run.steps", "2"),
    *("--reward.roles.mode", "separate", "--reward.run.steps", "2", "--ppo.roles.mode", "separate"),
    *("--rater.prompts", "40", "--rater.answers", "3", "--rater.max_new_tokens", "24", "--judging.prompts", "12"),
    *("--judging.max_new_tokens", "8", "--ppo.run.steps", "2", "--ppo.rollout.max_new_tokens", "8"),
    *("--ppo.rollout.prompts_per_step", "8", "--rater.tie", "0", "--sft.data.train", "x"),
]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The demo on the tiny model, whose context is too small for the demonstrations: they are cut short."""
    import tether.demo.pipeline as stages

    short = tmp_path / "demonstrations.jsonl"
    short.write_text("".join(json.dumps({"prompt": "a?", "completion": "Sure! It is a."}) + "\n" for _ in range(8)))
    monkeypatch.setattr(stages, "data_file", lambda name: short)
    return load_settings(DemoRecipe, RECIPE, [*SMALL, "--directory", str(tmp_path)])


def test_the_whole_demo_on_the_tiny_model(small, tmp_path, capsys):
    assert run_demo(small, human=False, json_output=True) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary == json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert {"reward_model_accuracy", "win_rate", "win_rate_interval", "kl", "seconds", "seed"} <= summary.keys()
    assert {"sft", "preferences", "reward", "ppo", "judging"} <= summary["seconds"].keys()
    low, high = summary["win_rate_interval"]
    assert 0 <= low <= summary["win_rate"] <= high <= 1
    page = (tmp_path / "demo" / "report.html").read_text()
    HTMLParser().feed(page)
    assert "tether chat" in page
    with open_workspace(tmp_path) as opened:
        steps = read_run(opened, "demo/ppo").metrics
    assert all("reward/true" in step and "reward/proxy" in step for step in steps)
    proxy_and_length = steps[0]["reward/proxy"] + steps[0]["reward/length"]
    assert steps[0]["score"] == pytest.approx(proxy_and_length, abs=1e-4)  # the true rule has no weight

    assert run_demo(small, human=False, json_output=True) == 0  # an earlier demo's folder is replaced


def test_more_prompts_than_are_held_out_are_refused_before_anything_is_trained(small, tmp_path):
    greedy = small.model_copy(update={"judging": small.judging.model_copy(update={"prompts": 9999})})
    with pytest.raises(ConfigError, match=r"judging.prompts is 9999, but only 102 prompts are held out"):
        run_demo(greedy, human=False, json_output=True)
    assert not (tmp_path / "demo").exists()


def test_a_folder_that_is_no_demo_is_left_alone(small, tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not an earlier demo"):
        run_demo(small, human=False, json_output=True)
    assert (tmp_path / "demo" / "thesis.txt").exists()


def test_the_demo_is_held_in_float32_on_every_device(tmp_path):
    recipe = load_settings(DemoRecipe, RECIPE)
    stages = [stage(recipe, Places(tmp_path)) for stage in (sft_stage, reward_stage, ppo_stage)]
    assert [stage.model.dtype for stage in stages] == ["float32"] * 3
    assert stages[-1].reward.parts[0].dtype == "float32"
    aloud = load_settings(DemoRecipe, RECIPE, ["--ppo.model.dtype", "bfloat16"])
    assert ppo_stage(aloud, Places(tmp_path)).model.dtype == "bfloat16"
