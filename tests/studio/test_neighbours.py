"""What others can do to someone's session, votes and time: other servers of the host, other pages, other annotators."""

import json
import threading
import time

import pytest
from fastapi.exceptions import RequestValidationError
from studio_clients import ADDRESS, Clients, pairs

from tether.studio.import_export import imported
from tether.studio.settings import StudioSettings

NAME = StudioSettings().cookie
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "other", ['a={"x":1}', "a b", "x=a b c", "k@y=1", "=", "[k]=1", "n(=1", 'q"=1', "", "a==;;", "x=\u00e9"]
)
def test_a_cookie_of_another_server_of_this_host_does_not_log_anyone_out(plain: Clients, other: str):
    secret = plain.logged_in("once").cookies[NAME]
    for text in (f"{other}; {NAME}={secret}", f"{NAME}={secret}; {other}"):
        reply = plain.stranger().get("/api/me", headers={"cookie": text.encode("latin-1")})
        assert reply.status_code == 200, text


def test_cookies_may_come_in_several_lines(plain: Clients):
    secret = plain.logged_in("once").cookies[NAME]
    lines = [("cookie", "a=1"), ("cookie", f"{NAME}={secret}")]
    assert plain.stranger().get("/api/me", headers=lines).status_code == 200


@pytest.mark.parametrize(
    "said", [{"origin": "http://127.0.0.1:3000"}, {"origin": "null"}, {"sec-fetch-site": "same-site"}]
)
def test_a_page_of_another_port_is_answered_nothing_of_the_api(plain: Clients, said: dict[str, str]):
    """Its requests have the cookie, which does not know ports; each stream would take one of the owner's places."""
    owner = plain.logged_in("once")
    for path in ("/api/me", "/api/stream"):
        assert owner.get(path, headers=said).status_code == 403
    assert owner.get("/", headers={"sec-fetch-site": "same-site"}).status_code == 200  # by a link
    assert owner.get("/api/me", headers={"origin": ADDRESS, "sec-fetch-site": "same-origin"}).status_code == 200


def test_an_annotator_does_not_learn_of_items_in_other_queues(plain: Clients):
    mine, other = plain.queue(records=pairs(1)), plain.queue(records=pairs(1), name="another")
    ann = plain.annotator(mine)
    hidden = plain.owner.get(f"/api/label/queues/{other}/items").json()["items"][0]["id"]
    said = []
    for item in (hidden, 999):
        body = {"client_uid": f"u{item}", "item_id": item, "order": [0, 1], "choice": "left"}
        reply = ann.post("/api/label/votes", json=body)
        said.append((reply.status_code, reply.json()["error"].replace(str(item), "N")))
    assert said[0] == said[1] == (404, "there is no item N")


MANY = 90_000
LONG_BODIES = {
    "words": {"choice": ["x"] * MANY},
    "lists": {"choice": [["x"]] * MANY},
    "a list in a list": {"choice": [["x"] * 2 * MANY]},
    "numbers": {"choice": [1] * MANY},
    "ratings": {"ratings": [{f"k{n}": 1 for n in range(MANY // 2)}]},
    "fields": {f"k{n}": 1 for n in range(MANY // 2)},
}


@pytest.mark.parametrize("name", LONG_BODIES)
def test_a_long_body_that_is_wrong_is_refused_at_once(plain: Clients, name: str, monkeypatch):
    """Each wrong element used to be told of by itself, while no one else was answered."""
    told: list[int] = []
    errors = RequestValidationError.errors

    def watched(fault: RequestValidationError):
        told.append(len(errors(fault)))
        return errors(fault)

    monkeypatch.setattr(RequestValidationError, "errors", watched)
    ann = plain.annotator(plain.queue(records=pairs(1)))
    body = {"client_uid": "a", "item_id": 1, "order": [0, 1]} | LONG_BODIES[name]
    content = json.dumps(body)
    assert len(content) < 1 << 20
    reply = ann.post("/api/label/votes", content=content, headers=JSON)
    assert reply.status_code == 422
    assert len(told) == 1 and told[0] < 10, "how many faults the validation went on to find"


def test_a_vote_with_ties_is_taken_as_before(plain: Clients):
    records = [{"prompt": "q", "answers": [f"a{n}" for n in range(9)]}]
    ann = plain.annotator(plain.queue("ranking", records))
    body = {"client_uid": "a", "item_id": 1, "order": list(range(9)), "choice": [list(range(9))]}
    assert ann.post("/api/label/votes", json=body).status_code == 200


def test_undoing_at_once_takes_as_many_votes_back_as_it_says(clients: Clients):
    queue, ann = clients.queue(records=pairs(6)), clients.annotator()
    for number in range(6):
        item = ann.get(f"/api/label/queues/{queue}/next").json()["item"]
        body = {"client_uid": f"u{number}", "item_id": item["id"], "order": item["order"], "choice": "left"}
        assert ann.post("/api/label/votes", json=body).status_code == 200
    told: list[int] = []

    def undo() -> None:
        told.append(ann.post("/api/label/votes/undo", json={}).json()["item_id"])

    threads = [threading.Thread(target=undo) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(told)) == 6, told
    assert ann.get("/api/label/queues").json()["queues"][0]["done"] == 0


def test_many_votes_on_one_item_are_read_in_good_time():
    """A tenth of a second; comparing each with each would take a hundred."""
    record = {"prompt": "q", "answers": ["a", "b"], "ranks": [0, 1], "item": 1}
    began = time.process_time()
    [one] = imported("pair", [record | {"rater": f"r{n % 45_000}"} for n in range(60_000)])
    assert len(one.votes) == 45_000
    assert time.process_time() - began < 30


def test_a_link_makes_no_one_another_person_unasked(plain: Clients):
    """Someone's page can link to Studio with their own token after #, and our page would post it."""
    owner = plain.logged_in("once")
    token = plain.owner.post("/api/raters", json={"name": "mallory"}).json()["token"]
    said = {"origin": ADDRESS}
    refused = owner.post("/api/login", json={"token": token}, headers=said)
    assert refused.status_code == 409 and "set-cookie" not in refused.headers
    assert "logged in as owner" in refused.json()["error"] and "mallory" not in refused.text
    assert owner.get("/api/me").json()["role"] == "owner"
    assert owner.post("/api/login", json={"token": token, "instead": True}, headers=said).status_code == 200
    assert owner.get("/api/me").json()["name"] == "mallory"
    assert owner.post("/api/login", json={"token": token}, headers=said).status_code == 200  # their own link again


def test_the_printed_link_is_not_used_up_by_being_asked(plain: Clients):
    token = plain.owner.post("/api/raters", json={"name": "ann"}).json()["token"]
    browser = plain.logged_in(token)
    said = {"origin": ADDRESS}
    assert browser.post("/api/login", json={"token": "once"}, headers=said).status_code == 409
    assert browser.post("/api/login", json={"token": "once", "instead": True}, headers=said).status_code == 200
    assert browser.get("/api/me").json()["role"] == "owner"
