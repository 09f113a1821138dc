"""A small recorded run, and clients of a Studio: its owner, its annotators, and strangers."""

import sys
from pathlib import Path

from starlette.testclient import TestClient

sys.path.append(str(Path(__file__).parents[1] / "store"))  # recording.py

from recording import Recording, synthetic

from tether.studio.settings import Rate, StudioSettings

TOKEN = "owner-token-of-the-tests"
ADDRESS = "http://127.0.0.1:8420"
PLENTY = Rate(1e6, 10**6)


def settings(**changes) -> StudioSettings:
    given = {"owner_token": TOKEN, "login_code": "once", "session_rate": PLENTY, "stranger_rate": PLENTY}
    return StudioSettings(**(given | changes))


def record_run(root: Path, url: str | None = None, name: str = "demo/ppo", steps: int = 6, **texts) -> None:
    """A run of which every step kept two answers; its score rises by a tenth a step."""
    recording = Recording(root, url, name=name, steps=steps, method=texts.get("method", "ppo"))
    recording.recorder.event("started", texts.get("event", "from the beginning"))
    for step in range(steps):
        rows = [synthetic(step, row, completion=texts.get("completion", f"answer {step} {row}")) for row in range(2)]
        metrics = {"score": step / 10, "kl_ref_k3": 0.5, "entropy": float("nan") if step == 3 else 2.0}
        recording.recorder.record(step, metrics, rows)
    recording.recorder.close("done")


class Clients:
    """People at the doors of one server."""

    def __init__(self, app) -> None:
        self.app = app
        self.owner = self.with_token(TOKEN)

    def stranger(self) -> TestClient:
        return TestClient(self.app, base_url=ADDRESS, raise_server_exceptions=False, follow_redirects=False)

    def logged_in(self, token: str) -> TestClient:
        """A browser with a session."""
        client = self.stranger()
        reply = client.post("/api/login", json={"token": token}, headers={"origin": ADDRESS})
        assert reply.status_code == 200, reply.text
        return client

    def with_token(self, token: str) -> TestClient:
        client = self.stranger()
        client.headers["authorization"] = f"Bearer {token}"
        return client

    def annotator(self, queue_id: int | None = None, name: str = "ann") -> TestClient:
        body = {"name": name, "role": "annotator", "queue_id": queue_id}
        return self.with_token(self.owner.post("/api/raters", json=body).json()["token"])

    def queue(self, kind: str = "pair", records=None, repeats: float = 0.0, name: str = "which is better") -> int:
        """A queue with records in it."""
        queue = self.owner.post("/api/label/queues", json={"name": name, "kind": kind}).json()["id"]
        if records:
            body = {"from": "file", "records": records, "repeats": repeats}
            reply = self.owner.post(f"/api/label/queues/{queue}/fill", json=body)
            assert reply.status_code == 200, reply.text
        return queue


def pairs(count: int) -> list[dict]:
    return [{"prompt": f"q{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(count)]
