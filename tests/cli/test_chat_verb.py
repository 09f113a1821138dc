"""`tether chat` on the tiny model: one question, a pipe of questions, two models, leaving."""

from __future__ import annotations

import io
import json

import pytest

from tether import cli
from tether.errors import DataError
from tether.loops.chat import Conversation
from tether.models.load import load_causal_lm
from tether.protocols import Sampling

QUICK = ["tiny-bytes", "--max-new-tokens", "6"]


def lines(capsys, *words: str) -> list[dict]:
    assert cli.main(["chat", *QUICK, *words, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_one_question(capsys):
    [answered] = lines(capsys, "--once", "hello")
    [answer] = answered["answers"]
    assert answered["question"] == "hello" and answer["model"] == "tiny-bytes" and 1 <= answer["tokens"] <= 6
    assert lines(capsys, "--once", "hello") == [answered]
    assert lines(capsys, "--once", "hello", "--seed", "1") != [answered]
    assert lines(capsys, "--once", "hello", "--system", "be brief") != [answered]


def test_two_models_side_by_side(capsys):
    [answered] = lines(capsys, "--once", "hello", "--compare", "tiny-bytes")
    assert answered["answers"][0] == answered["answers"][1]
    assert cli.main(["chat", *QUICK, "--once", "hello", "--compare", "tiny-bytes"]) == 0
    assert capsys.readouterr().out.splitlines()[0].count(" tiny-bytes ") == 2


def test_a_pipe_of_questions_is_a_conversation(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nagain\n/new\nhello\n"))
    first, second, anew = lines(capsys, "--temperature", "0")
    assert [answered["question"] for answered in (first, second, anew)] == ["hello", "again", "hello"]
    assert first["answers"] == anew["answers"]


def test_leaving_by_the_keyboard_is_no_error(capsys, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert cli.main(["chat", *QUICK]) == 0
    assert capsys.readouterr().out == ""


def test_an_empty_question_and_one_that_is_too_long(capsys):
    assert cli.main(["chat", *QUICK, "--once", ""]) == 5
    assert cli.main(["chat", *QUICK, "--once", "x" * 300]) == 5
    assert "exceeds the model's context" in capsys.readouterr().err


def test_the_oldest_turns_are_forgotten_when_the_context_is_full():
    loaded = load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0)
    talk = Conversation("tiny", loaded, Sampling(8), system="s", seed=0)
    for turn in range(8):
        question = f"{turn}" * 60
        talk.keep(question, talk.answer(question))
    messages = talk.prompt("last").messages
    assert [message["role"] for message in messages[:2]] == ["system", "user"] and len(messages) < len(talk.turns)
    assert messages[-3:-1] == tuple(talk.turns[-2:]) and messages[-1]["content"] == "last"
    with pytest.raises(DataError):
        talk.answer("x" * 300)
    assert len(talk.turns) == 16
    talk.begin_anew()
    assert len(talk.prompt("first").messages) == 2
