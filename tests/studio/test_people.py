"""Who is in, how they came in, and how they are put out."""

import argparse
import asyncio
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from live_server import LiveServer
from starlette.testclient import TestClient
from studio_clients import ADDRESS, TOKEN, Clients, settings

from tether.cli import main
from tether.errors import ConfigError, StorageError
from tether.rate_limit import Rate, network_of
from tether.server.serve import find_token
from tether.store.database.open import workspace_at
from tether.studio.app import create_app
from tether.studio.people import MAX_PER_PERSON, Auth, Person
from tether.studio.settings import chosen_token, trusted_networks

SLOW = Rate(0.001, 3)


def clients_with(tmp_path: Path, **changes) -> Clients:
    return Clients(create_app(workspace_at(tmp_path), settings(**changes)))


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_under_429_a_right_token_looks_like_a_wrong_one(tmp_path):
    clients = clients_with(tmp_path, stranger_rate=SLOW)
    invited = clients.owner.post("/api/raters", json={"name": "ann"}).json()["token"]
    browser = clients.logged_in("once")
    assert [clients.with_token(f"guess {n}").get("/api/me").status_code for n in range(4)] == [401, 401, 401, 429]
    wrong = clients.with_token("guess").get("/api/me")
    for token in (TOKEN, invited):
        right = clients.with_token(token).get("/api/me")
        assert (right.status_code, right.json(), dict(right.headers)) == (429, wrong.json(), dict(wrong.headers))
        login = clients.stranger().post("/api/login", json={"token": token})
        assert (login.status_code, "set-cookie" in login.headers) == (429, False)
    assert browser.get("/api/me").status_code == 200, "whoever is logged in is no stranger"


def test_right_tokens_do_not_use_up_what_wrong_ones_may(tmp_path):
    clients = clients_with(tmp_path, stranger_rate=SLOW)
    assert {clients.owner.get("/api/me").status_code for _ in range(20)} == {200}


@pytest.mark.parametrize("header", ["x-forwarded-for", "x-real-ip", "forwarded", "x-client-ip", "cf-connecting-ip"])
def test_a_header_gives_no_one_a_fresh_bucket(tmp_path, header):
    clients = clients_with(tmp_path, stranger_rate=SLOW)
    told = [clients.stranger().get("/api/me", headers={header: f"10.0.0.{n}"}).status_code for n in range(5)]
    assert told == [401, 401, 401, 429, 429]


def test_a_trusted_proxy_speaks_for_others_and_they_for_no_one(tmp_path):
    app = create_app(workspace_at(tmp_path), settings(stranger_rate=SLOW, trusted_proxies=trusted_networks("10.0.0.1")))

    def ask(peer: str, forwarded: str) -> int:
        client = TestClient(app, base_url=ADDRESS, client=(peer, 1))
        return client.get("/api/me", headers={"x-forwarded-for": forwarded}).status_code

    assert [ask("10.0.0.1", f"7.7.7.{n}") for n in range(5)] == [401] * 5, "each has a bucket of their own"
    assert [ask("10.0.0.1", f"1.2.3.{n}, 8.8.8.8, 10.0.0.1") for n in range(4)] == [401, 401, 401, 429]
    assert [ask("9.9.9.9", f"7.8.7.{n}") for n in range(4)] == [401, 401, 401, 429], "not from anyone else"
    assert [ask("10.0.0.1", "") for _ in range(4)] == [401, 401, 401, 429]


def test_strangers_are_counted_by_network():
    assert network_of("1.2.3.4") == network_of("::ffff:1.2.3.4") == "1.2.3.4"
    assert network_of("2001:db8::1") == network_of("2001:db8::2:1") != network_of("2001:db8:0:1::1")
    assert network_of("") == "" and network_of("testclient") == "testclient"


