"""What a request or a row of the database names never becomes another flag, nor a folder outside the workspace."""

import json
from pathlib import Path

import pytest
from sqlalchemy import insert, update
from studio_clients import Clients, pairs

from tether.config.load import as_flags, load_recipe
from tether.errors import ConfigError
from tether.store.database.open import is_inside, workspace_at
from tether.store.database.schema import runs
from tether.store.read import list_runs

OUTSIDE = ["../x", "..", "/etc", "a/../../x", "", ".", "a//b", "./a", "a/..", "a\0b", "..\\x"]


@pytest.fixture
def started(plain: Clients, monkeypatch) -> list[list[str]]:
    """The words of what would be started; nothing is."""
    words: list[list[str]] = []

    class Process:
        pid = 0

        def __init__(self, given, **_):
            words.append(list(given))

        def poll(self):
            return 0

    monkeypatch.setattr("tether.studio.launcher.subprocess.Popen", Process)
    return words


@pytest.mark.parametrize(
    "settings",
    [
        {"run.save": "--run.directory=/x"},
        {"run.save": "--store.url=sqlite:////x.db"},
        {"model.path": "--run.directory=/x"},
        {"run.directory=/x": ""},
        {"run.save=true --run.directory": "/x"},
        {"run.note": "--run.name=../../x"},
        {"run.tags": ["--run.directory=/x"]},
        {"run.note": "nothing\0"},
        {"": "--run.directory=/x"},
        {"-": "/x"},
    ],
    ids=str,
)
@pytest.mark.parametrize("route", ["runs", "fork"])
def test_a_value_is_never_taken_for_a_flag(plain: Clients, started, settings, route):
    if route == "runs":
        reply = plain.owner.post("/api/runs", json={"method": "ppo", "settings": settings})
    else:
        recipe = load_recipe("ppo", None, [f"--run.directory={plain.app.state.studio.opened.workspace.directory}"])
        config = {"method": "ppo", **recipe.model_dump(mode="json")}
        with plain.app.state.studio.opened.engine.begin() as connection:
            connection.execute(update(runs).values(config=config))
        reply = plain.owner.post("/api/runs/1/fork", json={"settings": settings})
    assert reply.status_code in (200, 400, 422), reply.text
    directory = str(plain.app.state.studio.opened.workspace.directory)
    for words in started:  # it may start, if what was given is a text like any other
        flags = [word for word in words if word.startswith("--")]
        assert all("=" in flag for flag in flags)
        named = [flag.partition("=")[2] for flag in flags if flag.startswith("--run.directory")]
        assert named == [directory] and not any(flag.startswith("--store.url") for flag in flags)


@pytest.mark.parametrize("settings", [{"run.save": "--run.directory=/x"}, {"run.directory=/x": ""}])
def test_a_training_on_votes_takes_no_value_for_a_flag_either(plain: Clients, started, settings):
    queue = plain.queue(records=pairs(8))
    text = "".join(json.dumps(record) + "\n" for record in pairs(8))
    plain.owner.post(f"/api/label/queues/{queue}/import", json={"text": text})
    reply = plain.owner.post("/api/train", json={"queue_id": queue, "settings": {"ppo": settings}})
    assert reply.status_code in (400, 422) and not started, reply.text


def test_flags_hold_each_value_in_one_word():
    given = {"run.note": "--json", "run.steps": 3, "run.tags": ["a", "b"], "run.save": False}
    flags = as_flags(given)
    assert flags == ["--run.note=--json", "--run.steps=3", '--run.tags=["a", "b"]', "--run.save=false"]
    recipe = load_recipe("ppo", None, flags)
    assert (recipe.run.note, recipe.run.steps, list(recipe.run.tags)) == ("--json", 3, ["a", "b"])
    for key in ("run.save=x", "a b", "", "--x", "run..x"):
        with pytest.raises(ConfigError):
            as_flags({key: "x"})


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_row_that_names_a_folder_outside_is_no_run(plain: Clients, started, tmp_path: Path, name):
    opened = plain.app.state.studio.opened
    assert not is_inside(name)
    with pytest.raises(ConfigError):
        workspace_at(tmp_path).folder(name)
    outside = tmp_path / "x"
    outside.mkdir(exist_ok=True)
    (outside / "recipe.json").write_text("{}")
    with opened.engine.begin() as connection:
        row = connection.execute(runs.select()).mappings().first()
        values = dict(row) | {"id": 77, "name": name.replace("\0", ""), "uid": "x", "state": "stopped"}
        if is_inside(values["name"]):
            return  # no database keeps a NUL
        connection.execute(insert(runs).values(**values))
    assert [run.name for run in list_runs(opened)] == ["demo/ppo"]
    for subcommand in ("resume", "fork", "stop"):
        reply = plain.owner.post(f"/api/runs/77/{subcommand}", json={} if subcommand == "fork" else None)
        assert reply.status_code == 404, (subcommand, reply.text)
    assert plain.owner.get("/api/runs").json()["runs"][0]["name"] == "demo/ppo"
    assert plain.owner.get("/api/runs/77").status_code == 404
    assert not started


def test_a_record_beside_a_run_names_no_other_run(tmp_path: Path):
    from recording import Recording

    from tether.store.database.journal import Spool
    from tether.store.database.records import StoreRecord

    recording = Recording(tmp_path, None, name="demo/ppo", steps=1, method="ppo")
    recording.recorder.close("done")
    start = {"name": "../x", "uid": "other", "method": "ppo", "steps": 1, "config": {}, "environment": {}}
    start |= {"resumes": False, "sources": [], "time": 0.0}
    Spool(tmp_path / "runs" / "demo" / "ppo").add(StoreRecord("start", start))
    from tether.store.read import open_workspace

    with open_workspace(tmp_path / "runs") as opened, opened.reading() as connection:
        assert [row.name for row in connection.execute(runs.select())] == ["demo/ppo"]
