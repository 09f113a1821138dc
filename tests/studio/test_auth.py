"""The gate: nobody enters without a token, from elsewhere, or beyond their role, whatever the route and method."""

import re
from dataclasses import replace

import pytest
from studio_clients import ADDRESS, TOKEN, Clients, settings

from tether.errors import ConfigError
from tether.rate_limit import RateLimit
from tether.server.serve import settings_for
from tether.store.database.open import workspace_at
from tether.studio.app import StaticFiles, create_app
from tether.studio.auth import POLICY
from tether.studio.settings import Rate

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FROB")
UNSAFE = tuple(method for method in METHODS if method not in ("GET", "HEAD"))


def addresses(app) -> list[str]:
    """Every route, its parameters filled in, and some that do not exist."""
    routes = [*app.openapi()["paths"], "/api/openapi.json", "/", "/index.html", "/js/main.js", "/api", "/api/nothing"]
    return [re.sub(r"{[a-z_]+}", "1", path) for path in routes]


def test_the_list_of_routes_is_not_empty(plain: Clients):
    assert len(addresses(plain.app)) > 35


def test_every_route_and_method_without_a_token_is_401(plain: Clients):
    stranger = plain.stranger()
    for address in addresses(plain.app):
        for method in METHODS:
            reply = stranger.request(method, address)
            assert reply.status_code == 401, f"{method} {address} gave {reply.status_code}"


@pytest.mark.parametrize("word", ["", "Bearer", "Bearer wrong", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN])
def test_a_wrong_token_is_401(plain: Clients, word):
    stranger = plain.stranger()
    stranger.headers["authorization"] = word
    assert stranger.get("/api/runs").status_code == 401


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[", "evil.example:8420", "10.0.0.1"])
def test_a_foreign_host_is_403_even_with_the_token(plain: Clients, host):
    for method in METHODS:
        assert plain.owner.request(method, "/api/runs", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:8420", "LOCALHOST"])
def test_loopback_names_are_let_in_whatever_the_port(plain: Clients, host):
    assert plain.owner.get("/api/me", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1:1", "http://127.0.0.1", "http://["]
)
def test_a_foreign_origin_is_403_on_every_unsafe_method_of_every_route(plain: Clients, origin):
    for address in addresses(plain.app):
        for method in UNSAFE:
            reply = plain.owner.request(method, address, headers={"origin": origin})
            assert reply.status_code == 403, f"{method} {address} gave {reply.status_code}"


def test_the_link_works_once_and_becomes_a_cookie_that_scripts_cannot_read(plain: Clients):
    browser = plain.stranger()
    reply = browser.post("/api/login", json={"token": "once"}, headers={"origin": ADDRESS})
    assert reply.status_code == 200
    cookie = reply.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "once" not in cookie
    assert browser.get("/api/me").json()["role"] == "owner"
    for token, why in (("once", "a second use is refused"), (TOKEN, "the token for scripts is not for links")):
        assert plain.stranger().post("/api/login", json={"token": token}).status_code == 401, why


def test_a_cookie_needs_the_page_own_origin_to_change_anything(plain: Clients):
    browser = plain.logged_in("once")
    body = {"name": "q", "kind": "pair"}
    assert browser.post("/api/label/queues", json=body).status_code == 403, "no Origin at all"
    assert browser.post("/api/label/queues", json=body, headers={"origin": ADDRESS}).status_code == 200
    other = {"origin": ADDRESS, "authorization": "Bearer wrong"}
    assert browser.get("/api/me", headers=other).status_code == 401, "a token that is sent counts, not the cookie"


def test_every_answer_has_the_security_headers(plain: Clients):
    for client in (plain.owner, plain.stranger()):
        for address in ("/api/runs", "/", "/api/nothing", "/js/nothing.js"):
            headers = client.get(address).headers
            assert headers["content-security-policy"] == POLICY and headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cache-control"] == "no-store" or not address.startswith("/api")
    assert "unsafe" not in POLICY and "http" not in POLICY


ANNOTATORS_OWN = {
    *(("GET", "/api/me"), ("GET", "/api/label/queues"), ("GET", "/api/label/queues/1/next")),
    *(("POST", "/api/label/votes"), ("POST", "/api/label/votes/undo"), ("POST", "/api/logout")),
    *(("GET", "/"), ("GET", "/1"), ("GET", "/index.html"), ("GET", "/js/main.js")),  # the page, which tells nothing
}
"""All that an annotator may ask for, written out: a route that is added is refused until it is named here too."""


def every_route(app) -> set[str]:
    """Every address that the app itself knows, however it was put there and whether or not it is described."""
    found, waiting = set(), list(app.routes)
    while waiting:
        route = waiting.pop()
        inner = getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", None)
        waiting += inner or []
        if path := getattr(route, "path", None):
            found.add(re.sub(r"{[a-z_:]+}", "1", path))
    return found


def test_the_app_s_own_list_of_routes_has_all_that_are_described(plain: Clients):
    described = {re.sub(r"{[a-z_]+}", "1", path) for path in plain.app.openapi()["paths"]}
    assert described <= every_route(plain.app)
    for part in ("chat", "arena", "train", "runs", "raters", "jobs", "stream"):
        assert f"/api/{part}" in every_route(plain.app)


def test_an_annotator_reaches_nothing_but_what_is_listed(plain: Clients):
    queue = plain.queue(records=[{"prompt": "p", "chosen": "a", "rejected": "b"}])
    annotator = plain.annotator(queue)
    reached = set()
    for address in {*addresses(plain.app), *every_route(plain.app)}:
        for method in METHODS:
            status = annotator.request(method, address).status_code
            if status != 403:
                reached.add(("GET" if method == "HEAD" else method, address))
    assert reached == ANNOTATORS_OWN


def test_a_route_that_is_added_is_refused_to_annotators_and_strangers(plain: Clients):
    plain.app.add_api_route("/api/label/secrets", lambda: {"secret": 1}, methods=["GET", "POST"])
    annotator = plain.annotator()
    for method in ("GET", "POST"):
        assert annotator.request(method, "/api/label/secrets").status_code == 403
        assert plain.stranger().request(method, "/api/label/secrets").status_code == 401


def test_an_annotator_sees_only_their_own_queue_and_no_names_of_models(plain: Clients):
    record = {"prompt": "p", "chosen": "a", "rejected": "b"}
    mine, other = plain.queue(records=[record]), plain.queue(records=[record])
    annotator = plain.annotator(mine)
    assert [queue["id"] for queue in annotator.get("/api/label/queues").json()["queues"]] == [mine]
    assert annotator.get(f"/api/label/queues/{other}/next").status_code == 404
    theirs = plain.owner.get(f"/api/label/queues/{other}/next").json()["item"]
    vote = {"client_uid": "x", "item_id": theirs["id"], "order": theirs["order"], "choice": "left"}
    assert annotator.post("/api/label/votes", json=vote).status_code == 404
    shown = annotator.get(f"/api/label/queues/{mine}/next").text
    assert "source" not in shown and "demo/ppo" not in shown
    assert annotator.get("/api/me").json()["workspace"] is None


def test_a_closed_queue_is_gone_for_annotators(plain: Clients):
    queue = plain.queue(records=[{"prompt": "p", "chosen": "a", "rejected": "b"}])
    annotator = plain.annotator()
    assert annotator.get(f"/api/label/queues/{queue}/next").status_code == 200
    plain.owner.post(f"/api/label/queues/{queue}", json={"open": False})
    assert annotator.get(f"/api/label/queues/{queue}/next").status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        *("/../app.py", "/..%2fapp.py", "/%2e%2e/%2e%2e/cli.py", "/js/../../app.py", "//etc/passwd", "/etc/passwd"),
        *("/..\\app.py", "/%00", "/static/../app.py", "/js/%2e%2e%2f%2e%2e%2fapp.py", "/C:/windows", "/js", "/~"),
    ],
)
def test_no_path_leads_out_of_the_static_files(plain: Clients, path):
    reply = plain.owner.get(path)
    assert reply.status_code == 404 and "error" in reply.json()
    assert StaticFiles().find(path) is None, "as it stands, before any client tidied it"


