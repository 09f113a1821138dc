"""Talking to a run's model: an answer at once or token by token, the same either way, and stopped when told to."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from live_server import messages
from studio_browser import Served, Visitor, expect, record_steps, serving, start_run
from studio_clients import ADDRESS, TOKEN, Clients, settings

from tether.models.load import load_causal_lm
from tether.models.save import save_model
from tether.protocols import Sampling
from tether.store.database.open import Workspace, workspace_at
from tether.studio.app import create_app
from tether.studio.chat_routes import Token, as_prompt, growing_text, stream_answer
from tether.studio.model_host import AT_ONCE, ModelAnswer

QUESTION = {"run": 1, "messages": [{"role": "user", "content": "4 lower:"}], "temperature": 1.0, "seed": 3}


def a_talker(root: Path) -> Workspace:
    """A workspace with a run whose model is random."""
    workspace = workspace_at(root / "runs", None)
    recorder = start_run(workspace, "talker", steps=2)
    record_steps(recorder, range(2))
    recorder.close("done")
    loaded = load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0)
    save_model(loaded.model, loaded.tokenizer, workspace.folder("talker") / "model")
    return workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return a_talker(tmp_path_factory.mktemp("studio"))


@pytest.fixture(scope="module")
def served(workspace: Workspace) -> Iterator[Served]:
    with serving(workspace) as found:
        yield found


@pytest.fixture
def talking(workspace: Workspace) -> Clients:
    return Clients(create_app(workspace, settings()))


def streamed(client, **changes) -> list[tuple[str, dict]]:
    with client.stream("POST", "/api/chat", json=QUESTION | {"stream": True} | changes) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        return [(kind, data) for kind, data, _ in messages(reply)]


@pytest.mark.parametrize("seed", range(5))
def test_token_by_token_it_is_the_same_answer(talking: Clients, seed):
    whole = talking.owner.post("/api/chat", json=QUESTION | {"max_new_tokens": 24, "seed": seed}).json()
    *tokens, (last, end) = streamed(talking.owner, max_new_tokens=24, seed=seed)
    assert {kind for kind, _ in tokens} == {"token"} and last == "done"
    assert "".join(data["text"] for _, data in tokens) == whole["text"]
    assert end == {"finish": whole["finish"], "tokens": whole["tokens"]}


def test_what_cannot_be_answered_is_the_last_thing_said(talking: Clients):
    long = [{"role": "user", "content": "x" * 5000}]
    [(kind, data)] = streamed(talking.owner, messages=long)
    assert kind == "error" and "context" in data["error"]
    assert talking.owner.post("/api/chat", json=QUESTION | {"run": 99, "stream": True}).status_code == 404


def test_answers_are_written_side_by_side():
    loaded = load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0)
    turn, sampling = threading.Lock(), Sampling(8, 1.0)
    prompt = as_prompt([{"role": "user", "content": "a"}], "p")
    first, second = (stream_answer(loaded, prompt, sampling, seed, turn) for seed in (0, 1))
    next(first)
    assert not turn.locked(), "whoever reads no further keeps no one waiting"
    assert len(list(second)) >= 1 and len(list(first)) >= 0


@given(st.text(max_size=30), st.lists(st.integers(1, 4), max_size=60))
def test_pieces_of_characters_are_held_back_until_they_are_whole(text, cuts):
    """Tokens are arbitrary cuts of the bytes, decoded as byte-level tokenizers do."""
    data, pieces = text.encode("utf-8", "replace"), []
    for cut in cuts:
        data, pieces = data[cut:], [*pieces, data[:cut]]
    pieces = [piece for piece in [*pieces, data] if piece]
    add = growing_text(lambda tokens: b"".join(pieces[token] for token in tokens).decode("utf-8", "replace"))
    told = [add(token, token + 1 == len(pieces)) for token in range(len(pieces))]
    assert "".join(told) == b"".join(pieces).decode("utf-8", "replace")


# -- many at once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_many_long_questions_leave_threads_to_other_routes(workspace: Workspace, monkeypatch, stream: bool):
    app = create_app(workspace, settings(max_streams=100))
    inside, go_on = threading.Semaphore(0), threading.Event()

    def waits(*given, **named):
        inside.release()
        assert go_on.wait(120)
        return [ModelAnswer("a", "stop", 1)]

    def waits_and_streams(*given, **named):
        yield Token("a", waits()[0].finish)

    monkeypatch.setattr(app.state.studio.models, "answer", waits)
    monkeypatch.setattr(app.state.studio.models, "stream", waits_and_streams)

    async def ask_all() -> list[int]:
        transport, known = httpx.ASGITransport(app), {"authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(transport=transport, base_url=ADDRESS, headers=known, timeout=None) as client:
            asked = [
                asyncio.create_task(client.post("/api/chat", json=QUESTION | {"stream": stream})) for _ in range(50)
            ]
            for _ in range(AT_ONCE):
                await asyncio.to_thread(inside.acquire)
            try:
                other = await asyncio.wait_for(client.get("/api/runs"), 60)
                waiting = not inside.acquire(blocking=False) and not any(task.done() for task in asked)
            finally:
                go_on.set()
            assert waiting, "the others wait without a thread"
            return [other.status_code, *(reply.status_code for reply in await asyncio.gather(*asked))]

    assert asyncio.run(ask_all()) == [200] * 51


# -- in the browser ------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_model(monkeypatch) -> list[float]:
    """Each token takes a while; when each was made."""
    import tether.rollout.token_stream as token_stream

    made: list[float] = []
    quick = token_stream.draw
    [letter] = load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0).tokenizer.encode("a")

    def slow(*given):
        time.sleep(0.05)
        made.append(time.monotonic())
        drawn = quick(*given)
        return drawn._replace(tokens=torch.full_like(drawn.tokens, letter))  # never the end

    monkeypatch.setattr(token_stream, "draw", slow)
    return made


def test_an_answer_grows_and_escape_stops_it(visitor: Visitor, served: Served, slow_model):
    page = visitor.go("#/chat")
    page.get_by_label("Longest answer").fill("200")
    page.get_by_label("Message").focus()
    page.keyboard.type("say")
    visitor.press("Enter")
    heard = page.locator(".heard .text")
    expect(heard).to_have_text(re.compile("^[^…]+$"), timeout=30_000)
    early = len(heard.text_content() or "")
    expect(heard).to_have_text(re.compile(f"^.{{{early + 3},}}$"))
    visitor.press("Escape")
    expect(page.locator(".heard small")).to_have_text("talker, stopped")
    expect(page.get_by_label("Message")).to_be_focused()
    time.sleep(0.5)
    stopped_at = len(slow_model)
    time.sleep(0.5)
    assert len(slow_model) == stopped_at < 200, "the model has stopped too"
    page.keyboard.type("again")
    visitor.press("Enter")
    expect(page.locator(".heard .text").nth(1)).to_contain_text("a", timeout=30_000)
    visitor.press("Escape")
