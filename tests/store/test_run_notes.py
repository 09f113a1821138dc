"""Notes, tags and groups of runs: from the recipe, changed later, kept on resume; and settings side by side."""

import json
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from recording import Recording
from sqlalchemy import create_engine, text

from tether.cli import main
from tether.config.load import load_recipe
from tether.errors import ConfigError
from tether.store.database.open import MIGRATIONS, open_engine, workspace_at
from tether.store.read import MISSING, change_notes, clean_tags, config_diff, find_run, open_workspace


def recorded(root: Path, url: str | None, name: str, **said) -> None:
    config = {"method": "ppo", "model": {"path": "tiny-bytes"}, "run": {"seed": 7, **said}}
    recording = Recording(root, url, name=name, steps=1, config=config)
    recording.recorder.record(0, {"score": 0.5})
    recording.recorder.close("done")


def test_a_recipe_says_them_and_people_change_them(tmp_path, store_url):
    recorded(tmp_path, store_url, "one", note="first try", tags=["small", "kl"], group="sweep")
    with open_workspace(tmp_path / "runs", store_url) as opened:
        run = find_run(opened, "one")
        assert (run.note, list(run.tags), run.group) == ("first try", ["small", "kl"], "sweep")
        change_notes(opened, run, {"tags": ["kl ", "kl", "", "keep"]})
        changed = find_run(opened, "one")
        assert (changed.note, list(changed.tags), changed.group) == ("first try", ["kl", "keep"], "sweep")
        change_notes(opened, changed, {"note": " half \ud800 and \x00 \u202e", "group": ""})
        assert find_run(opened, "one").note == "half \ud800 and \x00 \u202e" and find_run(opened, "one").group == ""


def test_a_run_that_goes_on_keeps_what_was_said_of_it(tmp_path, store_url):
    recorded(tmp_path, store_url, "one", tags=["first"])
    with open_workspace(tmp_path / "runs", store_url) as opened:
        change_notes(opened, find_run(opened, "one"), {"note": "mine", "tags": ["second"]})
        Recording(tmp_path, store_url, name="one", steps=2, resumes=True).recorder.close("done")
        run = find_run(opened, "one")
        assert (run.note, list(run.tags)) == ("mine", ["second"])


def test_a_store_from_before_is_brought_up_to_date(tmp_path, store_url):
    """Runs that were recorded without notes have empty ones."""
    workspace = workspace_at(tmp_path / "runs", store_url)
    workspace.directory.mkdir()
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    engine = create_engine(workspace.url)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0003")
        values = f"'{workspace.key}', 'old', 'u', 'ppo', 'done', 0, 0, 1, 1, '{{}}', '{{}}'"
        columns = "workspace, name, uid, method, state, created, updated, steps_target, steps_done, config, environment"
        connection.execute(text(f"INSERT INTO runs ({columns}) VALUES ({values})"))
    engine.dispose()
    open_engine(workspace).dispose()
    with open_workspace(workspace.directory, store_url) as opened:
        run = find_run(opened, "old")
        assert (run.note, list(run.tags), run.group) == ("", [], "")


@pytest.mark.parametrize("tags", [["two words"], ["#hash"], ["x" * 41], [f"t{n}" for n in range(21)]])
def test_tags_that_are_none_are_refused(tags):
    with pytest.raises(ConfigError, match="tags: "):
        clean_tags(tags)
    with pytest.raises(ConfigError, match=r"run\.tags"):
        load_recipe("ppo", None, ["--run.tags", json.dumps(tags)])


def test_settings_side_by_side():
    one = {"method": "ppo", "kl": {"coef": 0.1}, "run": {"name": "a", "seed": 1}, "reward": {"parts": [1]}}
    two = {"method": "ppo", "kl": {"coef": 0.2}, "run": {"name": "b", "seed": 1}, "reward": {"parts": [1]}}
    three = {"method": "sft", "run": {"name": "c", "seed": 1}}
    assert config_diff([one, two]) == {"kl.coef": [0.1, 0.2]}
    assert config_diff([one, one]) == {}
    assert config_diff([one, two, three]) == {
        "kl.coef": [0.1, 0.2, MISSING],
        "method": ["ppo", "ppo", "sft"],
        "reward.parts": [[1], [1], MISSING],
    }


def test_runs_by_tag_and_group_and_two_runs_side_by_side(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TETHER_STORE", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path, None, "one", tags=["kl", "small"], group="sweep", note="keeps its reference close")
    recorded(tmp_path, None, "two", tags=["kl"], seed=8)

    def told(*words: str) -> str:
        assert main(list(words)) == 0
        return capsys.readouterr().out

    assert "sweep  #kl  #small" in told("runs")
    assert [run["name"] for run in json.loads(told("runs", "--tag", "kl", "--json"))] == ["two", "one"]
    assert [run["name"] for run in json.loads(told("runs", "--tag", "kl", "--tag", "small", "--json"))] == ["one"]
    assert [run["tags"] for run in json.loads(told("runs", "--group", "sweep", "--json"))] == [["kl", "small"]]
    assert "None of the 2 runs" in told("runs", "--tag", "nothing")
    assert "keeps its reference close" in told("show", "one")
    header, seed, score = told("show", "one", "--diff", "two").splitlines()
    assert header.split() == ["setting", "one", "two"] and seed.split() == ["run.seed", "7", "8"]
    assert score.split() == ["last", "score", "0.5", "0.5"]
    compared = json.loads(told("show", "one", "--diff", "two", "--json"))
    assert compared["differing"] == {"run.seed": [7, 8]} and len(compared["runs"]) == 2
    assert main(["show", "one", "--diff", "two", "--step", "0"]) == 2
