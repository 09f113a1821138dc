"""A store that goes away while an import moves into its queue: the import is finished, and is there once."""

import time
from contextlib import contextmanager

from studio_clients import Clients, pairs

from tether.errors import StorageError
from tether.studio.label_store import Labels


def test_an_import_that_is_moving_waits_for_the_store(plain: Clients, monkeypatch):
    labels, queue = plain.app.state.studio.labels, plain.queue()
    writing, moving = labels._writing, Labels._move
    fails = {"left": 0}

    @contextmanager
    def shaky():
        with writing() as connection:
            yield connection
            if fails["left"]:
                fails["left"] -= 1
                raise StorageError("the store is away")

    def move(self, stage: int, into: int) -> None:
        fails["left"] = 3 if fails["left"] == 0 and not fails.get("done") else fails["left"]
        fails["done"] = True
        moving(self, stage, into)

    monkeypatch.setattr(labels, "_writing", shaky)
    monkeypatch.setattr(Labels, "_move", move)
    reply = plain.owner.post(f"/api/label/queues/{queue}/import", json={"records": pairs(600)})
    assert reply.status_code in (200, 202), reply.text
    known = reply.json().get("id")
    until = time.monotonic() + 20
    while known and time.monotonic() < until:
        told = plain.owner.get(f"/api/label/imports/{known}").json()
        if told["state"] not in ("waiting", "running"):
            assert told["state"] == "done", told
            break
        time.sleep(0.1)
    assert fails == {"left": 0, "done": True}
    assert plain.owner.get(f"/api/label/queues/{queue}/items").json()["of"] == 600


def test_what_a_server_of_the_same_number_left_is_finished(plain: Clients, monkeypatch):
    """In a container the server has the same process id every time."""
    studio, queue = plain.app.state.studio, plain.queue()
    row = studio.labels.queue(queue)
    studio.labels._open_stage(row)
    assert studio.labels.clear_stages() == 0, "it is this server's own"
    monkeypatch.setattr("tether.studio.label_staging._OPENED", set())
    assert studio.labels.clear_stages() == 1
