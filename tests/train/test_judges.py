"""The judge behind HTTP: both orders are asked, and whatever it answers has a stated outcome."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tether.config.rewards import RemotePart
from tether.evaluation.judges import Pair, RemoteJudge, ScoreJudge, read_choices
from tether.hub.tiny_model import tiny_tokenizer
from tether.protocols import Sampling
from tether.rollout.scripted import ScriptedEngine
from tether.types import Prompt, Score

PROMPTS = [Prompt.from_text(f"p{n}", f"question {n}") for n in range(5)]


def pairs() -> list[Pair]:
    """The first model says `good n`, the second `bad n`."""

    def rollouts(word: str):
        engine = ScriptedEngine(tiny_tokenizer(), lambda prompt, _: f"{word} {prompt.id}")
        return engine.generate(PROMPTS, Sampling(32), samples_per_prompt=1, seed=0)

    return [Pair(one, other) for one, other in zip(rollouts("good"), rollouts("bad"), strict=True)]


@contextmanager
def server(choose: Callable[[dict[str, Any]], Any], status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A judge that answers each item by `choose`; its address, and the requests it was sent."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(request | {"authorization": self.headers.get("Authorization")})
            choices = [{"id": item["id"], "choice": choose(item)} for item in request["items"]]
            body = json.dumps({"choices": choices}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_address[1]}/judge", asked
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


def judge(url: str, **options: Any) -> RemoteJudge:
    return RemoteJudge(RemotePart(kind="remote", url=url, **options), token="secret", seed=0, sleep=lambda _: None)


def test_an_honest_judge():
    with server(lambda item: "first" if item["first"].startswith("good") else "second") as (url, asked):
        verdicts = judge(url, batch_size=2)(pairs())
    assert [(verdict.choice, verdict.orders_agree) for verdict in verdicts] == [("first", True)] * 5
    assert len(asked) == 6 and all(len(request["items"]) <= 2 for request in asked)
    assert {request["authorization"] for request in asked} == {"Bearer secret"}
    items = [item for request in asked for item in request["items"]]
    assert {  # requests are concurrent: they arrive in any order
        "id": "0",
        "prompt": "question 0",
        "messages": [{"role": "user", "content": "question 0"}],
        "first": "good p0",
        "second": "bad p0",
    } in items
    orders = {(item["prompt"], item["first"]) for item in items}
    assert len(orders) == 10  # every pair in both orders


def test_a_judge_that_prefers_a_position_is_counted_as_ties():
    with server(lambda item: "first") as (url, _):
        verdicts = judge(url)(pairs())
    assert [(verdict.choice, verdict.orders_agree) for verdict in verdicts] == [("tie", False)] * 5


def test_a_tie_in_both_orders_is_agreement_and_in_one_is_not():
    with server(lambda item: "tie") as (url, _):
        assert [verdict.orders_agree for verdict in judge(url)(pairs())] == [True] * 5
    with server(lambda item: "tie" if item["first"].startswith("good") else "second") as (url, _):
        verdicts = judge(url)(pairs())
    assert [(verdict.choice, verdict.orders_agree) for verdict in verdicts] == [("tie", False)] * 5


def test_what_is_no_choice_is_unjudged():
    with server(lambda item: "both" if "p3" in item["first"] else "tie") as (url, _):
        verdicts = judge(url)(pairs())
    assert [verdict.choice for verdict in verdicts] == ["tie", "tie", "tie", None, "tie"]
    assert verdicts[3].reason == "not_a_choice"


def test_a_server_that_fails_is_asked_again_and_then_given_up():
    with server(lambda item: "tie", status=500) as (url, asked):
        verdicts = judge(url, retries=2)(pairs())
    assert {(verdict.choice, verdict.reason) for verdict in verdicts} == {(None, "status_500")}
    assert len(asked) == 6
    verdicts = judge("http://127.0.0.1:9/judge", retries=0)(pairs())
    assert {verdict.reason for verdict in verdicts} == {"connection"}


@pytest.mark.parametrize(
    ("answer", "reasons"),
    [
        (b"oh", ["not_json"] * 2),
        (b"[1]", ["wrong_shape"] * 2),
        (b"{}", ["wrong_shape"] * 2),
        (b'{"choices": "first"}', ["wrong_shape"] * 2),
        (b'{"choices": [1]}', ["wrong_shape"] * 2),
        (b'{"choices": [{"id": "0", "choice": "first"}]}', ["", "missing"]),
        (b'{"choices": [{"id": "0", "choice": "tie"}, {"id": "0", "choice": "tie"}]}', ["duplicate", "missing"]),
        (b'{"choices": [{"id": "1", "choice": null}, {"id": "0", "choice": ["x"]}]}', ["not_a_choice"] * 2),
    ],
)
def test_odd_answers(answer: bytes, reasons: list[str]):
    assert [verdict.reason for verdict in read_choices(answer, ["0", "1"])] == reasons


def test_a_score_that_is_missing_is_unjudged():
    def reward(rollouts):
        bad = [rollout.completion == "bad p1" for rollout in rollouts]
        return [Score(0.0, valid=not missing) for missing in bad]

    choices = [verdict.choice for verdict in ScoreJudge(reward)(pairs())]
    assert choices == ["tie", None, "tie", "tie", "tie"]
