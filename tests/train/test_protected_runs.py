"""What a run was begun with cannot change unnoticed: recipe, model, the note that all is done, the best model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from in_process import attempt, whole
from same_runs import differences
from tiny_recipes import tiny

from tether import cli
from tether.errors import ConfigError, StorageError
from tether.files import recover
from tether.models.load import load_causal_lm
from tether.models.save import save_model
from tether.store.find import run_config
from tether.store.folder import RunFolder
from tether.train.resume import stored_recipe

RULES = ("--run.steps", "6", "--checkpoint.every", "2", "--run.doctor_every", "0")


@pytest.fixture
def stopped(tmp_path) -> Path:
    """An SFT run, stopped after three of its six steps."""
    attempt(tiny("sft", tmp_path / "runs", *RULES), stop_after=3)
    return tmp_path / "runs" / "run"


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_an_edited_recipe_is_refused_with_the_commands_that_go_on_and_that_undo_it(tmp_path, stopped, capsys):
    edit(stopped / "recipe.json", '"policy_lr": 0.003', '"policy_lr": 0.002')
    for command in (["resume", str(stopped)], ["export", str(stopped), "--checkpoint", "-1", "--model", "out"]):
        assert cli.main(command) == 2
        told = capsys.readouterr().err
        assert "optimizer.policy_lr is 0.002, was 0.003" in told
    with pytest.raises(ConfigError, match="is not what the run started with"):
        run_config(str(stopped))
    fork = told.partition("`tether ")[2].partition("`")[0].split()
    assert fork == ["fork", str(stopped), "--optimizer.policy_lr", "0.002"]
    assert cli.main([*fork, "--json"]) == 0
    kept = json.loads((stopped.parent / "run-fork-3" / "recipe.json").read_text())
    assert kept["optimizer"]["policy_lr"] == 0.002
    undo = told.rpartition("`tether ")[2].partition("`")[0].split()
    assert cli.main([word for word in undo if word != "--repair"]) == 6
    assert cli.main(undo) == 0
    assert cli.main(["resume", str(stopped), "--json"]) == 0
    assert differences(whole(tiny("sft", tmp_path / "calm", *RULES)), stopped) == []


@pytest.mark.parametrize("key", ['"gamma"', '"steps"', '"temperature"', '"seed"', '"clip_range"'])
def test_a_flipped_bit_of_a_recipe_is_found(tmp_path, key):
    attempt(tiny("ppo", tmp_path / "runs", "--run.steps", "2"), stop_after=1)
    file = tmp_path / "runs" / "run" / "recipe.json"
    content = bytearray(file.read_bytes())
    place = content.find(key.encode())
    assert place > 0
    content[place + len(key) + 2] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ConfigError, match="is not what the run started with"):
        stored_recipe(file.parent)


def test_white_space_in_a_recipe_means_nothing(stopped):
    record = json.loads((stopped / "recipe.json").read_text())
    (stopped / "recipe.json").write_text(json.dumps(record))
    assert stored_recipe(stopped).run.steps == 6


def test_a_damaged_header_is_taken_from_the_newest_checkpoint_and_written_anew(tmp_path, stopped):
    before = json.loads((stopped / "run.json").read_text())
    edit(stopped / "run.json", '"id": "', '"id": "f')
    said: list[str] = []
    attempt(tiny("sft", tmp_path / "runs", *RULES), stop_after=1, notify=said.append)
    assert any("run.json is damaged" in text for text in said)
    assert json.loads((stopped / "run.json").read_text()) == before
    (stopped / "run.json").unlink()
    edit(stopped / "recipe.json", '"batch_size": 3', '"batch_size": 2')
    with pytest.raises(ConfigError, match=r"sft\.batch_size is 2, was 3"):
        stored_recipe(stopped)


@pytest.mark.parametrize("content", ["", "{", '{"steps": 6}', '{"steps": 6, "sha256": "0"}', "[]", "null"])
def test_a_note_that_all_is_done_counts_only_if_it_is_whole(tmp_path, stopped, content):
    (stopped / "finished.json").write_text(content)
    assert not RunFolder(stopped).is_finished
    said: list[str] = []
    done = attempt(tiny("sft", tmp_path / "runs", *RULES), stop_after=1, notify=said.append)
    assert done.steps == 4
    assert any("finished.json is damaged" in text for text in said)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny model as transformers has it: without Tether's list of files, as models of other tools are."""
    target = tmp_path_factory.mktemp("model") / "tiny"
    loaded = load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0)
    save_model(loaded.model, loaded.tokenizer, target)
    (target / "tether-files.json").unlink()
    return target


