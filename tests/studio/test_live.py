"""A server in a process of its own: what happens to runs arrives, and what was acknowledged survives its death."""

import json
import os
import socket
import threading
import uuid
from pathlib import Path

import httpx
from live_server import LiveServer, messages
from recording import Recording
from sqlalchemy import select
from studio_clients import pairs

from tether.server.serve import listen
from tether.store.database.open import open_engine, workspace_at
from tether.store.database.schema import votes
from tether.studio.run_routes import Cursor, message, read_cursor


def test_steps_events_and_the_end_of_a_run_arrive(tmp_path: Path, store_url):
    recording = Recording(tmp_path, store_url, steps=9)
    recording.steps(0, 1)
    assert recording.recorder.flush()
    with LiveServer(tmp_path / "runs", store_url) as server:
        with server.client.stream("GET", "/api/stream?run=1") as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            told = messages(reply)
            kind, data, _ = next(told)
            assert kind == "run" and (data["state"], data["step"], data["steps"]) == ("running", 2, 9)
            recording.steps(2)
            recording.recorder.event("note", "</script>\n\nevent: run\ndata: {}", step=2)
            seen = {}
            while set(seen) != {"run", "step", "event"}:
                kind, data, place = next(told)
                seen[kind] = data
            assert seen["step"] == {"id": 1, "step": 2, "metrics": {"score": 0.2, "third": 1 / 3}}
            assert seen["event"]["text"] == "</script>\n\nevent: run\ndata: {}"
        recording.steps(3)
        assert recording.recorder.flush()
        with server.client.stream("GET", "/api/stream?run=1", headers={"last-event-id": place}) as reply:
            told = messages(reply)
            kind, data, _ = next(told)
            assert kind == "step" and data["step"] == 3, "what was missed comes first"
            recording.recorder.close("done")
            while not (kind == "run" and data["state"] == "done"):
                kind, data, _ = next(told)
        assert server.stop() == 0


def test_a_message_cannot_be_ended_by_its_text():
    text = message("event", {"text": "a\n\nevent: x\r\ndata: y\u2028"}, Cursor(3, 4))
    assert text.count("\n\n") == 1 and text.startswith("id: 3.4\nevent: event\ndata: ")
    assert read_cursor("3.4") == Cursor(3, 4) and read_cursor("-1.0") == Cursor(-1, 0)
    assert all(read_cursor(wrong) is None for wrong in ("", "x", "1", "1.x", "1.2.3", "9" * 30 + ".1"))


def test_no_acknowledged_vote_is_lost_or_doubled_when_the_server_is_killed(tmp_path: Path, store_url):
    kills = int(os.environ.get("TETHER_TEST_KILLS", "3"))
    acknowledged: dict[str, int] = {}  # client_uid -> vote id
    unanswered: list[tuple[str, dict]] = []  # votes that the server took with it, or kept and could not say so
    queue, raters = None, []
    for _ in range(kills):
        with LiveServer(tmp_path / "runs", store_url) as server:
            if queue is None:
                queue = server.client.post("/api/label/queues", json={"name": "q"}).json()["id"]
                body = {"from": "file", "records": pairs(60 * kills)}
                assert server.client.post(f"/api/label/queues/{queue}/fill", json=body).status_code == 200
                raters = [server.client.post("/api/raters", json={"name": f"r{n}"}).json()["token"] for n in range(4)]
            enough = threading.Event()
            goal = len(acknowledged) + 20
            threads = [
                threading.Thread(target=_vote_on, args=(server, token, queue, acknowledged, unanswered, enough, goal))
                for token in raters
            ]
            for thread in threads:
                thread.start()
            assert enough.wait(60), "votes come in"
            server.kill()
            for thread in threads:
                thread.join()
    with LiveServer(tmp_path / "runs", store_url) as server:
        for token, body in unanswered:
            headers = {"authorization": f"Bearer {token}"}
            again = server.client.post("/api/label/votes", json=body, headers=headers)
            assert again.status_code in (200, 409), "kept now or before, unless another vote took its place"
            if again.status_code == 200:
                acknowledged[body["client_uid"]] = again.json()["id"]
        exported = server.client.get(f"/api/label/queues/{queue}/export?format=votes").text
        kept = [vote for line in exported.splitlines() for vote in json.loads(line)["votes"]]
        assert len(kept) == len(set(kept)), "none is doubled"
        assert set(acknowledged.values()) <= set(kept), "none is lost"
        assert len(acknowledged) >= 20 * kills
    with open_engine(workspace_at(tmp_path / "runs", store_url)).connect() as connection:
        stored = connection.execute(select(votes.c.client_uid, votes.c.item_id, votes.c.rater_id)).all()
    assert len(stored) == len({(item, rater) for _, item, rater in stored}), "one vote a rater and item"
    assert set(acknowledged) <= {uid for uid, _, _ in stored}


def _vote_on(server, token, queue, acknowledged, unanswered, enough, goal) -> None:
    """Vote until the server is gone."""
    client = httpx.Client(base_url=server.told["address"], headers={"authorization": f"Bearer {token}"}, timeout=10.0)
    body = None
    try:
        while item := client.get(f"/api/label/queues/{queue}/next").json()["item"]:
            body = {"client_uid": uuid.uuid4().hex, "item_id": item["id"], "order": item["order"], "choice": "left"}
            reply = client.post("/api/label/votes", json=body)
            assert reply.status_code == 200, reply.text
            acknowledged[body["client_uid"]] = reply.json()["id"]
            body = None
            if len(acknowledged) >= goal:
                enough.set()
    except httpx.HTTPError:
        unanswered += [(token, body)] if body is not None else []
    finally:
        client.close()


def test_small_answers_are_not_held_back_by_the_network():
    """Asyncio turns Nagle's delay off only on sockets that say that they are TCP."""
    listening = listen("127.0.0.1", 0)
    try:
        assert listening.proto == socket.IPPROTO_TCP
    finally:
        listening.close()


def test_who_connects_before_the_server_is_up_is_not_refused():
    listening = listen("127.0.0.1", 0)
    try:
        socket.create_connection(listening.getsockname(), timeout=5).close()
    finally:
        listening.close()
