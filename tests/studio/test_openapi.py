"""Requests made from the OpenAPI description: whatever is asked, the server answers and never fails."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from studio_clients import ADDRESS, TOKEN, Clients

from tether.studio.launcher import Launcher, RunProcess

schemathesis = pytest.importorskip("schemathesis", reason="the API is not tried with made-up requests: no schemathesis")

EXAMPLES = int(os.environ.get("TETHER_TEST_REQUESTS", "3"))  # for each operation
ENDLESS = "/api/stream"  # its own tests read it


def operations(app) -> list[tuple[str, str]]:
    found = [(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods]
    return [(method, path) for method, path in found if path != ENDLESS]


class Ended:
    """A process that ended at once, in place of a training."""

    pid = 0

    def poll(self) -> int:
        return 0


def starts_nothing(launcher: Launcher, name: str, kind: str, words: list[str]) -> RunProcess:
    return RunProcess("0", name, kind, 0.0, Path("no-log"), Ended())  # pyright: ignore[reportArgumentType]


def test_no_made_up_request_is_an_error_of_the_server(clients: Clients, monkeypatch):
    monkeypatch.setattr(Launcher, "python", starts_nothing)
    clients.queue(records=[{"prompt": "p", "chosen": "a", "rejected": "b"}])
    schema = schemathesis.openapi.from_asgi("/api/openapi.json", clients.app, headers=_headers())
    tried = 0
    for method, path in operations(clients.app):
        operation = schema[path][method]

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def ask(case):
            nonlocal tried
            tried += 1
            reply = case.call(headers=_headers(), base_url=ADDRESS)
            assert reply.status_code < 500, f"{case.method} {case.path}: {reply.text}"

        ask()
    assert tried >= 40


def _headers() -> dict[str, str]:
    return {"authorization": f"Bearer {TOKEN}", "host": "127.0.0.1:8420"}