def change_json(file: Path, change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def swap_two(content) -> None:
    vocabulary = content["model"]["vocab"]
    one, other = list(vocabulary)[70:72]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


CHANGES = {
    "norm epsilon": (
        lambda place: change_json(place / "config.json", lambda config: config.update(rms_norm_eps=1e-3)),
        r"the model's config \(rms_norm_eps is 0\.001, was",
    ),
    "rope base": (
        lambda place: change_json(
            place / "config.json", lambda config: config["rope_parameters"].update(rope_theta=5e2)
        ),
        r"rope_parameters\.rope_theta is 500\.0, was",
    ),
    "activation": (
        lambda place: change_json(place / "config.json", lambda config: config.update(hidden_act="gelu")),
        'hidden_act is "gelu", was',
    ),
    "chat template": (
        lambda place: (place / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!"),
        "the chat template changed",
    ),
    "vocabulary": (lambda place: change_json(place / "tokenizer.json", swap_two), "the tokenizer's vocabulary"),
    "normalizer": (
        lambda place: change_json(place / "tokenizer.json", lambda it: it.update(normalizer={"type": "Lowercase"})),
        "the tokenizer's normalizer",
    ),
    "end token": (
        lambda place: change_json(place / "generation_config.json", lambda it: it.update(eos_token_id=[65, 66])),
        "special tokens|eos_token_id",
    ),
}


@pytest.mark.parametrize(
    ("method", "name"), [*(("sft", name) for name in CHANGES), ("grpo", "rope base"), ("grpo", "chat template")]
)
def test_a_model_that_changed_beside_its_weights_is_refused_by_what_changed(tmp_path, saved, name, method):
    place = tmp_path / "model"
    shutil.copytree(saved, place)
    recipe = tiny(method, tmp_path / "runs", "--model.path", str(place), *RULES)
    attempt(recipe, stop_after=1)
    change, words = CHANGES[name]
    change(place)
    with pytest.raises(ConfigError, match=words) as refused:
        attempt(recipe)
    assert "changed since the run" in str(refused.value) and "put the old one back" in str(refused.value)
    shutil.rmtree(place)
    shutil.copytree(saved, place)
    assert attempt(recipe, stop_after=1).steps == 2


def test_a_reward_model_whose_config_or_tokenizer_changed_is_refused(tmp_path):
    trained = whole(tiny("reward", tmp_path / "rm", "--run.steps", "1")) / "model"
    (trained / "tether-files.json").unlink()
    part = json.dumps([{"kind": "model", "path": str(trained)}])
    recipe = tiny("grpo", tmp_path / "runs", "--run.steps", "3", "--reward.parts", part)
    attempt(recipe, stop_after=1)
    change_json(trained / "config.json", lambda config: config.update(rms_norm_eps=1e-3))
    with pytest.raises(ConfigError, match=r"names as reward .*config\.json.* changed since"):
        attempt(recipe)


def test_a_model_that_tether_saved_is_refused_where_it_is_loaded_damaged(stopped, tmp_path):
    model = whole(tiny("sft", tmp_path / "done", *RULES)) / "model"
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(StorageError, match=r"model\.safetensors is not what was written.*tether-files\.json"):
        load_causal_lm(str(model), dtype="float32", device="cpu", seed=0)
    (model / "tether-files.json").unlink()
    load_causal_lm(str(model), dtype="float32", device="cpu", seed=0)


class Killed(BaseException):
    """Stands for a kill."""


@pytest.mark.parametrize("moment", [0, 1, 2])
def test_a_kill_while_the_best_model_is_replaced_loses_neither(tmp_path, monkeypatch, moment):
    loaded = load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0)
    target = tmp_path / "best"
    save_model(loaded.model, loaded.tokenizer, target)
    left = [moment]
    rename, rmtree = Path.rename, shutil.rmtree

    def mined(do):
        def at(path, *rest, **options):
            if str(path).endswith(("best", "best.unfinished")) and Path(path).exists():
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
            return do(path, *rest, **options)

        return at

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", mined(rename))
        patched.setattr(shutil, "rmtree", mined(rmtree))
        with pytest.raises(Killed):
            save_model(loaded.model, loaded.tokenizer, target)
    recover(target)
    assert load_causal_lm(str(target), dtype="float32", device="cpu", seed=0).context_length
    save_model(loaded.model, loaded.tokenizer, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best"]


def test_a_damaged_best_model_is_told_and_saved_again_where_the_run_stands_at_its_step(tmp_path):
    rules = (*RULES, "--evaluation.every", "1")
    recipe = tiny("sft", tmp_path / "runs", *rules)
    attempt(recipe, stop_after=2)
    best = tmp_path / "runs" / "run" / "best"
    weights = best / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 4]))
    said: list[str] = []
    attempt(recipe, stop_after=0, notify=said.append)
    assert any("is not what was written" in text and "saved again" in text for text in said)
    assert weights.read_bytes() == before


@pytest.mark.parametrize("name", ["checkpoints", "model", "best"])
def test_a_run_that_begins_removes_nothing_of_another_program(tmp_path, name):
    precious = tmp_path / "runs" / "run" / name / "epoch=1.ckpt"
    precious.parent.mkdir(parents=True)
    precious.write_text("weights")
    with pytest.raises(ConfigError, match=f"{name} exists already"):
        whole(tiny("sft", tmp_path / "runs", *RULES))
    assert precious.read_text() == "weights"
    assert [path.name for path in (tmp_path / "runs" / "run").iterdir()] == [name]


def test_a_run_named_like_the_folder_above_writes_and_removes_nothing_there(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "runs").mkdir()
    flags = ["--run.name", "..", "--run.directory", str(tmp_path / "runs"), "--run.steps", "1"]
    assert cli.main(["train", "ppo", "--task.name", "match-case", *flags]) == 2
    assert "workspace" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "runs"]
