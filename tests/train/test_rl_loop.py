"""The RL loop on the tiny model: it learns, it repeats itself, and bad input gets a clear answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tether.config.load import load_recipe
from tether.errors import ConfigError, DataError, TetherError
from tether.store.read import open_workspace, read_run
from tether.train.build import build_rl, load_policy
from tether.train.rl import evaluate_held_out, train_rl
from tether.train.run import run_recipe
from tether.types import Score

BY_LENGTH = ["--reward.parts", "[{kind: length, target: 3}]"]
SMALL = [
    *("--run.steps", "2", "--rollout.prompts_per_step", "8", "--rollout.max_new_tokens", "4"),
    *("--optimizer.policy_lr", "3e-3", "--optimizer.critic_lr", "3e-3"),
]
METHODS = {
    "ppo": [],
    "ppo penalty": ["--ppo.objective", "kl_penalty"],
    "ppo head": ["--roles.critic", "head", "--kl.controller", "proportional"],
    "reinforce": ["--reinforce.weighting", "baselined"],
    "rloo": ["--rollout.samples_per_prompt", "2"],
    "grpo": ["--rollout.samples_per_prompt", "2", "--kl.controller", "adaptive"],
    "trpo": ["--trpo.cg_iterations", "2"],
}


def build(name: str, *flags: str):
    recipe = load_recipe(name.split()[0], None, [*SMALL, *METHODS[name], *flags])
    return build_rl(recipe, load_policy(recipe))


@pytest.mark.parametrize("name", METHODS)
def test_a_run_repeats_itself_to_the_bit(name):
    first, second = (
        [result.metrics for result in train_rl(build(name))],
        [result.metrics for result in train_rl(build(name))],
    )
    for one, other in zip(first, second, strict=True):
        timeless = {key: value for key, value in one.items() if not key.startswith("seconds")}
        assert timeless == {key: value for key, value in other.items() if not key.startswith("seconds")}


def test_the_sampler_and_the_trainer_agree():
    for result in train_rl(build("ppo", "--rollout.top_p", "0.8", "--rollout.temperature", "0.7")):
        assert result.metrics["logprob_diff_max"] < 1e-4
        mask = result.experience.response_mask
        gap = result.experience.behavior_logprobs - result.experience.untruncated_logprobs
        assert bool((gap[mask] >= -1e-6).all())  # what was sampled from is truncated, so its log-probs are higher
        assert float(gap[mask].max()) > 0.01


def test_ppo_learns_the_small_task():
    recipe = load_recipe("ppo", "recipes/tiny-ppo.yaml", ["--run.steps", "40"])
    scores = [result.metrics["score"] for result in train_rl(build_rl(recipe, load_policy(recipe)))]
    assert scores[0] < 0.3
    assert sum(scores[-3:]) / 3 >= 0.9


def test_an_entropy_bonus_really_enters_the_loss():
    plain, bonus = (list(train_rl(build("ppo", "--ppo.entropy_coef", coef)))[-1].metrics for coef in ("0.0", "0.5"))
    assert bonus["entropy"] > plain["entropy"]


class WithScores:
    """Replaces a reward's scores."""

    def __init__(self, change):
        self.change = change

    def __call__(self, rollouts):
        return [Score(self.change(index)) for index, _ in enumerate(rollouts)]


def test_scores_that_are_not_numbers_are_left_out_and_counted():
    import dataclasses

    parts = build("ppo")
    bad = WithScores(lambda index: float("nan") if index == 0 else 1.0)
    parts = dataclasses.replace(parts, reward=bad, max_failure_rate=0.2)
    for result in train_rl(parts):
        assert result.metrics["dropped/unscored"] == 1
        assert result.metrics["score"] == 1.0
        assert len(result.experience) == 7


@pytest.mark.parametrize(("bad", "expected"), [(1, {"held_out/score": 1.0}), (100, {})], ids=["one", "all"])
def test_held_out_scores_that_are_not_numbers_are_left_out(bad: int, expected: dict[str, float]):
    import dataclasses

    reward = WithScores(lambda index: float("nan") if index < bad else 1.0)
    parts = dataclasses.replace(build("ppo"), reward=reward, max_failure_rate=1.0)
    found = evaluate_held_out(parts)
    assert {name: value for name, value in found.items() if name == "held_out/score"} == expected
    assert found["held_out/length"] > 0


def test_too_many_bad_scores_end_the_run():
    import dataclasses

    parts = dataclasses.replace(build("ppo"), reward=WithScores(lambda index: float("nan") if index < 2 else 1.0))
    with pytest.raises(DataError, match=r"2 of 8 scores.*max_failure_rate"):
        list(train_rl(parts))


def test_a_reward_that_raises_or_miscounts_ends_the_run_with_its_name():
    import dataclasses

    def broken(rollouts):
        raise KeyError("answer")

    with pytest.raises(DataError, match="KeyError"):
        list(train_rl(dataclasses.replace(build("ppo"), reward=broken)))
    with pytest.raises(DataError, match="one for each"):
        list(train_rl(dataclasses.replace(build("ppo"), reward=lambda rollouts: [Score(1.0)])))


def test_a_group_of_one_is_refused_by_the_recipe():
    for method in ("rloo", "grpo"):
        with pytest.raises(ValueError, match=r"samples_per_prompt.*2 or more"):
            load_recipe(method, None, ["--rollout.samples_per_prompt", "1"])


def test_a_prompt_beyond_the_context_is_named():
    with pytest.raises(ValueError, match="256"):
        list(train_rl(build("ppo", "--rollout.max_new_tokens", "300")))


