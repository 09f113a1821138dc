"""Digests of rows: what is read is what was written, on both databases, also in stores of older versions."""

import json
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from recording import Recording, same, synthetic
from sqlalchemy import create_engine, text

from tether.cli import main
from tether.errors import StorageError
from tether.store.database.open import MIGRATIONS, open_engine, workspace_at
from tether.store.database.records import RunLog, read_log
from tether.store.database.schema import row_digest, step_digest
from tether.store.database.verify_rows import read_history, spans, vote_faults
from tether.store.history import settle_history
from tether.store.read import open_workspace, read_run


def recorded(root: Path, url: str | None) -> Recording:
    recording = Recording(root, url)
    recording.steps(0, 1, 2, rollouts=2)
    recording.recorder.event("trouble", "a \x00 text with \ud800 in it", data={"number": float("inf")})
    assert recording.recorder.close("stopped")
    return recording


def change(recording: Recording, statement: str) -> None:
    with open_engine(recording.workspace).begin() as connection:
        connection.execute(text(statement))


def test_what_was_recorded_agrees_with_its_digests(tmp_path: Path, store_url):
    recording = recorded(tmp_path, store_url)
    with open_engine(recording.workspace).connect() as connection:
        run_id = connection.execute(text("SELECT id FROM runs")).scalar_one()
        found = read_history(connection, run_id)
    assert found.faults == [] and sorted(found.steps) == [0, 1, 2]
    assert found.rollouts == {0: 2, 1: 2, 2: 2} and found.unsealed == 0
    settled = settle_history(recording.workspace, recording.folder, 0, 3)
    assert settled.told == [] and settled.faults == []


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE metrics SET value = value + 1e-12 WHERE step = 1 AND name = 'third'", "metrics of step 1"),
        ("UPDATE metrics SET name = 'thirc' WHERE step = 1 AND name = 'third'", "metrics of step 1"),
        ("DELETE FROM metrics WHERE step = 2 AND name = 'third'", "metrics of step 2"),
        ("UPDATE metrics SET step = 0 WHERE step = 1 AND name = 'other'", None),
        ("UPDATE rollouts SET score = 0.5 WHERE step = 0 AND place = 1", "step 0 sample 1"),
        ("UPDATE rollouts SET sample_id = 7 WHERE step = 0 AND place = 1", "step 0 sample 1"),
        ("UPDATE rollouts SET digest = NULL WHERE step = 0 AND place = 1", "step 0 sample 1"),
        ("DELETE FROM rollouts WHERE step = 1 AND place = 0", "tokens of step 1 are missing"),
        ("UPDATE events SET kind = 'done'", "1 events"),
        ("UPDATE runs SET config = '{}'", "the run's own row"),
    ],
)
def test_a_changed_row_is_found(tmp_path: Path, store_url, statement, words):
    recording = recorded(tmp_path, store_url)
    change(recording, statement)
    with open_engine(recording.workspace).connect() as connection:
        faults = read_history(connection, connection.execute(text("SELECT id FROM runs")).scalar_one()).faults
    assert (words is None and faults == []) or any(words in fault for fault in faults)


def test_damaged_metrics_are_not_handed_out_and_are_put_back(tmp_path: Path, store_url):
    recording = recorded(tmp_path, store_url)
    change(recording, "UPDATE metrics SET value = 7 WHERE step = 1 AND name = 'third'")
    with open_workspace(tmp_path / "runs", store_url) as opened:
        with pytest.raises(StorageError, match=r"metrics of step 1 of a are damaged.*--verify --repair"):
            read_run(opened, "a")
        settled = settle_history(recording.workspace, recording.folder, 0, 3)
        assert ["damaged metrics of step 1" in said for said in settled.told] == [True]
        run = read_run(opened, "a")
        assert [row["third"] for row in run.metrics] == [1 / 3] * 3
        assert all(same(synthetic(1, row), found) for row, found in enumerate(run.rollouts(1))), "tokens stay"


def test_a_store_of_an_older_tether_is_upgraded_without_loss(tmp_path: Path, store_url):
    workspace = workspace_at(tmp_path / "runs", store_url)
    workspace.directory.mkdir()
    engine = create_engine(workspace.url)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0006")
        _fill_in(connection, workspace.key)
        before = _everything(connection)
    with open_engine(workspace).connect() as connection:
        assert _everything(connection) == before
        found = read_history(connection, 1)
        assert found.faults == [] and found.unsealed == 1
        assert found.steps[4]["metrics"] == {"loss": 1 / 3, "not finite": None}
        assert vote_faults(connection, workspace.key) == []
    with open_workspace(tmp_path / "runs", store_url) as opened:
        assert [row["step"] for row in read_run(opened, "old").metrics] == [4, 5]
    engine.dispose()


