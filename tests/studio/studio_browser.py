"""What tests of Studio's pages share: a workspace made of numbers, a server over it, and a browser.

Tests that drive the browser are skipped, aloud, where Chromium or playwright is not installed.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tether.store.database.open import Workspace, workspace_at
from tether.store.database.records import RecordSource
from tether.store.recorded import StoredRollout, TopLogprobs
from tether.store.recorder import RunRecorder, RunStart

playwright_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright drives the browser: pip install playwright"
)
expect = playwright_api.expect
expect.set_options(timeout=20_000)  # milliseconds: other tests run beside it
uvicorn = pytest.importorskip("uvicorn", reason="the server needs uvicorn")

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OWNER_TOKEN = "owner-token-of-the-tests"


def a_rollout(step: int, row: int, prompt: str, answer: Sequence[str], score: float, **changes: Any) -> StoredRollout:
    """A rollout whose prompt is one token and whose answer is these pieces; every number follows from its place."""
    length = 1 + len(answer)
    place = np.arange(length, dtype="float32")
    response = np.arange(length) > 0
    columns = {
        "token": place.astype("int32"),
        "response": response,
        "behavior_logprob": -place / 10,
        "untruncated_logprob": -place / 10,
        "old_logprob": -place / 10,
        "ref_logprob": -place / 5,
        "value": place / 100,
        "reward": np.where(place == length - 1, np.float32(score), np.float32(0)),
        "advantage": np.where(place % 2 == 0, place, -place).astype("float32") / length,
        "return": place / 50,
        "ratio": 1 + place / length,
        "clipped": response & (np.arange(length) % 4 == 3),
        "entropy": np.where(response, place % 5, 0).astype("float32") / 2,
    }
    others = TopLogprobs(
        counts=np.where(response, 2, 0).astype(np.uint8),
        tokens=np.tile(np.int32([1, 2]), len(answer)),
        logprobs=np.tile(np.float16([-1.0, -3.0]), len(answer)),
        texts={1: " yes", 2: "\n"},
    )
    made = {
        "prompt_id": prompt,
        "group_id": row,
        "sample_id": 0,
        "finish": "stop",
        "temperature": 1.0,
        "parts": {"rule": score},
        "top_logprobs": others,
    }
    pieces = [prompt, *answer]
    texts = {"prompt_text": prompt, "completion": "".join(answer), "pieces": pieces}
    return StoredRollout(step=step, row=row, score=score, columns=columns, **(made | texts | changes))


def start_run(
    workspace: Workspace,
    name: str,
    *,
    steps: int,
    sources: Sequence[RecordSource] = (),
    method: str = "ppo",
    config: dict[str, Any] | None = None,
) -> RunRecorder:
    """A run that is being recorded."""
    config = config or {"method": method, "model": {"path": "tiny-bytes"}, "run": {"seed": 7}}
    return RunRecorder(workspace, workspace.folder(name), RunStart(method, steps, config, {"python": "3"}, sources))


def record_steps(recorder: RunRecorder, steps: Sequence[int], *, score: float = 0.01) -> None:
    """Steps with a rising score, and three answers each to the same three prompts."""
    for step in steps:
        words = ["up", "down", "side\n"]
        rows = [
            a_rollout(step, row, f"say {word.strip()}:", [*f"{word}{step}"], score * step + row)
            for row, word in enumerate(words)
        ]
        metrics = {
            "score": score * step,
            "kl_ref_k3": 0.1 * step,
            "entropy": 2.0 - score * step,
            "logprob_diff": 0.0,
            "loss": -0.1,
        }
        recorder.record(step, metrics, rows)


def small_workspace(root: Path) -> Workspace:
    """A supervised run, and two policies that were made from it."""
    workspace = workspace_at(root / "runs", None)
    sft = start_run(workspace, "sft", steps=5, sources=[RecordSource("model", "tiny-bytes")], method="sft")
    for step in range(5):
        sft.record(step, {"loss": 3.0 - 0.5 * step})
    sft.close("done")
    for name, score in (("first", 0.01), ("second", 0.02)):
        recorder = start_run(workspace, name, steps=30, sources=[RecordSource("model", "runs/sft/model", run="sft")])
        record_steps(recorder, range(30), score=score)
        recorder.event("checkpoint", "step 29 is kept", step=29)
        recorder.close("done")
    return workspace


@dataclass
class Served:
    """A server over a workspace, and what pages did that they must not do."""

    workspace: Workspace
    address: str
    faults: list[str] = field(default_factory=list)

    def api(self, method: str, path: str, **options: Any) -> Any:
        """Ask the server as its owner."""
        import httpx

        headers = {"Authorization": f"Bearer {OWNER_TOKEN}"}
        answer = httpx.request(method, f"{self.address}/api/{path}", headers=headers, timeout=180, **options)
        answer.raise_for_status()
        return answer.json()

    def run_id(self, name: str) -> int:
        return next(run["id"] for run in self.api("GET", "runs")["runs"] if run["name"] == name)


@contextmanager
def serving(workspace: Workspace) -> Iterator[Served]:
    """The real server, in a thread of its own, on a free port."""
    from tether.server.serve import listen
    from tether.studio.app import create_app
    from tether.studio.settings import Rate, StudioSettings

    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    often = Rate(1000.0, 10_000)  # the visitors of a file follow each other faster than people do
    rates = {"session_rate": often, "stranger_rate": often}
    app = create_app(workspace, StudioSettings(port=port, owner_token=OWNER_TOKEN, token_logs_in=True, **rates))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        yield Served(workspace, f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        thread.join(10)


@contextmanager
def a_browser() -> Iterator[Any]:
    """Chromium without a window."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """Someone with a page open. Script errors, refused scripts and requests to elsewhere are noted as faults."""

    def __init__(self, browser: Any, served: Served, token: str = OWNER_TOKEN, **context: Any) -> None:
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 860}} | context))
        self.page = self.context.new_page()
        self.served = served
        self.faults: list[str] = []
        self.entering = True
        self.page.on("pageerror", lambda error: self.faults.append(f"script error: {error}"))
        self.page.on("dialog", self._refuse)
        self.page.on("console", self._hear)
        self.page.on("request", self._watch)
        self.page.goto(f"{served.address}/#token={token}")
        self.page.wait_for_selector("#page")
        self.entering = False

    def _refuse(self, dialog: Any) -> None:
        self.faults.append(f"a dialog opened: {dialog.message}")
        dialog.dismiss()

    def _hear(self, message: Any) -> None:
        asked_for_token = self.entering and "401" in message.text
        if message.type == "error" and not asked_for_token:
            self.faults.append(f"console: {message.text}")

    def _watch(self, request: Any) -> None:
        if not request.url.startswith((self.served.address, "blob:", "data:")):
            self.faults.append(f"asked elsewhere: {request.url}")

    def go(self, address: str) -> Any:
        """Open a page of Studio, such as `#/runs`, and wait until it is drawn."""
        self.page.goto(f"{self.served.address}/{address}")
        self.page.wait_for_selector(f"#page[data-ready='{address}']")
        return self.page

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def close(self) -> None:
        self.context.close()