def test_run_recipe_leaves_config_metrics_and_a_model_that_loads(tmp_path, capsys):
    recipe = load_recipe("ppo", None, [*SMALL, "--run.directory", str(tmp_path), "--run.name", "small"])
    assert run_recipe(recipe, json_output=True) == 0
    folder = tmp_path / "small"
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in printed] == [0, 1]
    with open_workspace(tmp_path) as opened:
        kept = read_run(opened, "small")
    assert [line["score"] for line in kept.metrics] == [line["score"] for line in printed]
    assert kept.method == json.loads((folder / "recipe.json").read_text())["method"] == "ppo"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 258)
    with pytest.raises(ValueError, match="already holds a run"):
        run_recipe(recipe, json_output=True)


def test_prompts_from_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "lower:", "answer": "lower", "id": "a"}\n{"prompt": "UPPER:", "answer": "UPPER"}\n')
    results = list(train_rl(build("ppo", "--task.prompts", str(path), *BY_LENGTH)))
    assert len(results[0].experience) == 8
    with pytest.raises(DataError, match="no such file"):
        build("ppo", "--task.prompts", str(tmp_path / "missing.jsonl"), *BY_LENGTH)
    assert Path("recipes").is_dir()


def test_critic_warm_up_teaches_the_critic_and_leaves_the_policy():
    parts = build("ppo", "--ppo.critic_warmup", "1", "--ppo.target_kl", "0.5")
    before = parts.learner.flat_parameters("policy"), parts.learner.flat_parameters("critic")
    steps = train_rl(parts)
    assert "policy_loss" not in next(steps).metrics
    assert torch.equal(parts.learner.flat_parameters("policy"), before[0])
    assert not torch.equal(parts.learner.flat_parameters("critic"), before[1])
    next(steps)
    assert not torch.equal(parts.learner.flat_parameters("policy"), before[0])


@pytest.mark.parametrize("record", ['{"text": "abababababababab"}', '{"prompt": "a", "completion": "babababab"}'])
def test_mixed_in_text_is_learned_beside_the_reward(tmp_path, record):
    path = tmp_path / "text.jsonl"
    path.write_text(record + "\n")
    results = list(train_rl(build("ppo", "--ptx.data", str(path), "--ptx.coef", "5", "--run.steps", "6")))
    losses = [result.metrics["ptx_loss"] for result in results]
    assert losses[-1] < 0.7 * losses[0]
    assert "score" in results[-1].metrics


def test_held_out_prompts_are_scored_and_the_best_model_is_kept(tmp_path, capsys):
    more = ["--evaluation.every", "2", "--run.steps", "5", "--run.directory", str(tmp_path), "--run.name", "best"]
    recipe = load_recipe("ppo", "recipes/tiny-ppo.yaml", [*SMALL, *more])
    assert run_recipe(recipe, json_output=True) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "start/held_out/score" in lines[0]
    assert [line["step"] for line in lines if "held_out/score" in line] == [1, 3, 4]
    improved = max(line.get("held_out/score", 0.0) for line in lines) > lines[0]["start/held_out/score"]
    assert (tmp_path / "best" / "best" / "config.json").is_file() == improved


def test_k1_in_the_loss_is_refused():
    with pytest.raises(ValueError, match="k2 or k3"):
        load_recipe("ppo", None, ["--kl.apply_to", "loss"])


def test_a_score_beyond_single_precision_is_left_out():
    import dataclasses

    parts = dataclasses.replace(
        build("ppo"), reward=WithScores(lambda index: 1e39 if index == 0 else 1.0), max_failure_rate=0.2
    )
    assert next(train_rl(parts)).metrics["dropped/unscored"] == 1


def test_a_failed_start_leaves_the_name_free(tmp_path):
    where = ["--run.directory", str(tmp_path), "--run.name", "once"]
    with pytest.raises(DataError, match="no such file"):
        asked = ["--task.prompts", "missing.jsonl", *BY_LENGTH]
        run_recipe(load_recipe("ppo", None, [*SMALL, *where, *asked]), json_output=True)
    assert run_recipe(load_recipe("ppo", None, [*SMALL, *where]), json_output=True) == 0


def test_a_run_that_dies_before_its_first_step_does_not_keep_its_name(tmp_path, monkeypatch):
    """Its reward is wrong, which shows in the first step, after the folder was made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong_reward.py").write_text("def reward(prompt, completion, answer):\n    raise KeyError(answer)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    where = ["--run.directory", "runs", "--run.name", "once"]
    wrong = [*SMALL, *where, "--task.reward", "wrong_reward:reward"]
    for _ in range(2):
        with pytest.raises(TetherError) as died:
            run_recipe(load_recipe("ppo", None, wrong), json_output=True)
        assert "already holds a run" not in str(died.value)
    assert run_recipe(load_recipe("ppo", None, [*SMALL, *where]), json_output=True) == 0
    with pytest.raises(ConfigError, match="already holds a run"):
        run_recipe(load_recipe("ppo", None, [*SMALL, *where]), json_output=True)


@pytest.mark.parametrize(
    ("method", "flags", "message"),
    [
        ("ppo", ["--kl.controller", "adaptive", "--kl.coef", "0"], "start above 0"),
        ("ppo", ["--kl.controller", "proportional", "--kl.horizon", "5"], "overshoot"),
        ("rloo", ["--rloo.epochs", "2"], "objective: clip"),
        ("trpo", ["--roles.critic", "head"], "separate"),
    ],
)
def test_settings_that_cannot_work_are_refused(method, flags, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(method, None, flags)


def test_an_unknown_device_is_named():
    with pytest.raises(ValueError, match=r"model\.device"):
        load_policy(load_recipe("ppo", None, ["--model.device", "gpu"]))


def test_rollouts_carry_the_iteration_they_were_sampled_in():
    parts = build("ppo")
    list(train_rl(parts))
    assert parts.engine.policy_version == 1