def _fill_in(connection, key: str) -> None:
    rows = {
        "runs": "(id, workspace, name, uid, method, state, created, updated, steps_target, steps_done, config, "
        "environment, note, tags, run_group) VALUES (1, :key, 'old', 'u', 'sft', 'done', 1.5, 2.5, 6, 6, "
        "'{\"a\": [1.0]}', '{}', '\"\"', '[]', '\"\"')",
        "lineage": "(run_id, position, role, source, sha256) VALUES (1, 0, 'data', 'x.jsonl', NULL)",
        "steps": "(run_id, step, recorded) VALUES (1, 4, 2.0), (1, 5, 2.25)",
        "metrics": "(run_id, step, name, value) VALUES (1, 4, 'loss', 0.3333333333333333), (1, 4, 'not finite', NULL)",
        "rollouts": "(run_id, step, place, group_id, sample_id, finish, score, tokens, content) VALUES "
        "(1, 4, 0, 0, 0, 'stop', 0.1, 3, :blob)",
        "events": "(id, run_id, uid, time, kind, text, step, data) VALUES (1, 1, 'e', 2.0, 'done', '\"all\"', 6, '{}')",
        "queues": "(id, workspace, name, kind, guidelines, meta, created, open) VALUES "
        "(1, :key, '\"q\"', 'pair', '\"\"', '{}', 1.0, true)",
        "raters": "(id, workspace, name, role, created) VALUES (1, :key, '\"me\"', 'owner', 1.0)",
        "items": "(id, queue_id, kind, prompt, answers, meta, priority) VALUES "
        "(1, 1, 'pair', '[]', '[{}, {}]', '{}', 0)",
        "votes": '(id, client_uid, item_id, rater_id, "order", choice, seconds, created, undone) VALUES '
        "(1, 'c', 1, 1, '[1, 0]', '\"left\"', 2.5, 3.0, false)",
    }
    for table, content in rows.items():
        given = {"key": key} if ":key" in content else {}
        given |= {"blob": b"\x00\x01bytes"} if ":blob" in content else {}
        connection.execute(text(f"INSERT INTO {table} {content}"), given)


def _everything(connection) -> dict[str, list[tuple]]:
    """All rows, without the columns that are new."""
    tables = ("runs", "lineage", "steps", "metrics", "rollouts", "events", "queues", "raters", "items", "votes")
    found = {}
    for table in tables:
        rows = connection.execute(text(f"SELECT * FROM {table}")).mappings().all()
        new = {"digest"} | ({"rollouts"} if table == "steps" else set())
        found[table] = sorted(repr([(name, row[name]) for name in sorted(row) if name not in new]) for row in rows)
    return found


def test_votes_and_items_are_checked(tmp_path: Path, store_url):
    workspace = workspace_at(tmp_path / "runs", store_url)
    with open_engine(workspace).begin() as connection:
        from sqlalchemy import insert

        from tether.store.database.schema import items, label_audits, queues, raters, votes

        common = {"workspace": workspace.key, "created": 1.0}
        queue = {"name": "q", "kind": "pair", "guidelines": "", "meta": {}, "open": True}
        connection.execute(insert(queues).values(id=1, **common, **queue))
        connection.execute(insert(raters).values(id=1, name="me", role="owner", **common))
        item = {"queue_id": 1, "kind": "pair", "prompt": [{"role": "user"}], "answers": [{}, {}], "meta": {}}
        connection.execute(insert(items), [item | {"priority": 0}, item | {"priority": 1}])
        rows = [
            {"client_uid": f"c{place}", "item_id": place, "rater_id": 1, "order": [0, 1], "choice": "left"}
            | {"seconds": 0.25, "created": 2, "undone": place == 2}
            for place in (1, 2)
        ]
        connection.execute(insert(votes), rows)
        audit = {"workspace": workspace.key, "time": 3.0, "rater_id": 1, "action": "undo", "subject": 2, "data": {}}
        connection.execute(insert(label_audits).values(**audit))
        assert vote_faults(connection, workspace.key) == []
        connection.execute(text("UPDATE votes SET choice = '\"right\"' WHERE id = 1"))
        assert vote_faults(connection, workspace.key) == ["vote 1 is not what was written"]
        connection.execute(text("UPDATE votes SET choice = '\"left\"', undone = true WHERE id = 1"))
        assert vote_faults(connection, workspace.key) == ["vote 1 is undone, and the audit says otherwise"]
        connection.execute(text("UPDATE items SET answers = '[{}]' WHERE id = 2"))
        assert "item 2 is not what was written" in vote_faults(connection, workspace.key)


