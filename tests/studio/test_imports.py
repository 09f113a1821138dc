"""Imports in the background: all or nothing, told how far, cancelled, limited, and in nobody's way."""

import json
import threading
import time

import pytest
from sqlalchemy import func, select
from studio_clients import Clients, pairs
from test_undo_order import cast

from tether.store.database.schema import items, queues, votes
from tether.studio import import_export, label_staging
from tether.studio.label_staging import Cancelled


def lines(count: int) -> str:
    return "".join(json.dumps(record) + "\n" for record in pairs(count))


def counted(clients: Clients) -> tuple[int, int, int]:
    """(queues, items, votes) of the whole database, seen or unseen."""
    with clients.app.state.studio.opened.reading() as connection:
        return tuple(connection.execute(select(func.count()).select_from(t)).scalar() for t in (queues, items, votes))


def ended(clients: Clients, import_id: str) -> dict:
    deadline = time.monotonic() + 30
    while (told := clients.owner.get(f"/api/label/imports/{import_id}").json())["state"] in ("waiting", "running"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return told


@pytest.fixture
def slow(monkeypatch):
    """Many small transactions with a pause after each, so that there is time to look on."""
    monkeypatch.setattr(label_staging, "TOGETHER", 10)
    monkeypatch.setattr(import_export, "PATIENCE", 0.0)
    monkeypatch.setattr(label_staging, "_let_others_in", lambda began: time.sleep(0.02))


def test_votes_are_answered_while_many_records_come_in(clients: Clients, slow):
    """Each vote waits for one short transaction at the most; the import is unseen until it is whole."""
    judged, filled = clients.queue(records=pairs(10)), clients.queue(name="filled")
    reply = clients.owner.post(f"/api/label/queues/{filled}/import", json={"text": lines(400)})
    assert reply.status_code == 202, reply.text
    waits, seen = [], set()
    for _ in range(10):
        began = time.monotonic()
        cast(clients.owner, judged)
        waits.append(time.monotonic() - began)
        seen.add(len(clients.app.state.studio.labels.items(filled)))
    assert sorted(waits)[len(waits) // 2] < 0.5, waits
    told = ended(clients, reply.json()["id"])
    assert (told["state"], told["done"], told["items"], told["votes"]) == ("done", 400, 400, 400)
    assert seen <= {0} | set(range(1, 401)) and len(clients.app.state.studio.labels.items(filled)) == 400
    listed = clients.owner.get("/api/label/queues").json()["queues"]
    assert [(queue["items"], queue["votes"]) for queue in listed] == [(10, 10), (400, 400)]
    assert counted(clients) == (2, 410, 410), "nothing else is left"


def test_a_cancelled_import_leaves_nothing(clients: Clients, slow):
    queue = clients.queue()
    before = counted(clients)
    made = clients.owner.post(f"/api/label/queues/{queue}/import", json={"text": lines(2000)}).json()
    while clients.owner.get(f"/api/label/imports/{made['id']}").json()["done"] == 0:
        time.sleep(0.005)
    clients.owner.post(f"/api/label/imports/{made['id']}/cancel")
    told = ended(clients, made["id"])
    assert told["state"] == "cancelled" and 0 < told["done"] < 2000
    assert counted(clients) == before
    assert clients.owner.get("/api/label/imports").json()["imports"][0] == told
    assert clients.owner.post(f"/api/label/imports/{made['id']}/cancel").json() == told


def test_repeats_and_order_survive_the_way_through_the_stage(clients: Clients, monkeypatch):
    monkeypatch.setattr(label_staging, "TOGETHER", 7)
    queue = clients.queue()
    body = {"from": "file", "records": pairs(60), "repeats": 0.5}
    reply = clients.owner.post(f"/api/label/queues/{queue}/fill", json=body)
    assert reply.json() == {"added": 60, "repeats": 30}, reply.text
    rows = clients.app.state.studio.labels.items(queue)
    firsts = [row.prompt[0]["content"] for row in rows if row.repeat_of is None]
    assert firsts == [f"q{n}" for n in range(60)] and len(rows) == 90
    by_id = {row.id: row for row in rows}
    assert all(by_id[row.repeat_of].prompt == row.prompt for row in rows if row.repeat_of is not None)


@pytest.mark.parametrize("moving", [False, True])
def test_what_a_server_that_died_left_is_finished_or_removed(clients: Clients, monkeypatch, moving):
    monkeypatch.setattr(label_staging, "TOGETHER", 10)
    labels, queue = clients.app.state.studio.labels, clients.queue()
    given = import_export.imported("pair", pairs(40))

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(labels, "_drop", lambda stage: None)
        dying.setattr(label_staging.os, "getpid", lambda: 2**22 + 12345)  # no process has it
        if moving:
            update = labels._in_parts

            def one_part(stage: int):
                yield update(stage)[0]
                die()

            dying.setattr(labels, "_in_parts", one_part)
        else:
            dying.setattr(labels, "_move", die)
        with pytest.raises((KeyboardInterrupt, Exception)):
            labels.take_in(labels.owner(), queue, given)
    assert counted(clients)[1] == 40 and len(labels.items(queue)) in (0, 20)
    assert labels.clear_stages() == 1 and labels.clear_stages() == 0
    assert len(labels.items(queue)) == (40 if moving else 0)
    assert counted(clients) == ((1, 40, 40) if moving else (1, 0, 0))


def test_a_text_has_a_limit_as_a_list_has(plain: Clients, monkeypatch):
    monkeypatch.setattr(import_export, "MAX_LINES", 50)
    queue = plain.queue()
    for subcommand, extra in (
        ("import", {}),
        ("fill", {"from": "file"}),
        ("fill", {"from": "model", "model": "tiny-bytes"}),
    ):
        reply = plain.owner.post(f"/api/label/queues/{queue}/{subcommand}", json={"text": lines(51)} | extra)
        assert reply.status_code == 400 and "at most 50 records" in reply.json()["error"]
    reply = plain.owner.post(f"/api/label/queues/{queue}/import", json={"text": lines(50) + "\n" * 500})
    assert reply.json() == {"items": 50, "votes": 50}


def test_only_so_many_imports_wait(plain: Clients, slow):
    queue, given = plain.queue(), {"text": lines(300)}
    begun = [
        plain.owner.post(f"/api/label/queues/{queue}/import", json=given) for _ in range(import_export.MAX_WAITING)
    ]
    assert {reply.status_code for reply in begun} == {202}
    refused = plain.owner.post(f"/api/label/queues/{queue}/import", json=given)
    assert refused.status_code == 409 and "cancel one" in refused.json()["error"]
    for reply in begun:
        plain.owner.post(f"/api/label/imports/{reply.json()['id']}/cancel")
    assert {ended(plain, reply.json()["id"])["state"] for reply in begun} == {"cancelled"}


def test_imports_are_the_owners(plain: Clients):
    ann = plain.annotator()
    assert ann.get("/api/label/imports").status_code == 403
    assert ann.post("/api/label/imports/0123456789ab/cancel").status_code == 403
    assert plain.owner.get("/api/label/imports/0123456789ab").status_code == 404
    assert plain.owner.get("/api/label/imports/..").status_code in (404, 422)


def test_an_import_that_is_taken_back_at_the_end_leaves_nothing(clients: Clients, monkeypatch):
    monkeypatch.setattr(label_staging, "TOGETHER", 10)
    labels, queue, stop = clients.app.state.studio.labels, clients.queue(), threading.Event()

    def tell(done: int) -> None:
        if done == 40:
            stop.set()

    with pytest.raises(Cancelled):
        labels.take_in(
            labels.owner(), queue, import_export.imported("pair", pairs(40)), report=tell, cancelled=stop.is_set
        )
    assert counted(clients) == (1, 0, 0)
