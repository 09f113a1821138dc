"""`tether serve` with the real `openai` client over a socket, and with plain requests that make no sense."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn

from tether.cli import main
from tether.data.chat import prompt_token_ids
from tether.models.load import load_causal_lm
from tether.protocols import Sampling
from tether.rollout.native import NativeEngine
from tether.rollout.token_stream import StopText
from tether.server.app import create_app
from tether.server.generate import STREAM_NAME, ServedModel, Turnstile
from tether.server.serve import listen
from tether.studio.settings import StudioSettings
from tether.types import Message, Prompt

TOKEN = "a-token-of-the-tests-1234"
ASKED = [{"role": "user", "content": "hello"}]


class Running:
    """The server of a tiny model in a thread."""

    def __init__(self, **limits: int) -> None:
        loaded = load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0)
        self.served = ServedModel("tiny", loaded, max_tokens=64)
        listening = listen("127.0.0.1", 0)
        settings = StudioSettings(port=listening.getsockname()[1], owner_token=TOKEN)
        self.turnstile = Turnstile(**({"running": 2, "waiting": 4} | limits))
        app = create_app(self.served, settings, self.turnstile)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{settings.port}"
        self.http = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=30)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=TOKEN, max_retries=0, timeout=30)

    def stop(self) -> None:
        self.http.close()
        self.client.close()
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture(scope="module")
def live() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()


def greedy(live: Running, tokens: int, content: str = "hello") -> str:
    """The engine's own answer."""
    prompt = Prompt("p", (Message(role="user", content=content),))
    engine = NativeEngine(live.served.loaded)
    [rollout] = engine.generate([prompt], Sampling(tokens, 0.0), samples_per_prompt=1, seed=0)
    return rollout.completion


def test_chat_says_what_the_engine_says(live: Running):
    assert [model.id for model in live.client.models.list()] == ["tiny"]
    reply = live.client.chat.completions.create(model="tiny", messages=ASKED, temperature=0, max_completion_tokens=20)
    [choice] = reply.choices
    assert choice.message.content == greedy(live, 20) and choice.message.role == "assistant"
    assert choice.finish_reason == "length" and reply.object == "chat.completion"
    asked = len(prompt_token_ids(live.served.loaded.tokenizer, Prompt("p", (Message(role="user", content="hello"),))))
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (asked, 20)


def test_a_stream_adds_up_to_the_whole(live: Running):
    given = {"model": "tiny", "messages": ASKED, "temperature": 0, "max_tokens": 20}
    whole = live.client.chat.completions.create(**given).choices[0].message.content
    chunks = list(live.client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 20
    raw = live.http.post("/v1/chat/completions", json=given | {"stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream") and raw.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_span_tokens_and_are_left_out(live: Running, stream: bool):
    text = greedy(live, 40)
    stop = text[10:14]  # each token of the tiny model is a byte
    given = {"model": "tiny", "messages": ASKED, "temperature": 0, "max_tokens": 40, "stop": ["never-said", stop]}
    reply = live.client.chat.completions.create(**given, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in reply]
        said, finish = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
    else:
        said, finish = reply.choices[0].message.content, reply.choices[0].finish_reason
    assert said == text[: text.index(stop)] and finish == "stop"


def test_text_is_held_back_only_while_it_may_be_a_stop():
    until = StopText(["abc", "bd"])
    assert [until.add(piece, is_last=False) for piece in ("xa", "b", "xb", "d")] == [
        ("x", False),
        ("", False),
        ("abx", False),
        ("", True),
    ]
    ending = StopText(["abc"])
    assert ending.add("ab", is_last=False) == ("", False) and ending.add("", is_last=True) == ("ab", False)


def test_several_answers_with_a_seed_are_the_same_again(live: Running):
    given = {"model": "tiny", "messages": ASKED, "n": 3, "seed": 7, "max_tokens": 12, "top_p": 0.9}
    first, again, other = (
        [choice.message.content for choice in live.client.chat.completions.create(**given | changed).choices]
        for changed in ({}, {}, {"seed": 8})
    )
    assert first == again and len(set(first)) == 3 and first != other
    alone = live.client.chat.completions.create(**given | {"n": 1})
    assert alone.choices[0].message.content == first[0]
    streamed = {0: "", 1: "", 2: ""}
    for chunk in live.client.chat.completions.create(**given, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == first


def test_logprobs_are_the_models(live: Running):
    reply = live.client.chat.completions.create(
        model="tiny", messages=ASKED, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = reply.choices[0].logprobs.content
    assert len(content) == 5
    for entry in content:
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-5) and entry.logprob < 0
        assert [one.logprob for one in entry.top_logprobs] == sorted(
            (o.logprob for o in entry.top_logprobs), reverse=True
        )


def test_completions_take_texts_and_ids(live: Running):
    given = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    reply = live.client.completions.create(prompt=["hello", "other"], **given, logprobs=2)
    assert [choice.index for choice in reply.choices] == [0, 1] and reply.choices[0].text == greedy(live, 8)
    assert len(reply.choices[1].logprobs.token_logprobs) == 8
    ids = live.served.loaded.tokenizer.encode("hello")
    assert live.client.completions.create(prompt=ids, **given).choices[0].text == reply.choices[0].text
    streamed = live.client.completions.create(prompt="hello", **given, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == reply.choices[0].text


def test_wrong_tokens_models_and_lengths_are_refused_by_their_kind(live: Running):
    create = live.client.chat.completions.create
    wrong = openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.chat.completions.create(model="tiny", messages=ASKED)
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="gpt-4", messages=ASKED)
    assert unknown.value.body["param"] == "model" and unknown.value.body["code"] == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        create(model="tiny", messages=ASKED, max_tokens=1000)
    assert long.value.body["code"] == "context_length_exceeded" and "256" in long.value.body["message"]
    with pytest.raises(openai.BadRequestError) as tools:
        create(model="tiny", messages=ASKED, tools=[{"type": "function", "function": {"name": "f"}}])
    assert tools.value.body["param"] == "tools"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b"[" * 100_000, None),
        (b"\xff\xfe", None),
        ({}, "model"),
        ({"model": "tiny"}, "messages"),
        ({"model": "tiny", "messages": []}, "messages"),
        ({"model": "tiny", "messages": [{"role": "king", "content": "x"}]}, "messages"),
        ({"model": "tiny", "messages": [{"role": "user", "content": ""}]}, "messages"),
        ({"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"model": "tiny", "messages": ASKED, "temperature": -1}, "temperature"),
        ({"model": "tiny", "messages": ASKED, "temperature": "hot"}, "temperature"),
        ({"model": "tiny", "messages": ASKED, "n": 0}, "n"),
        ({"model": "tiny", "messages": ASKED, "max_tokens": 0}, "max_tokens"),
        ({"model": "tiny", "messages": ASKED, "stop": 3}, "stop"),
        ({"model": "tiny", "messages": ASKED, "logit_bias": {"3": 1}}, "logit_bias"),
    ],
)
def test_a_body_that_makes_no_sense_names_its_field(live: Running, body, param):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = live.http.post("/v1/chat/completions", content=content)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"} and error["message"]


def test_the_gate_asks_for_host_token_and_size(live: Running):
    assert live.http.get("/health", headers={"authorization": ""}).json() == {"status": "ok"}
    assert live.http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
    assert live.http.get("/v1/models", headers={"authorization": ""}).status_code == 401
    assert live.http.get("/v1/models/other").status_code == 404 and live.http.get("/nothing").status_code == 404
    with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2]))) as raw:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {TOKEN}\r\n"
        raw.sendall(f"{head}content-length: 99999999999\r\n\r\n".encode())
        assert b" 413 " in raw.recv(4096).partition(b"\r\n")[0]