def test_the_log_drops_a_torn_line_and_passes_over_damaged_ones(tmp_path: Path):
    recording = recorded(tmp_path, None)
    path = recording.folder / "records.jsonl"
    whole = path.read_bytes()
    found = read_log(recording.folder)
    assert found is not None and sorted(found.steps) == [0, 1, 2] and found.damaged == [] and len(found.events) == 1
    path.write_bytes(whole[:-20])
    torn = read_log(recording.folder)
    assert torn is not None and torn.damaged == [] and not torn.events
    from tether.store.database.records import StoreRecord

    log = RunLog(recording.folder)
    log.append(StoreRecord("rewind", {"step": 2}))
    log.close()
    again = read_log(recording.folder)
    assert again is not None and sorted(again.steps) == [0, 1] and again.damaged == []
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        flipped = read_log(recording.folder)
        assert flipped is not None
        assert flipped.damaged or flipped.steps == found.steps
    path.write_bytes(whole)


def test_doctor_verify_says_what_is_wrong_and_repairs_what_it_can(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TETHER_STORE", raising=False)
    recording = recorded(tmp_path, None)
    from tether.files import sealed
    from tether.store.folder import write_whole
    from tether.store.header import RunHeader

    with open_workspace("runs") as opened, opened.reading() as connection:
        uid = connection.execute(text("SELECT uid FROM runs")).scalar_one()
    RunHeader(uid, {"run": {"steps": 3}}).write(recording.folder)
    write_whole(recording.folder / "recipe.json", {"run": {"steps": 3}})
    write_whole(recording.folder / "finished.json", sealed({"steps": 3}))
    assert main(["doctor", "a", "--verify"]) == 0
    assert "whole" in capsys.readouterr().out
    change(recording, "UPDATE metrics SET value = 7 WHERE step = 1 AND name = 'third'")
    write_whole(recording.folder / "recipe.json", {"run": {"steps": 4}})
    assert main(["doctor", "a", "--verify", "--json"]) == 6
    found = json.loads(capsys.readouterr().out)
    told = " ".join(fault for one in found["results"] for fault in one["faults"])
    assert "run.steps is 4, was 3" in told and "metrics of step 1" in told
    assert main(["doctor", "--verify", "--repair"]) == 0
    assert "restored" in capsys.readouterr().out
    assert main(["doctor", "a", "--verify"]) == 0
    (tmp_path / "runs" / "tether.db").unlink()
    assert main(["doctor", "runs/a", "--verify"]) == 6
    capsys.readouterr()
    assert main(["doctor", "runs/a", "--verify", "--repair"]) == 6, "tokens are nowhere else"
    assert "tokens of steps 0 to 2 were only in the run store" in capsys.readouterr().out
    assert main(["doctor", "runs/a", "--verify"]) == 0
    with open_workspace("runs") as opened:
        assert [row["third"] for row in read_run(opened, "a").metrics] == [1 / 3] * 3
    for words in (["doctor"], ["doctor", "a", "--repair"], ["doctor", "nothing", "--verify"]):
        assert main(words) == 2


def test_steps_are_named_as_people_name_them():
    assert spans([3]) == "step 3"
    assert spans([0, 1, 2, 7, 9, 10]) == "steps 0 to 2, 7, 9 to 10"


def test_a_digest_is_the_same_whatever_database_the_row_was_in():
    event = {"uid": "e", "time": 1, "kind": "k", "text": "\ud800", "step": None, "data": {1: (float("nan"), True)}}
    again = {"uid": "e", "time": 1.0, "kind": "k", "text": "\ud800", "step": None, "data": {"1": [None, True]}}
    assert row_digest("events", event) == row_digest("events", again)
    assert step_digest(0, {"a": 0.0}) == step_digest(0, {"a": -0.0})  # SQLite keeps no minus of a zero
    assert step_digest(0, {"a": 0.0}) != step_digest(0, {"a": 5e-324})
