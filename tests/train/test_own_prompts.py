"""A user's own prompts are a task of their own: their held-out prompts, their reward, no toy underneath."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.cli import main
from tether.config.load import load_recipe
from tether.data.prompts import hold_out
from tether.errors import ConfigError, DataError
from tether.train.build import build_rl, load_policy
from tether.types import Prompt

QUICK = (
    *("--rollout.prompts_per_step", "4", "--rollout.max_new_tokens", "3", "--ppo.minibatch_size", "4"),
    *("--run.steps", "2", "--model.device", "cpu", "--ppo.epochs", "1"),
)
BY_LENGTH = ("--reward.parts", "[{kind: length, unit: characters, target: 3}]")


def written(path: Path, prompts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": text, "answer": "11"}) + "\n" for text in prompts))
    return str(path)


def texts(prompts) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in prompts]


@pytest.mark.parametrize("words", [["train", "ppo"], ["plan", "ppo"], ["train", "grpo"]])
def test_without_a_reward_it_is_said_before_a_model_is_loaded(tmp_path, capsys, monkeypatch, words):
    monkeypatch.setattr("tether.train.run.load_policy", lambda recipe: pytest.fail("a model was loaded"))
    assert main([*words, "--task.prompts", written(tmp_path / "p.jsonl", ["a"])]) == 2
    said = capsys.readouterr().err
    assert "task.prompts has no reward: set reward.parts, such as" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--task.name", "match-case"], "but a recipe takes one of them"),
        (["--reward.parts", "[{kind: task}]"], "part of kind task, and task.prompts has no reward"),
        (["--evaluation.every", "2"], "there are no held-out prompts: set task.held_out"),
        (["--task.held_out", "h.jsonl", "--task.held_out_fraction", "0.5"], "are both set"),
        (["--task.options", "{length: 3}"], "remove task.options"),
    ],
)
def test_what_does_not_go_together_is_refused(flags, said):
    with pytest.raises(ConfigError, match=said):
        load_recipe("ppo", None, ["--task.prompts", "p.jsonl", *BY_LENGTH, *flags])


def test_held_out_goes_with_prompts():
    with pytest.raises(ConfigError, match=r"go with task\.prompts"):
        load_recipe("ppo", None, ["--task.held_out", "p.jsonl"])


def test_a_wrong_file_is_said_before_a_model_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tether.train.run.load_policy", lambda recipe: pytest.fail("a model was loaded"))
    assert main(["train", "ppo", "--task.prompts", str(tmp_path / "none.jsonl"), *BY_LENGTH]) == 5
    assert "there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["file", "fraction"])
def test_held_out_prompts_are_the_users_own(tmp_path, how):
    train = [f"say {number}" for number in range(10)]
    flags = ["--task.prompts", written(tmp_path / "p.jsonl", train), *BY_LENGTH, "--evaluation.every", "1"]
    held_out = ["h 1", "h 2"]
    if how == "file":
        flags += ["--task.held_out", written(tmp_path / "h.jsonl", held_out)]
    else:
        flags += ["--task.held_out_fraction", "0.2"]
    recipe = load_recipe("ppo", None, [*QUICK, *flags])
    parts = build_rl(recipe, load_policy(recipe))
    asked, out = texts(parts.prompts.items), texts(parts.held_out)
    assert (
        (asked, out) == (train, held_out) if how == "file" else len(out) == 2 and sorted(asked + out) == sorted(train)
    )


def test_best_and_the_held_out_score_are_about_them(tmp_path, capsys, monkeypatch):
    """Only held-out prompts are worth anything by this reward, so a score above 0 is theirs."""
    (tmp_path / "own_reward.py").write_text(
        "def score(prompt, completion, answer):\n    return prompt.startswith('held')\n"
    )
    flags = ["--task.prompts", written(tmp_path / "p.jsonl", ["train a", "train b"])]
    flags += ["--task.held_out", written(tmp_path / "h.jsonl", ["held 1", "held 2"]), "--evaluation.every", "1"]
    flags += ["--reward.parts", "[{kind: function, function: own_reward:score, takes: text}]"]
    monkeypatch.chdir(tmp_path)  # a recipe names code of the folder that the user runs from
    place = ["--run.directory", str(tmp_path / "runs"), "--run.name", "own"]
    assert main(["train", "ppo", *QUICK, *flags, *place, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["held_out/score"] for row in rows] == [1.0, 1.0] and [row["score"] for row in rows] == [0.0, 0.0]
    assert main(["eval", str(tmp_path / "runs" / "own"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompts"] == 2 and found["models"][0]["metrics"]["score"]["value"] == 1.0


def test_eval_of_a_run_that_held_nothing_out_asks_for_prompts(tmp_path, capsys):
    place = ["--run.directory", str(tmp_path / "runs"), "--run.name", "own"]
    file = written(tmp_path / "p.jsonl", ["a", "b"])
    assert main(["train", "ppo", *QUICK, "--task.prompts", file, *BY_LENGTH, *place, "--json"]) == 0
    assert main(["eval", str(tmp_path / "runs" / "own")]) == 2
    assert "held nothing out: name other prompts with --prompts FILE" in capsys.readouterr().err


def test_one_long_prompt_does_not_end_a_run(tmp_path, capsys):
    """tiny-bytes reads 256 tokens: the one prompt of 300 is dropped before the first step, and counted."""
    file = written(tmp_path / "p.jsonl", [*(f"say {number}" for number in range(7)), "long " * 60])
    place = ["--run.directory", str(tmp_path / "runs"), "--run.name", "own"]
    assert main(["train", "ppo", *QUICK, "--task.prompts", file, *BY_LENGTH, *place, "--json"]) == 0
    assert "training prompts: 1 of 8 prompts dropped, to fit 253 tokens" in capsys.readouterr().err
    cut = ["--data.truncate", "true", "--data.max_prompt_length", "12"]
    file = written(tmp_path / "q.jsonl", ["say 1", "first\nmiddle part\nlast"])
    recipe = load_recipe("ppo", None, [*QUICK, "--task.prompts", file, *BY_LENGTH, *cut])
    assert texts(build_rl(recipe, load_policy(recipe)).prompts.items) == ["say 1", "first\nlast"]
    with pytest.raises(DataError, match=r"has 22 tokens, above data.max_prompt_length = 12: shorten it"):
        strict = ["--data.max_prompt_length", "12", "--data.overlong", "error"]
        recipe = load_recipe("ppo", None, [*QUICK, "--task.prompts", file, *BY_LENGTH, *strict])
        build_rl(recipe, load_policy(recipe))
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        recipe = load_recipe("ppo", None, ["--rollout.max_new_tokens", "256", "--task.prompts", file, *BY_LENGTH])
        build_rl(recipe, load_policy(recipe))


@given(st.lists(st.sampled_from("abcdefgh"), min_size=4, max_size=40), st.floats(0.01, 0.9), st.integers(0, 5))
def test_no_prompt_is_on_both_sides_of_a_split(words, fraction, seed):
    prompts = [Prompt.from_text(str(place), word) for place, word in enumerate(words)]
    different = len(set(words))
    if max(1, round(fraction * different)) >= different:
        with pytest.raises(DataError, match="leaves none to train on"):
            hold_out(prompts, fraction, seed)
        return
    train, out = hold_out(prompts, fraction, seed)
    assert not set(texts(train)) & set(texts(out)) and out and train
    assert sorted(texts(train) + texts(out)) == sorted(words)
    again = hold_out(prompts[::-1], fraction, seed)
    assert set(texts(again[1])) == set(texts(out))  # whatever the order in the file


def test_held_out_prompts_that_are_trained_on_are_told(tmp_path, capsys):
    file, other = written(tmp_path / "p.jsonl", ["a", "b"]), written(tmp_path / "h.jsonl", ["b", "c"])
    flags = ["--task.prompts", file, "--task.held_out", other, *BY_LENGTH, "--evaluation.every", "1"]
    place = ["--run.directory", str(tmp_path / "runs"), "--run.name", "own"]
    assert main(["train", "ppo", *QUICK, *flags, *place, "--json"]) == 0
    assert "1 of the 2 held-out prompts are training prompts too" in capsys.readouterr().err


def test_resume_compares_the_held_out_prompts_too(tmp_path):
    from tether.store.database.open import workspace_at
    from tether.store.lineage import sources_of

    file, out = written(tmp_path / "p.jsonl", ["a", "b"]), written(tmp_path / "h.jsonl", ["c"])
    config = {"task": {"prompts": [file, file], "held_out": out}, "data": {"split": "train"}}
    workspace = workspace_at(str(tmp_path / "runs"), None)
    before = {source.role: source.sha256 for source in sources_of(config, workspace)}
    assert set(before) == {"prompts", "held_out"} and all(before.values())
    written(tmp_path / "h.jsonl", ["d"])
    after = {source.role: source.sha256 for source in sources_of(config, workspace)}
    assert before["prompts"] == after["prompts"] and before["held_out"] != after["held_out"]


def test_votes_and_chat_take_over_how_a_run_reads_its_prompts(tmp_path, monkeypatch):
    from tether.commands.chat import Conversation, converse
    from tether.studio.vote_training import ppo_recipe

    data = {"columns": {"prompt": "question"}, "system_prompt": "be brief", "chat_template_kwargs": {"thinking": False}}
    config = {"method": "ppo", "task": {"prompts": "p.jsonl"}, "data": data}
    assert ppo_recipe(config, "m", {}, "reward", "judged.jsonl")["data"] == data
    judged = ppo_recipe({"method": "sft", "data": {"train": "d.jsonl"}}, "m", {}, "reward", "judged.jsonl")
    assert judged["task"] == {"prompts": "judged.jsonl"} and "data" not in judged

    monkeypatch.setattr("tether.store.find.run_config", lambda name: config)
    seen: list[Prompt] = []
    fitted = Conversation.fitted

    def watch(self, question):
        found = fitted(self, question)
        seen.append(found[0])
        return found

    monkeypatch.setattr(Conversation, "fitted", watch)
    options = {"model": "tiny-bytes", "compare": None, "once": "hi", "json": True, "system": None, "seed": 0}
    options |= {"max_new_tokens": 2, "temperature": 1.0, "dtype": "float32", "device": "cpu", "max_num_seqs": None}
    assert converse(argparse.Namespace(**options)) == 0
    assert [turn["role"] for turn in seen[0].messages] == ["system", "user"]
    assert seen[0].template_kwargs == {"thinking": False}