def test_no_token_is_read_from_an_address_or_printed_in_one(plain: Clients):
    reply = plain.stranger().get("/?token=once")
    assert reply.status_code == 401 and "not read" in reply.text and "set-cookie" not in reply.headers
    assert plain.logged_in("once").get("/api/me").status_code == 200, "it was not used up either"
    link = plain.owner.post("/api/raters", json={"name": "ann"}).json()["link"]
    assert link.startswith(f"{ADDRESS}/#token=")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"token": 3}', b'{"token": null}', b"[" * 4000, b"x" * 5000, b"\xff"]
)
def test_a_login_that_makes_no_sense_is_refused(plain: Clients, body):
    reply = plain.stranger().post("/api/login", content=body)
    assert reply.status_code in (413, 422) and "set-cookie" not in reply.headers


def test_a_login_from_another_page_is_refused(plain: Clients):
    headers = {"origin": "http://evil.example"}
    assert plain.stranger().post("/api/login", json={"token": "once"}, headers=headers).status_code == 403


def test_a_token_on_the_command_line_is_refused_with_the_repair(capsys):
    assert main(["studio", "--port", "0", "--token", "secret-token-of-mine"]) == 2
    error = capsys.readouterr().err
    assert "--token-file" in error and "TETHER_STUDIO_TOKEN" in error and "secret-token-of-mine" not in error
    options = argparse.Namespace(token="secret-token-of-mine", token_file=None, host="127.0.0.1")
    with pytest.raises(ConfigError, match="TETHER_SERVE_TOKEN"):
        find_token(options)


