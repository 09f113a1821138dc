"""`tether chat` on the tiny model: one question, a pipe of questions, two models, leaving."""

from __future__ import annotations

import io
import json

import pytest

from tether import cli
from tether.commands.chat import Conversation
from tether.errors import DataError
from tether.models.load import load_causal_lm
from tether.protocols import Sampling
from tether.store.find import find_run_or_model

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
        talk.add_turn(question, talk.answer(question))
    messages = talk.fitted("last")[0].messages
    assert [message["role"] for message in messages[:2]] == ["system", "user"] and len(messages) < len(talk.turns)
    assert messages[-3:-1] == tuple(talk.turns[-2:]) and messages[-1]["content"] == "last"
    with pytest.raises(DataError):
        talk.answer("x" * 300)
    assert len(talk.turns) == 16
    talk.begin_anew()
    assert len(talk.fitted("first")[0].messages) == 2


def test_an_answer_shrinks_to_a_small_context_and_forgetting_is_told_once():
    """tiny-bytes has a context of 256, which is what an answer may be long by default."""
    loaded = load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0)
    told: list[str] = []
    talk = Conversation("tiny", loaded, Sampling(256), system=None, seed=0, notify=told.append)
    prompt, sampling, forgotten = talk.fitted("hello")
    assert (sampling.max_new_tokens, forgotten) == (128, 0)
    assert talk.fitted("x" * 200)[1].max_new_tokens == loaded.context_length - 200
    assert talk.answer("hello").prompt == prompt
    talk.sampling = Sampling(8)
    for turn in range(3):
        question = f"{turn}" * 100
        talk.add_turn(question, talk.answer(question))
    assert len(told) == 1
    assert "oldest question and its answer are left out" in told[0]


def test_a_place_that_is_not_there_is_told_at_once_and_a_run_is_found_by_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "sft" / "model").mkdir(parents=True)
    for subcommand in ("chat", "eval"):
        assert cli.main([subcommand, "runs/stf"]) == 2
        assert "there is no run and no model at runs/stf: did you mean runs/sft?" in capsys.readouterr().err
        assert cli.main([subcommand, "./nothing"]) == 2
        assert "no run and no model at ./nothing" in capsys.readouterr().err
    (tmp_path / "runs" / "sft" / "recipe.json").write_text("{}")
    assert find_run_or_model("sft") == "runs/sft"
    assert find_run_or_model("smollm2-135m") == "smollm2-135m"
