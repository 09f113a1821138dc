"""The layer before `tether serve`, without a model behind it."""

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from tether.rate_limit import Rate
from tether.server.app import TokenGate
from tether.studio.settings import StudioSettings, trusted_networks

TOKEN = "a-token-of-the-tests-1234"
RIGHT = {"authorization": f"Bearer {TOKEN}"}


def client(**changes) -> TestClient:
    settings = StudioSettings(owner_token=TOKEN, stranger_rate=Rate(0.001, 3), **changes)
    return TestClient(TokenGate(PlainTextResponse("in"), settings), base_url="http://127.0.0.1:8422")


def wrong(number: int) -> dict[str, str]:
    return {"authorization": f"Bearer guess-{number}", "x-forwarded-for": f"10.0.0.{number}"}


def test_under_429_a_right_token_looks_like_a_wrong_one():
    asked = client()
    assert {asked.get("/v1/models", headers=RIGHT).text for _ in range(9)} == {"in"}, "right tokens take nothing away"
    assert [asked.get("/v1/models").status_code for _ in range(5)] == [401] * 5, "no token is no guess"
    assert [asked.get("/v1/models", headers=wrong(n)).status_code for n in range(4)] == [401, 401, 401, 429]
    right, guess = asked.get("/v1/models", headers=RIGHT), asked.get("/v1/models", headers=wrong(9))
    assert right.status_code == 429 and right.json() == guess.json() and right.headers == guess.headers
    assert asked.get("/health").text == "in"


@pytest.mark.parametrize("host", ["models.example.org", "models.example.org:8443"])
def test_a_public_address_is_ours(host):
    headers = RIGHT | {"host": host}
    assert client().get("/v1/models", headers=headers).status_code == 403
    public = client(public_url="https://models.example.org", trusted_proxies=trusted_networks("127.0.0.1"))
    assert public.get("/v1/models", headers=headers).text == "in"
    assert public.get("/v1/models", headers=RIGHT | {"host": "evil.example"}).status_code == 403