def test_the_token_is_in_no_process_list_and_no_child(tmp_path):
    with LiveServer(tmp_path / "runs") as server:
        own = Path(f"/proc/{server.process.pid}")
        if not own.is_dir():
            pytest.skip("there is no /proc here")
        assert server.told["token"].encode() not in (own / "cmdline").read_bytes()
    code = (
        "import argparse, os; from tether.studio.settings import chosen_token;"
        "options = argparse.Namespace(token=None, token_file=None);"
        "print(chosen_token(options, 'TETHER_STUDIO_TOKEN'), os.environ.get('TETHER_STUDIO_TOKEN'))"
    )
    made = {"TETHER_STUDIO_TOKEN": "a-token-of-the-tests", "PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path)}
    told = subprocess.run([sys.executable, "-c", code], env=made, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["a-token-of-the-tests", "None"]


def test_a_token_file_that_others_can_read_is_told(tmp_path, capsys):
    path = tmp_path / "token"
    path.write_text("a-token-of-the-tests\n")
    for mode, told in ((0o644, "chmod 600"), (0o600, "")):
        path.chmod(mode)
        options = argparse.Namespace(token=None, token_file=str(path))
        assert chosen_token(options, "NO_SUCH_VARIABLE") == "a-token-of-the-tests"
        assert told in capsys.readouterr().err


# -- the database is not waited for -----------------------------------------------------------------------------------


def test_a_lookup_that_hangs_holds_no_one_up(plain: Clients, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr("tether.studio.people.LOOKUP_SECONDS", 60.0)
    auth = plain.app.state.studio.auth
    auth._find_rater_by_hash = lambda _: released.wait(20) and None
    stranger = plain.with_token("w" * 43)
    with TestClient(plain.app, base_url=ADDRESS) as client:
        waiting = threading.Thread(target=lambda: stranger.get("/api/me"))
        waiting.start()
        headers = {"authorization": f"Bearer {TOKEN}"}
        assert client.get("/api/me", headers=headers).status_code == 200 and client.get("/").status_code == 401
        assert waiting.is_alive(), "the stranger still waits"
        monkeypatch.setattr("tether.studio.people.LOOKUP_SECONDS", 0.5)
        late = client.get("/api/me", headers={"authorization": "Bearer " + "v" * 43})
        assert late.status_code == 503 and late.headers["retry-after"] == "2"
        assert client.post("/api/login", json={"token": "u" * 43}).status_code == 503
        released.set()
        waiting.join()


def test_strangers_learn_nothing_of_the_database(plain: Clients):
    def away(_):
        raise StorageError("the store postgresql://user@db.internal cannot be read")

    plain.app.state.studio.auth._find_rater_by_hash = away
    reply = plain.with_token("w" * 43).get("/api/runs")
    assert reply.status_code == 503 and "store" not in reply.text and "internal" not in reply.text
    assert plain.with_token("short").get("/api/runs").status_code == 401, "no one's token looks like this"


def test_a_revocation_elsewhere_is_noticed(monkeypatch):
    """Several servers may share a database; the person is looked up again after some seconds, beside the requests."""
    monkeypatch.setattr("tether.studio.people.KNOWN_SECONDS", 0.0)
    there = {"ann": Person(7, "ann", "annotator")}
    token = "a" * 43
    made = {"owner_token": "t" * 20, "login_code": None, "token_logs_in": False}
    auth = Auth(Person(1, "owner", "owner"), **made, find_rater=lambda _: there.get("ann"))

    async def visit() -> None:
        secret = await auth.log_in(token)
        entry = auth.by_session(secret)
        assert entry is not None and entry.person.name == "ann" and await auth.by_token(token)
        there.clear()
        for _ in range(100):
            if auth.by_session(secret) is None:
                break
            await asyncio.sleep(0.02)
        assert auth.by_session(secret) is None and not auth.holds(entry) and await auth.by_token(token) is None

    asyncio.run(visit())
    auth.close()


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_an_annotator_evicts_no_session_but_their_own(plain: Clients):
    owner = plain.logged_in("once")
    token = plain.owner.post("/api/raters", json={"name": "ann"}).json()["token"]
    first = plain.logged_in(token)
    for _ in range(2200):
        asyncio.run(plain.app.state.studio.auth.log_in(token))
    assert owner.get("/api/me").json()["role"] == "owner"
    assert first.get("/api/me").status_code == 401, "their own oldest goes"
    told = plain.owner.get("/api/sessions").json()["sessions"]
    assert sum(one["name"] == "ann" for one in told) == MAX_PER_PERSON and len(told) == MAX_PER_PERSON + 1


def test_sessions_are_listed_and_ended(clients: Clients):
    browser, other = clients.logged_in("once"), clients.annotator(name="bob")
    assert other.get("/api/sessions").status_code == 403
    token = clients.owner.post("/api/raters", json={"name": "ann"}).json()["token"]
    ann = clients.logged_in(token)
    told = {one["name"]: one for one in browser.get("/api/sessions").json()["sessions"]}
    assert told["owner"]["this"] and not told["ann"]["this"] and abs(told["ann"]["seen"] - time.time()) < 60
    assert token not in str(told) and "testclient" in told["ann"]["browser"]
    ended = browser.post(f"/api/sessions/{told['ann']['id']}/end", headers={"origin": ADDRESS})
    assert ended.status_code == 200 and ann.get("/api/me").status_code == 401
    assert clients.owner.post("/api/sessions/0123456789abcdef/end").status_code == 404
    assert browser.post("/api/logout", headers={"origin": ADDRESS}).json() == {"ended": True}
    assert browser.get("/api/me").status_code == 401
    assert clients.logged_in(token).get("/api/me").status_code == 200, "their link still works"


def test_a_rater_is_revoked_and_invited_again(clients: Clients):
    made = clients.owner.post("/api/raters", json={"name": "ann"}).json()
    ann, script = clients.logged_in(made["token"]), clients.with_token(made["token"])
    assert ann.get("/api/me").status_code == script.get("/api/me").status_code == 200
    assert clients.owner.post(f"/api/raters/{made['id']}/revoke").json() == {"id": made["id"], "sessions": 1}
    assert ann.get("/api/me").status_code == script.get("/api/me").status_code == 401
    assert clients.stranger().post("/api/login", json={"token": made["token"]}).status_code == 401
    [listed] = [one for one in clients.owner.get("/api/raters").json()["raters"] if one["id"] == made["id"]]
    assert listed["revoked"] and not listed["enters"]
    again = clients.owner.post(f"/api/raters/{made['id']}/link").json()
    assert again["link"].endswith(f"#token={again['token']}")
    back = clients.with_token(again["token"]).get("/api/me")
    assert back.json()["name"] == "ann" and clients.with_token(made["token"]).get("/api/me").status_code == 401
    owner = next(one["id"] for one in clients.owner.get("/api/raters").json()["raters"] if one["role"] == "owner")
    assert clients.owner.post(f"/api/raters/{owner}/revoke").status_code == 409
    assert clients.owner.post("/api/raters/999/revoke").status_code == 404
    assert clients.annotator().post(f"/api/raters/{made['id']}/revoke").status_code == 403


def test_an_owner_who_was_invited_and_revoked_is_no_other_owner(clients: Clients):
    first = clients.owner.get("/api/raters").json()["raters"]
    made = clients.owner.post("/api/raters", json={"name": "second", "role": "owner"}).json()
    assert clients.with_token(made["token"]).get("/api/runs").status_code == 200
    clients.owner.post(f"/api/raters/{made['id']}/revoke")
    studio = clients.app.state.studio
    assert studio.labels.owner().id == first[0]["id"] and clients.with_token(made["token"]).get("/").status_code == 401


# -- a public address -------------------------------------------------------------------------------------------------

PUBLIC = "https://studio.example.org"


def test_behind_a_proxy_the_public_address_is_ours_and_its_cookie_secure(tmp_path):
    clients = clients_with(tmp_path, public_url=PUBLIC)
    for host in ("studio.example.org", "127.0.0.1:8420"):
        for origin, status in ((PUBLIC, 200), ("http://studio.example.org", 403), ("https://evil.example", 403)):
            headers = {"host": host, "origin": origin}
            reply = clients.owner.post("/api/raters", json={"name": "ann"}, headers=headers)
            assert reply.status_code == status, (host, origin)
            assert status != 200 or reply.json()["link"].startswith(f"{PUBLIC}/#token=")
    headers = {"host": "studio.example.org", "origin": PUBLIC}
    reply = clients.stranger().post("/api/login", json={"token": "once"}, headers=headers)
    cookie = reply.headers["set-cookie"]
    assert cookie.startswith("__Host-tether_studio_8420=") and "Secure" in cookie and "Domain" not in cookie
    secret = cookie.partition("=")[2].partition(";")[0]
    for name, status in (("__Host-tether_studio_8420", 200), ("tether_studio_8420", 401)):
        headers = {"host": "studio.example.org", "cookie": f"{name}={secret}"}
        assert clients.stranger().get("/api/me", headers=headers).status_code == status
    assert clients.owner.get("/api/me", headers={"host": "evil.example"}).status_code == 403


def test_the_wish_for_a_proxy_is_checked(capsys):
    for words, said in {
        ("--public-url", "studio.example.org"): "--public-url",
        ("--public-url", "https://studio.example.org/sub"): "has a path",
        ("--public-url", "ftp://x"): "--public-url",
        ("--public-url", "https://user@x"): "--public-url",
        ("--public-url", "https://x:99999"): "--public-url",
        ("--trusted-proxies", "proxy.local"): "not an address or network",
        ("--trusted-proxies", "10.0.0.0/99"): "not an address or network",
    }.items():
        assert main(["studio", "--port", "0", *words]) == 2
        assert said in capsys.readouterr().err


def test_the_names_of_this_machine_are_looked_up_once(monkeypatch):
    asked = []
    monkeypatch.setattr("socket.getfqdn", lambda: asked.append(1) or "this.lab")
    public = replace(settings(), host="0.0.0.0")
    assert all(not public.allows_host(f"evil-{n}.example") for n in range(5)) and public.allows_host("this.lab")
    assert len(asked) == 1


def test_a_database_that_is_away_at_the_start_is_told_in_a_sentence(tmp_path, monkeypatch, capsys):
    pytest.importorskip("psycopg", reason="PostgreSQL is not tested: the package psycopg is not installed")
    monkeypatch.setenv("TETHER_STORE", f"postgresql://nobody@/x?host={tmp_path}")
    assert main(["studio", "--port", "0", "--workspace", str(tmp_path / "runs")]) == 6
    error = capsys.readouterr().err
    assert "cannot be opened" in error and "bug" not in error and "Traceback" not in error