def test_a_link_among_the_static_files_is_not_followed(tmp_path):
    (tmp_path / "static").mkdir()
    (tmp_path / "secret").write_text("s")
    (tmp_path / "static" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "static" / "file").write_text("f")
    files = StaticFiles(tmp_path / "static")
    assert files.find("link") is None and files.find("file") is not None and files.find("../secret") is None


def test_too_many_requests_are_429_with_the_time_to_wait(tmp_path):
    app = create_app(workspace_at(tmp_path), settings(session_rate=Rate(0.01, 3), stranger_rate=Rate(0.01, 2)))
    clients = Clients(app)
    assert [clients.owner.get("/api/me").status_code for _ in range(4)] == [200, 200, 200, 429]
    reply = clients.owner.get("/api/me")
    assert 1 <= int(reply.headers["retry-after"]) <= 100 and "error" in reply.json()
    assert [clients.stranger().get("/api/me").status_code for _ in range(3)] == [401, 401, 429]


def test_a_bucket_fills_with_time():
    now = [0.0]
    buckets = RateLimit(Rate(2.0, 3), clock=lambda: now[0])
    assert [buckets.take("a") for _ in range(4)] == [0, 0, 0, 1]
    assert buckets.take("b") == 0, "each has their own"
    now[0] = 0.5
    assert [buckets.take("a"), buckets.take("a")] == [0, 1]
    now[0] = 100.0
    assert [buckets.take("a") for _ in range(4)] == [0, 0, 0, 1], "it holds no more than its burst"


def test_a_body_that_is_too_long_is_refused(plain: Clients, monkeypatch):
    monkeypatch.setattr("tether.studio.auth.MAX_BYTES", 1000)
    assert plain.owner.post("/api/raters", content=b"x" * 2000).status_code == 413
    chunks = (b"x" * 100 for _ in range(30))  # says no length
    assert plain.owner.post("/api/raters", content=chunks).status_code >= 400


class Options:
    host, port, token, token_file, public_url, trusted_proxies = "127.0.0.1", 0, None, None, None, None


def test_another_bind_needs_a_token_of_ones_own(tmp_path, monkeypatch):
    options = Options()
    assert settings_for(options, 1).is_private and not settings_for(options, 1).token_logs_in
    options.host = "0.0.0.0"
    with pytest.raises(ConfigError, match="TETHER_STUDIO_TOKEN"):
        settings_for(options, 1)
    monkeypatch.setenv("TETHER_STUDIO_TOKEN", "short")
    with pytest.raises(ConfigError, match="16 plain characters"):
        settings_for(options, 1)
    (tmp_path / "token").write_text("long-enough-to-be-a-token\n")
    options.token_file = str(tmp_path / "token")
    public = settings_for(options, 1)
    assert not public.is_private and public.token_logs_in
    assert public.allows_host("192.168.0.7") and not public.allows_host("evil.example")
    named = replace(public, host="studio.lab")
    assert named.allows_host("studio.lab") and not named.allows_host("evil.example")