def test_more_than_can_wait_are_told_to_come_back():
    running = Running(running=1, waiting=1)
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 2}
    try:
        done: list[int] = []

        def ask() -> None:
            with httpx.Client(base_url=running.url, headers=running.http.headers, timeout=30) as client:
                done.append(client.post("/v1/chat/completions", json=body).status_code)

        with running.served.turn:  # no token is made meanwhile
            threads = [threading.Thread(target=ask) for _ in range(2)]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + 20
            while running.turnstile.waiting < 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            refused = running.http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
        for thread in threads:
            thread.join(20)
        assert done == [200, 200]
    finally:
        running.stop()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_makes_room(stream: bool):
    running = Running(running=1, waiting=1)
    made: list[int] = []
    tokens = running.served.tokens

    def counted(job):
        for step in tokens(job):
            made.append(1)
            time.sleep(0.02)
            yield step

    running.served.tokens = counted  # slowed down, and counted
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 200, "stream": stream, "seed": 1}
    try:
        if stream:
            with running.http.stream("POST", "/v1/chat/completions", json=body) as reply:
                next(reply.iter_lines())
        else:
            with pytest.raises(httpx.TimeoutException):
                running.http.post("/v1/chat/completions", json=body, timeout=0.3)
        after = running.http.post("/v1/chat/completions", json=body | {"max_tokens": 2, "stream": False})
        assert after.status_code == 200 and len(made) < 150
    finally:
        running.stop()


# -- the command --------------------------------------------------------------------------------------------------


def test_the_command_serves_and_ends_by_ctrl_c(tmp_path: Path, capsys):
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    counted: list[int] = []

    def talk() -> None:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=TOKEN, max_retries=0, timeout=30)
        for _ in range(200):
            try:
                reply = client.chat.completions.create(model="tiny-bytes", messages=ASKED, max_tokens=3)
            except openai.APIConnectionError:  # it is not up yet
                time.sleep(0.1)
                continue
            counted.append(reply.usage.total_tokens - reply.usage.prompt_tokens)
            break
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=talk, daemon=True).start()
    assert main(["serve", "tiny-bytes", "--port", str(port), "--token-file", str(token), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["token"] is None and told["model"] == "tiny-bytes" and 1 <= counted[0] <= 3


def test_what_cannot_be_served_is_told_in_a_sentence(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.delenv("TETHER_SERVE_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    reward = tmp_path / "reward"
    reward.mkdir()
    (reward / "config.json").write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}))
    unfinished = tmp_path / "runs" / "half"
    unfinished.mkdir(parents=True)
    (unfinished / "recipe.json").write_text("{}")
    (tmp_path / "short").write_text("abc")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = {
            ("./nothing", "--port", "0"): "there is no run and no model at ./nothing",
            ("reward", "--port", "0"): "reward model",
            ("half", "--port", "0"): "without a saved model",
            ("tiny-bytes", "--port", str(taken.getsockname()[1])): "cannot listen",
            ("tiny-bytes", "--host", "0.0.0.0", "--port", "0"): "TETHER_SERVE_TOKEN",
            ("tiny-bytes", "--token-file", "nothing"): "cannot read",
            ("tiny-bytes", "--token-file", "short"): "16 plain characters",
        }
        for words, said in cases.items():
            assert main(["serve", *words]) in (2, 6), words
            error = capsys.readouterr().err
            assert said in error and "Traceback" not in error, (words, error)


def test_stream_names_are_constant():
    assert STREAM_NAME == "serve", "seeds of earlier answers depend on it"
