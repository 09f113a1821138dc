"""Passwords and tokens are kept nowhere and told to no one; annotators do not learn where the database is."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text
from studio_clients import Clients, pairs, record_run, settings

from tether.config.load import load_recipe
from tether.errors import ConfigError
from tether.redact import HIDDEN, redact, redact_url, remember_secret, secret_in
from tether.store.database.open import workspace_at
from tether.store.folder import recipe_record
from tether.studio.app import create_app

SECRET = "hunter2-hunter2"
SECRET_URLS = [
    f"postgresql://bob:{SECRET}@db.example/x",
    f"postgresql://bob@corp:{SECRET}@db.example/x",
    f"postgresql://:{SECRET}@db.example/x",
    f"postgresql://bob:{SECRET}/a?b@db.example/x",
    f"postgresql://bob@db.example/x?password={SECRET}",
    f"postgresql://bob@db.example/x?sslmode=require&password={SECRET}&connect_timeout=3",
    f"postgresql://bob@db.example/x?PASSWORD={SECRET}",
    f"postgresql://bob@db.example/x?pass%77ord={SECRET}",
    f"postgresql://bob@db.example/x?sslpassword={SECRET}",
    f"postgresql://bob@db.example/x?passfile=/home/bob/{SECRET}",
    f"postgresql+psycopg://bob:a%40{SECRET}@db.example/x?password=b%20{SECRET}",
]


@pytest.mark.parametrize("url", SECRET_URLS)
def test_a_password_in_the_address_of_a_store_is_not_kept_or_shown(url: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tether.redact._known", set())  # by its form alone
    assert SECRET not in redact_url(url) and SECRET not in redact(f"cannot reach {url}: no route")
    assert redact_url(redact_url(url)) == redact_url(url)
    recipe = load_recipe("ppo", None, [f"--store.url={url}", f"--run.directory={tmp_path}"])
    kept = recipe_record(recipe)
    assert SECRET not in json.dumps(kept)
    assert make_url(kept["store"]["url"]).database == make_url(url).database
    workspace = workspace_at(tmp_path, url)
    assert SECRET in workspace.url.render_as_string(hide_password=False), "it is used, though"
    assert SECRET not in workspace.place


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://bob@db.example/x",
        "postgresql://db.example:5432/x?host=/run/pg&sslmode=require",
        "sqlite:////a/b.db",
    ],
)
def test_an_address_without_a_secret_stays_as_it_is(url: str):
    assert redact_url(url) == url and redact(f"see {url} for more") == f"see {url} for more"


@pytest.mark.parametrize(
    "said",
    [
        f"host=db password={SECRET} user=bob",
        f"password='{SECRET}'",
        f'{{"api_key": "{SECRET}"}}',
        f"Authorization: Bearer {SECRET}{SECRET}",
        "hf_abcdefghijklmnopqrstuvwxyz",
        "sk-abcdefghijklmnopqrstuvwxyz",
        f"GET https://host/score?token={SECRET}",
        f"GET https://host/score?x=1&api-key={SECRET}#y",
    ],
)
def test_what_is_called_a_secret_is_hidden_in_any_text(said: str):
    assert SECRET not in redact(said) and "abcdefghijklmnop" not in redact(said)


@pytest.mark.parametrize(
    "said",
    [
        "url must contain no user or password, because recipes are saved: use token_env",
        "the bearer token (api_key) is missing or wrong",
        "rollout.stop: expected a list of texts, got token: 3",
        "--token: needs 16 characters or more, such as $(openssl rand -hex 16)",
    ],
)
def test_our_own_sentences_stay_readable(said: str):
    assert redact(said) == said


def test_tokens_that_are_in_use_are_hidden_however_they_are_written(monkeypatch):
    monkeypatch.setattr("tether.redact._known", set())
    remember_secret("p@ss word/1")
    monkeypatch.setenv("SOME_API_KEY", "0123456789abcdef")
    assert redact("p@ss word/1 p%40ss%20word%2F1 0123456789abcdef") == " ".join([HIDDEN] * 3)


@pytest.mark.parametrize(
    "flag",
    [
        '--task.options={"api_key": "abcdefgh"}',
        '--task.options={"Access-Token": "x"}',
        "--run.note=hf_abcdefghijklmnopqrstuvwxyz",
    ],
)
def test_a_secret_among_the_settings_is_refused_before_it_is_saved(flag: str, tmp_path: Path):
    recipe = load_recipe("ppo", None, [flag, f"--run.directory={tmp_path}"])
    with pytest.raises(ConfigError, match="environment variable"):
        recipe_record(recipe)
    assert secret_in({"run": {"seed": 1}, "model": {"path": "password"}}) is None
    assert secret_in({"reward": {"parts": [{"options": {"password": "p"}}]}}) == "reward.parts[0].options.password"


@pytest.mark.parametrize("query", ["token=x", "api_key=x", "a=1&key=x", "access%5Ftoken=x", "password=x"])
def test_a_reward_server_is_not_named_with_its_token(query: str):
    part = json.dumps([{"kind": "remote", "url": f"http://127.0.0.1:1/score?{query}"}])
    with pytest.raises(ConfigError, match="token_env"):
        load_recipe("ppo", None, [f"--reward.parts={part}"])


def test_the_command_line_says_that_others_can_read_it(tmp_path: Path):
    words = ["runs", "--workspace", str(tmp_path), f"--store=postgresql://bob:{SECRET}@127.0.0.1:1/x"]
    done = subprocess.run([sys.executable, "-m", "tether", *words], capture_output=True, text=True, check=False)
    assert "list of processes" in done.stderr and SECRET not in done.stderr + done.stdout


def test_an_older_store_shows_no_password_either(plain: Clients):
    from sqlalchemy import update

    from tether.store.database.schema import runs

    config = {"method": "ppo", "store": {"url": f"postgresql://bob@h/x?password={SECRET}"}}
    with plain.app.state.studio.opened.engine.begin() as connection:
        connection.execute(update(runs).values(config=config))
    told = plain.owner.get("/api/runs/1").text
    assert "postgresql://bob@h/x" in told and SECRET not in told


def test_annotators_do_not_learn_where_the_database_is(tmp_path: Path, postgres_server, capsys):
    """A real server, whose database goes away under the page."""
    name = "tether_secrets"
    admin = create_engine(postgres_server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    address = admin.url.set(database=name).update_query_dict({"password": SECRET})
    url = address.render_as_string(hide_password=False)
    try:
        record_run(tmp_path, url)
        for file in (tmp_path / "runs").rglob("*"):
            assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
        with create_engine(url).connect() as connection:
            assert SECRET not in str(connection.execute(text("SELECT config, environment FROM runs")).all())
        clients = Clients(create_app(workspace_at(tmp_path / "runs", url), settings()))
        queue = clients.queue(records=pairs(2))
        ann = clients.annotator(queue)
        item = ann.get(f"/api/label/queues/{queue}/next").json()["item"]
        vote = {"client_uid": "u1", "item_id": item["id"], "order": item["order"], "choice": "left"}
    finally:
        with admin.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    hidden = [SECRET, name, "tether@", str(address.query["host"]), "psycopg", "FATAL"]
    for reply in (
        ann.get(f"/api/label/queues/{queue}/next"),
        ann.get("/api/label/queues"),
        ann.post("/api/label/votes", json=vote),
        ann.post("/api/label/votes/undo", json={}),
    ):
        assert reply.status_code == 503, reply.text
        assert not [word for word in hidden if word in reply.text], reply.text
    told = clients.owner.get("/api/label/queues").json()["error"]
    assert name in told and SECRET not in told, "its owner learns which one it is"
    logged = capsys.readouterr().err
    assert name in logged and SECRET not in logged
    admin.dispose()
    shutil.rmtree(tmp_path / "runs")
