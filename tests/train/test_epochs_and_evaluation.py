"""Records by epochs, looked at on held-out ones as it goes: the best kept, ended early, resumed to the bit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from in_process import attempt
from same_runs import _files, metrics_table
from tiny_recipes import TOP, tiny

from tether.config.load import change_settings, load_recipe
from tether.data.examples import collate_rows, prompt_key, read_demonstrations
from tether.errors import ConfigError, DataError
from tether.models.load import load_causal_lm
from tether.models.scalar_models import ScalarModel
from tether.store import checkpoints
from tether.store.folder import RunFolder, run_path
from tether.store.read import find_run, open_workspace
from tether.train.build import _encoder, build_supervised, load_policy
from tether.train.checkpointing import BestSoFar
from tether.train.resume import stored_recipe
from tether.train.supervised import evaluate_held_out, train_supervised

METHODS = ("sft", "reward", "dpo")
LORA = ("--roles.mode", "lora", "--roles.lora_rank", "2")
HELD_OUT = ("--data.held_out_fraction", "0.25")


def records(folder, method: str, count: int = 10) -> str:
    path = folder / f"{method}-{count}.jsonl"
    words = [f"w{index}" for index in range(count)]
    if method == "sft":
        rows = [{"prompt": f"say {word}:", "completion": word * (index % 3 + 1)} for index, word in enumerate(words)]
    else:
        rows = [{"prompt": f"{word}:", "chosen": f"yes {word}!", "rejected": "no."} for word in words]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def recipe_of(method: str, data: str, *flags: str):
    return load_recipe(method, None, ["--data.train", data, f"--{method}.batch_size", "4", *flags])


def parts_of(method: str, data: str, *flags: str):
    recipe = recipe_of(method, data, *flags)
    return build_supervised(recipe, load_policy(recipe))


# -- epochs


@pytest.mark.parametrize("method", METHODS)
def test_epochs_show_every_record_that_often_and_end_in_a_short_batch(tmp_path, method):
    parts = parts_of(method, records(tmp_path, method), "--run.epochs", "3")
    assert parts.steps == 8  # 30 records in batches of 4
    shown, collate = [], parts.collate
    object.__setattr__(parts, "collate", lambda batch: shown.append(list(batch)) or collate(batch))
    metrics = [row for _, row in train_supervised(parts)]
    assert [len(batch) for batch in shown] == [4, 4, 4, 4, 4, 4, 4, 2]
    seen = [id(example) for batch in shown for example in batch]
    assert {seen.count(id(example)) for example in parts.examples.items} == {3}
    assert metrics[-1]["epoch"] == 3.0
    assert metrics[0]["epoch"] == pytest.approx(0.4)


@pytest.mark.parametrize(("epochs", "steps", "last"), [("1", 3, 2), ("0.5", 2, 1), ("0.01", 1, 1), ("2", 5, 4)])
def test_epochs_may_be_a_part_and_the_rate_ends_where_the_run_does(tmp_path, epochs, steps, last):
    parts = parts_of("sft", records(tmp_path, "sft"), "--run.epochs", epochs)
    assert parts.steps == steps
    assert parts.records - (steps - 1) * 4 == last


def test_steps_and_epochs_in_one_place_are_refused_and_a_flag_wins_over_the_file(tmp_path):
    data = records(tmp_path, "sft")
    with pytest.raises(ConfigError, match=r"run.steps \(the flags\) and run.epochs .* set one of them"):
        recipe_of("sft", data, "--run.steps", "3", "--run.epochs", "2")
    file = tmp_path / "x.yaml"
    file.write_text(f"data: {{train: {data}}}\nrun: {{epochs: 2}}\n")
    recipe = load_recipe("sft", str(file), ["--run.steps", "7"])
    assert (recipe.run.steps, recipe.run.epochs) == (7, None)
    file.write_text(f"data: {{train: {data}}}\nrun: {{steps: 9}}\n")
    assert load_recipe("sft", str(file), ["--run.epochs", "2"]).run.epochs == 2.0
    assert change_settings(recipe, ["--run.epochs", "3"]).run.epochs == 3.0  # as for a fork


def test_a_run_by_epochs_records_its_steps_and_goes_on_by_name(tmp_path):
    recipe = recipe_of(
        "sft",
        records(tmp_path, "sft"),
        "--run.epochs",
        "2",
        "--run.directory",
        str(tmp_path / "runs"),
        "--run.name",
        "a",
    )
    assert not attempt(recipe, stop_after=2).finished
    with open_workspace(tmp_path / "runs") as opened:
        assert find_run(opened, "a").steps_target == 5
    assert stored_recipe(run_path(recipe)).run.steps == 5
    done = attempt(recipe)
    assert (done.steps, done.total, done.finished) == (5, 5, True)


# -- held-out records


def test_a_fraction_is_held_out_by_prompt(tmp_path):
    rows = [{"prompt": f"q{index % 6}", "completion": f"a{index}"} for index in range(24)]  # 4 answers to each prompt
    path = tmp_path / "twice.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = parts_of("sft", str(path), "--data.held_out_fraction", "0.3")
    train, held_out = ({prompt_key(row) for row in side} for side in (parts.examples.items, parts.held_out))
    assert not train & held_out
    assert len(parts.examples.items) + len(parts.held_out) == 24
    assert len(parts.held_out) == 8  # two prompts
    again = parts_of("sft", str(path), "--data.held_out_fraction", "0.3", "--run.seed", "1")
    assert {prompt_key(row) for row in again.held_out} != held_out, "the seed says which"


def test_one_prompt_cannot_be_split_and_both_ways_are_refused(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "one", "completion": "a"}\n{"prompt": "one", "completion": "b"}\n')
    with pytest.raises(DataError, match=r"held_out_fraction.*data.held_out"):
        parts_of("sft", str(path), *HELD_OUT)
    with pytest.raises(ConfigError, match="set one of them"):
        parts_of("sft", str(path), *HELD_OUT, "--data.held_out", str(path))
    with pytest.raises(ConfigError, match=r"no records are held out: name a file with data.held_out"):
        recipe_of("sft", str(path), "--evaluation.every", "2")
    with pytest.raises(ConfigError, match=r"evaluation.every as well"):
        recipe_of("sft", str(path), *HELD_OUT, "--evaluation.patience", "2")


@pytest.mark.parametrize("method", METHODS)
def test_held_out_metrics_do_not_depend_on_batches_or_micro_batches(tmp_path, method):
    data, found = records(tmp_path, method, 20), []
    for batch, tokens in (("2", "30"), ("7", "60"), ("20", "8192")):
        flags = (f"--{method}.batch_size", batch, "--optimizer.micro_batch_tokens", tokens)
        parts = parts_of(method, data, "--data.held_out", data, *flags)
        found.append(evaluate_held_out(parts))
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5, abs=1e-6)


def test_the_held_out_loss_is_a_mean_over_tokens(tmp_path):
    data = records(tmp_path, "sft", 6)
    parts = parts_of("sft", data, "--data.held_out", data)
    total = count = 0.0
    for row in parts.held_out:
        with torch.no_grad():
            logits = parts.learner.model.policy(row.tokens[None]).logits[0].float()
        logprobs = torch.log_softmax(logits[:-1], dim=-1).gather(1, row.tokens[1:, None])[:, 0]
        total -= float(logprobs[row.response_mask[1:]].sum())
        count += int(row.response_mask.sum())
    assert evaluate_held_out(parts)["loss"] == pytest.approx(total / count, rel=1e-4)


def test_evaluation_comes_before_the_first_and_after_every_so_many_steps(tmp_path):
    parts = parts_of("reward", records(tmp_path, "reward"), *HELD_OUT, "--evaluation.every", "2", "--run.steps", "5")
    rows = [metrics for _, metrics in train_supervised(parts)]
    assert ["held_out/loss" in row for row in rows] == [False, True, False, True, True]
    assert {"start/held_out/loss", "start/held_out/accuracy"} <= rows[0].keys()
    few = parts_of("reward", records(tmp_path, "reward", 20), *HELD_OUT, "--evaluation.records", "2")
    assert len(few.held_out) == 2


# -- the best, and the end


def test_what_is_best_and_when_nothing_better_has_come_for_long_enough(tmp_path):
    data = records(tmp_path, "reward")
    rules = (*HELD_OUT, "--evaluation.every", "1", "--evaluation.patience", "2")
    best = BestSoFar.of(recipe_of("reward", data, *rules))
    losses = [0.9, 0.8, 0.8, 0.85, math.nan]
    first = {"start/held_out/loss": 1.0, "held_out/loss": losses[0]}
    seen = [best.update(1, first), *(best.update(n + 2, {"held_out/loss": loss}) for n, loss in enumerate(losses[1:]))]
    assert seen == [True, True, False, False, False]
    assert (best.step, best.waited, best.is_over) == (2, 3, True)
    by_accuracy = BestSoFar.of(recipe_of("reward", data, *rules, "--evaluation.metric", "accuracy"))
    assert [by_accuracy.update(n, {"held_out/accuracy": value}) for n, value in ((1, 0.5), (2, 0.7))] == [True, True]
    again = BestSoFar.of(recipe_of("reward", data, *rules))
    again.restore(json.loads(json.dumps(best.values())))
    assert again == best


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("sft", ()),
        ("reward", ()),
        ("dpo", ()),
        ("sft", (*TOP, "--optimizer.policy_lr", "1.0")),
        ("reward", LORA),
        ("dpo", TOP),
    ],
)
def test_a_run_ends_early_keeps_the_best_and_resumes_to_the_bit(tmp_path, method, flags):
    against = tmp_path / "against.jsonl"  # the opposite of what is learned: soon nothing gets better
    rows = [json.loads(line) for line in Path(records(tmp_path, method)).read_text().splitlines()]
    for row in rows[3:]:
        row |= {"completion": "x"} if method == "sft" else {"chosen": row["rejected"], "rejected": row["chosen"]}
    against.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def recipe(name: str):
        rate = ("--optimizer.policy_lr", "0.01", "--optimizer.critic_lr", "0.01")
        rules = ("--evaluation.every", "1", "--evaluation.patience", "2", "--run.epochs", "9")
        rules += ("--data.held_out", str(against))
        where = ("--run.directory", str(tmp_path / name), "--run.name", "run", "--checkpoint.every", "0")
        return recipe_of(method, records(tmp_path, method), *rate, *rules, *where, *flags)

    calm = attempt(recipe("calm"))
    assert calm.finished
    assert calm.steps < calm.total
    assert "was not better in 2 evaluations" in calm.ended
    attempts = 0
    while not (stopped := attempt(recipe("stopped"), stop_after=1)).finished:
        attempts += 1
    assert (stopped.steps, attempts) == (calm.steps, calm.steps - 1)
    one, other = (run_path(recipe(name)) for name in ("calm", "stopped"))
    assert [*_files(one, other, "model"), *_files(one, other, "best")] == []
    assert metrics_table(one) == metrics_table(other)
    last = checkpoints.read_newest(RunFolder(other).checkpoints, print)
    assert last is not None
    assert last.values["waited"] == 2
    best_step = last.values["best_step"]
    assert (one / "best").is_dir() == (best_step is not None)


def test_the_best_reward_model_is_centred_and_training_goes_on_with_its_own_bits(tmp_path):
    data = records(tmp_path, "reward")
    demonstrations = records(tmp_path, "sft")
    found = {}
    for name, keep in (("kept", "true"), ("not", "false")):
        flags = ("--run.steps", "4", "--evaluation.every", "1", *HELD_OUT, "--evaluation.keep_best", keep)
        where = ("--run.directory", str(tmp_path / name), "--run.name", "run", "--reward.center_on", demonstrations)
        recipe = recipe_of("reward", data, *flags, *where, "--optimizer.critic_lr", "1e-3")
        attempt(recipe)
        found[name] = run_path(recipe)
    assert not (found["not"] / "best").exists()
    assert [*_files(found["kept"], found["not"], "model")] == []
    model = ScalarModel.load(found["kept"] / "best", torch.float32, "cpu")
    recipe = recipe_of("reward", data, "--reward.center_on", demonstrations)
    policy = load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0)
    rows = read_demonstrations(demonstrations, _encoder(recipe.data, policy))
    with torch.no_grad():
        scores = model(collate_rows(rows, 0)).scores
    assert float(scores.mean()) == pytest.approx(0.0, abs=1e-4)


def test_rl_ends_early_too(tmp_path):
    rules = ("--evaluation.every", "1", "--evaluation.patience", "1", "--optimizer.policy_lr", "0")
    recipe = tiny("grpo", tmp_path / "runs", "--run.steps", "4", *rules)
    done = attempt(recipe)
    assert (done.steps, done.finished) == (1, True)  # the policy does not move, so nothing gets better
