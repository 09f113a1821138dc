"""`tether sweep`: one small sweep from beginning to end, and what is wrong on the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tether.cli import main
from tether.errors import ConfigError
from tether.sweeps.design import WAVE, draw_settings
from tether.sweeps.manifest import read_manifest
from tether.sweeps.variation import Variation, read_variations

TINY = [
    *("--run.steps=4", "--run.save=false", "--run.doctor_every=0", "--model.device=cpu", "--kl.apply_to=none"),
    *("--rollout.prompts_per_step=8", "--rollout.max_new_tokens=4", "--ppo.minibatch_size=8", "--task.name=match-case"),
]


def fails(capsys, *words: str) -> tuple[int, str]:
    code = main(["sweep", *words])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a recipe, or the sweep to resume"),
        (["ppo", "--resume", "x"], "name a recipe, or the sweep to resume"),
        (["ppo"], "nothing is varied"),
        (["ppo", "--vary", "ppo.epoch=1,2"], "did you mean ppo.epochs?"),
        (
            ["ppo", "--vary", "ppo.epochs=1,2", "--seeds", "0"],
            "seeds in the flags: expected a whole number of at least 1",
        ),
        (["ppo", "--vary", "ppo.epochs=1,2", "--sampler", "gird"], "expected one of grid, one-at-a-time, random, tpe"),
        (["ppo", "--vary", "ppo.epochs=1,2", "--jobs", "0"], "--jobs: must be a whole number of at least 1"),
        (["ppo", "--vary", "ppo.epochs=1,2", "--budget", "3", "--sampler", "grid"], "leave budget out"),
        (["ppo", "--vary", "run.steps=1,2", "--prune"], "--prune compares settings at the same step"),
        (["nothing.yaml", "--vary", "ppo.epochs=1,2"], "neither a recipe's file nor a method"),
        (["--resume", "nothing"], "there is no sweep nothing in runs"),
        (["--resume", "x", "--seeds", "4"], "--seeds does not go with --resume"),
        (["--resume", "x", "--run.steps", "4"], "--run.steps does not go with --resume"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_writes_nothing(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    code, errors = fails(capsys, *words)
    assert code == 2 and said in errors and errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_optuna_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, errors = fails(capsys, "ppo", "--vary", "kl.coef=0.01..0.1", "--sampler", "tpe")
    assert code == 2 and "pip install 'tether-rl[sweep]'" in errors


def test_the_help_needs_no_torch():
    code = "import sys; from tether.cli import main; main(['sweep', '--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False" and "--vary KEY=VALUES" in done.stdout


def test_a_trial_that_diverges_is_recorded_and_the_sweep_goes_on(tmp_path: Path):
    """Two settings, one of which makes every weight infinite; then the same command again finds nothing to do."""
    words = ["sweep", "ppo", "--vary", "optimizer.policy_lr=1e-3,1e38", "--seeds", "1", "--name", "s", "--json"]
    command = [sys.executable, "-m", "tether", *words, *TINY, "--run.max_skipped=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *trials, table = map(json.loads, done.stdout.splitlines())
    assert sorted((line["trial"], line["state"]) for line in trials) == [
        ("000-seed0", "done"),
        ("001-seed0", "diverged"),
    ]
    assert [setting["diverged"] for setting in table["settings"]] == [0, 1]
    assert table["settings"][0]["chance_of_best"] == 1.0
    manifest = read_manifest(tmp_path / "runs" / "s")
    assert manifest.ends["001-seed0"].exit_code == 4 and (manifest.folder / "report.html").is_file()
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0 and [json.loads(line) for line in again.stdout.splitlines()] == [table]


# -- drawing


def drawn(sampler: str, before: list[dict], seed: int = 0, value=lambda place: float(place)) -> list[dict]:
    pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
    from tether.config.load import load_recipe

    recipe = load_recipe("ppo")
    variations = read_variations(recipe, {"optimizer.policy_lr": "1e-5..1e-3:log", "ppo.epochs": [1, 2, 4]})
    return draw_settings(recipe, variations, sampler, before, value, WAVE, seed)


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_settings_are_drawn_from_the_seed_and_the_results_alone(sampler: str):
    first = drawn(sampler, [])
    assert first == drawn(sampler, []) and first != drawn(sampler, [], seed=1)
    assert all(1e-5 <= each["optimizer.policy_lr"] <= 1e-3 and each["ppo.epochs"] in (1, 2, 4) for each in first)
    second = drawn(sampler, first)
    assert second == drawn(sampler, first) and not any(each in first for each in second)


def test_tpe_proposes_what_did_well():
    """Twelve results that are better the higher the rate: the next ones are above the median of the earlier ones."""
    before: list[dict] = []

    def value(place: int) -> float:
        return before[place]["optimizer.policy_lr"]

    for _ in range(3):
        before += drawn("tpe", before, value=value)
    middle = sorted(each["optimizer.policy_lr"] for each in before)[len(before) // 2]
    assert min(each["optimizer.policy_lr"] for each in drawn("tpe", before, value=value)) > middle


def test_every_combination_is_drawn_once_and_no_more():
    pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
    from tether.config.load import load_recipe

    recipe = load_recipe("ppo")
    variations = (Variation("ppo.epochs", (1, 2)),)
    first = draw_settings(recipe, variations, "random", [], lambda place: 0.0, WAVE, 0)
    assert sorted(each["ppo.epochs"] for each in first) == [1, 2]
    assert draw_settings(recipe, variations, "random", first, lambda place: 0.0, WAVE, 0) == []


def test_a_setting_that_the_recipe_rejects_is_drawn_anew():
    pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
    from tether.config.load import load_recipe

    recipe = load_recipe("ppo")
    variations = (Variation("ppo.n_steps", (None, 2)), Variation("ppo.critic_lam", (None, 0.9)))
    found = draw_settings(recipe, variations, "random", [], lambda place: 0.0, WAVE, 0)
    assert len(found) == 3 and {"ppo.n_steps": 2, "ppo.critic_lam": 0.9} not in found
    never = (Variation("ppo.n_steps", (2,)), Variation("ppo.critic_lam", (0.9,)))
    with pytest.raises(ConfigError, match=r"rejects every setting that was drawn: .*n_steps takes its place"):
        draw_settings(recipe, never, "random", [], lambda place: 0.0, WAVE, 0)
