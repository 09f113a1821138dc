"""SFT, reward model and DPO on the learner that RL uses: each learns what it is shown."""

from __future__ import annotations

import json

import pytest
import torch

from tether.config.load import load_recipe
from tether.errors import DataError
from tether.train.build import build_supervised, load_policy
from tether.train.run import run_recipe
from tether.train.supervised import train_supervised

WORDS = ["red", "green", "blue", "gold"]


def write(path, records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def flags(train: str, *more: str) -> list[str]:
    rates = ("--optimizer.policy_lr", "3e-3", "--optimizer.critic_lr", "3e-3")
    return ["--data.train", train, *rates, *more]


def run(method: str, *options: str) -> tuple[list[dict[str, float]], object]:
    recipe = load_recipe(method, None, list(options))
    parts = build_supervised(recipe, load_policy(recipe))
    return [metrics for _, metrics in train_supervised(parts)], parts


@pytest.fixture
def demonstrations(tmp_path) -> str:
    asked = [{"prompt": f"say {word}:", "completion": word} for word in WORDS]
    chat = [{"messages": [{"role": "user", "content": f"{w}?"}, {"role": "assistant", "content": w}]} for w in WORDS]
    return write(tmp_path / "demonstrations.jsonl", asked + chat)


@pytest.fixture
def rankings(tmp_path) -> str:
    pairs = [{"prompt": f"{word}:", "chosen": "yes!", "rejected": "no."} for word in WORDS]
    ranked = [{"prompt": f"{word}?", "answers": ["yes!", "yes", "no", "no."], "ranks": [0, 1, 2, 2]} for word in WORDS]
    return write(tmp_path / "rankings.jsonl", pairs + ranked)


def test_sft_learns_the_answers_and_their_end(demonstrations):
    metrics, parts = run(
        "sft", *flags(demonstrations, "--run.steps", "60", "--sft.batch_size", "8", "--data.held_out", demonstrations)
    )
    assert metrics[0]["loss"] > 4
    assert metrics[-1]["held_out/loss"] < 0.3
    batch = parts.collate(parts.held_out)
    trained = batch.tokens[batch.response_mask]
    assert int((trained == 257).sum()) == len(parts.held_out)  # every answer's end token is learned


def test_reward_model_ranks_as_it_was_told(rankings):
    metrics, _ = run(
        "reward", *flags(rankings, "--run.steps", "40", "--reward.batch_size", "8", "--data.held_out", rankings)
    )
    assert metrics[-1]["held_out/accuracy"] > 0.95
    assert metrics[-1]["loss"] < metrics[0]["loss"]


def test_dpo_prefers_what_was_chosen(rankings):
    metrics, _ = run("dpo", *flags(rankings, "--run.steps", "30", "--dpo.batch_size", "8", "--data.held_out", rankings))
    assert metrics[0]["margin"] == 0.0  # policy and reference are the same model before the first step
    assert metrics[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert metrics[-1]["held_out/accuracy"] > 0.95


def test_micro_batches_do_not_change_the_reward_models_gradient(rankings):
    gradients = []
    for tokens in ("30", "8192"):
        recipe = load_recipe("reward", None, flags(rankings, "--optimizer.micro_batch_tokens", tokens))
        parts = build_supervised(recipe, load_policy(recipe))
        parts.learner.backward(parts.collate(parts.examples.items), parts.objective)
        gradients.append(parts.learner.flat_gradient("reward"))
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 1e-6


def test_saved_reward_model_loads_elsewhere(rankings, tmp_path):
    from transformers import AutoModelForSequenceClassification

    options = flags(rankings, "--run.steps", "2", "--run.directory", str(tmp_path), "--run.name", "rm")
    assert run_recipe(load_recipe("reward", None, options), json_output=True) == 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm" / "model")
    assert model.config.num_labels == 1
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


BAD = [
    ("not json", "line 3: not valid JSON"),
    ("[1]", "line 3: a record must be an object"),
    ('{"prompt": "x"}', "line 3: field 'completion' is missing"),
    ('{"prompt": 5, "completion": "x"}', "line 3: field 'prompt' must be a non-empty text"),
    ('{"prompt": "x", "completion": " "}', "line 3: field 'completion' must be a non-empty text"),
    ('{"messages": [{"role": "user"}]}', r"line 3: field 'messages\[0\]'"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "must end with an answer"),
    (json.dumps({"prompt": "x", "completion": "y" * 300}), "data.max_length|tokens"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_named(tmp_path, line, message):
    good = '{"prompt": "x", "completion": "y"}'
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{good}\n{good}\n{line}\n")
    with pytest.raises(DataError, match=message) as error:
        run("sft", *flags(str(path)))
    assert "bad.jsonl" in str(error.value)


def test_an_empty_or_missing_file_is_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no records"):
        run("sft", *flags(str(tmp_path / "empty.jsonl")))
    with pytest.raises(DataError, match="no such file"):
        run("sft", *flags(str(tmp_path / "missing.jsonl")))
