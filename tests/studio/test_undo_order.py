"""Undo and the gap before a repeat go by the order in which votes were kept, whatever the clock says."""

import time

import pytest
from sqlalchemy import select
from studio_clients import Clients, pairs

from tether.store.database.schema import label_audits, votes
from tether.studio import label_store


def cast(client, queue: int) -> int:
    """Vote on what comes next; the item."""
    item = client.get(f"/api/label/queues/{queue}/next").json()["item"]
    body = {"client_uid": f"u{item['id']}-{time.monotonic_ns()}", "item_id": item["id"], "order": item["order"]}
    reply = client.post("/api/label/votes", json=body | {"choice": "left"})
    assert reply.status_code == 200, reply.text
    return item["id"]


def standing(clients: Clients) -> list[int]:
    with clients.app.state.studio.opened.reading() as connection:
        return list(connection.execute(select(votes.c.item_id).where(~votes.c.undone).order_by(votes.c.id)).scalars())


def test_undo_takes_the_last_vote_back_after_the_clock_went_back(clients: Clients, monkeypatch):
    queue, ann = clients.queue(records=pairs(3)), clients.annotator()
    now = time.time()
    monkeypatch.setattr(label_store.time, "time", lambda: now)
    first = cast(ann, queue)
    monkeypatch.setattr(label_store.time, "time", lambda: now - 3600)  # as at the end of summer time, or by NTP
    second = cast(ann, queue)
    assert ann.post("/api/label/votes/undo", json={"queue_id": queue}).json() == {"item_id": second}
    assert standing(clients) == [first]
    assert ann.post("/api/label/votes/undo").json() == {"item_id": first}


def test_a_repeat_waits_for_other_votes_by_their_order(plain: Clients, monkeypatch):
    labels = plain.app.state.studio.labels
    queue = plain.queue(records=pairs(30))
    now = [time.time()]
    monkeypatch.setattr(label_store.time, "time", lambda: now[0])
    cast_items = []
    for _ in range(12):
        now[0] -= 60
        cast_items.append(cast(plain.owner, queue))
    with labels._opened.reading() as connection:
        owner = labels.owner().id
        lately = list(connection.execute(label_store._LATELY, {"rater": owner}).scalars())
    assert lately == cast_items[::-1][: label_store.REPEAT_GAP]


@pytest.mark.parametrize("named", [False, True])
def test_a_vote_in_a_closed_queue_stands(clients: Clients, named):
    queue, ann = clients.queue(records=pairs(2)), clients.annotator()
    cast(ann, queue)
    cast(clients.owner, queue)
    assert clients.owner.post(f"/api/label/queues/{queue}", json={"open": False}).status_code == 200
    body = {"queue_id": queue} if named else {}
    before = standing(clients)
    for who in (ann, clients.owner):
        reply = who.post("/api/label/votes/undo", json=body)
        assert reply.status_code == 409 and "closed" in reply.json()["error"]
    assert standing(clients) == before
    with clients.app.state.studio.opened.reading() as connection:
        assert "undo" not in connection.execute(select(label_audits.c.action)).scalars().all()
    assert clients.owner.post(f"/api/label/queues/{queue}", json={"open": True}).status_code == 200
    assert ann.post("/api/label/votes/undo", json=body).json()["item_id"] is not None


def test_what_happened_to_a_run_is_told_in_the_order_in_which_it_happened(tmp_path, monkeypatch, store_url):
    from studio_clients import Recording

    from tether.store import recorder
    from tether.store.read import open_workspace, read_run

    now = [time.time()]
    monkeypatch.setattr(recorder.time, "time", lambda: now[0])
    recording = Recording(tmp_path, store_url, name="demo/ppo", steps=2, method="ppo")
    for text in ("first", "second", "third"):
        recording.recorder.event("note", text)
        now[0] -= 600
    recording.recorder.close("done")
    with open_workspace(tmp_path / "runs", store_url) as opened:
        told = [event.text for event in read_run(opened, "demo/ppo").events]
    assert told == ["first", "second", "third"]
