"""A saved reward model as a part of the reward."""

import json
from pathlib import Path

import pytest
import torch
from rollout_factory import rollout_of
from transformers import AutoModelForSequenceClassification

from tether import cli
from tether.config.rewards import ModelPart
from tether.errors import ConfigError
from tether.hub.tiny_model import tiny_model, tiny_tokenizer
from tether.models.backbones import ScalarHead
from tether.models.load import LoadedModel, describe, load_causal_lm
from tether.models.scalar_models import ScalarModel
from tether.models.sharing import Separate
from tether.rewards.model import RewardModelReward
from tether.types import Sequences


@pytest.fixture(scope="module")
def policy() -> LoadedModel:
    return load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0)


@pytest.fixture(scope="module")
def scorer(policy: LoadedModel) -> ScalarModel:
    head = ScalarHead.like_output(policy.model, deviation=0.1, seed=3)
    torch.nn.init.constant_(head.bias, 0.7)
    return ScalarModel(Separate(policy.model).scalar_backbone(0), head, "reward")


@pytest.fixture(scope="module")
def saved(policy: LoadedModel, scorer: ScalarModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "model"
    scorer.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def part(path: Path, **settings) -> ModelPart:
    return ModelPart(kind="model", path=str(path), **settings)


def alone(model: ScalarModel, ids: list[int]) -> float:
    mask = torch.ones(1, len(ids), dtype=torch.bool)
    with torch.no_grad():
        return float(model(Sequences(tokens=torch.tensor([ids]), attention_mask=mask, response_mask=mask)).scores)


@pytest.mark.parametrize("micro_batch_tokens", [1, 16, 8192])
def test_scores_are_read_at_the_last_real_token(policy, scorer, saved, micro_batch_tokens: int):
    rows = [[5, 6, 7], [9] * 12, [1, 257], [8, 8, 8, 8, 8]]
    reward = RewardModelReward.load(part(saved, micro_batch_tokens=micro_batch_tokens), policy)
    scores = reward([rollout_of("", tokens=row) for row in rows])
    assert [score.value for score in scores] == pytest.approx([alone(scorer, row) for row in rows], abs=1e-5)
    assert not any(parameter.requires_grad for parameter in reward.model.parameters())
    assert reward([]) == []


def test_the_bias_survives_and_other_tools_load_the_rest(scorer, saved):
    assert ScalarModel.load(saved, "float32", "cpu").head.bias.item() == pytest.approx(0.7)
    theirs = AutoModelForSequenceClassification.from_pretrained(saved)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert float(theirs(ids).logits) + 0.7 == pytest.approx(alone(scorer, [5, 6, 7]), abs=1e-5)


def test_an_answer_beyond_the_context_is_not_scored(policy, saved):
    reward = RewardModelReward.load(part(saved), policy)
    short, long = reward([rollout_of("", tokens=[1, 2]), rollout_of("", tokens=[1] * 257)])
    assert short.valid and not long.valid and long.parts == {"failed/too_long": 1.0}


def test_another_vocabulary_is_read_as_text(saved):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["something"])
    reward = RewardModelReward.load(part(saved), describe(tiny_model(0), tokenizer))
    assert reward.reads == "text" and "(vocabulary size 258, not 259)" in reward.notices[0]


def test_what_is_no_reward_model_is_refused(policy, saved, tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no saved reward model"):
        RewardModelReward.load(part(tmp_path), policy)
    policy.model.save_pretrained(tmp_path / "lm")
    with pytest.raises(ConfigError, match="is not a reward model"):
        RewardModelReward.load(part(tmp_path / "lm"), policy)
    (tmp_path / "bare").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / file).write_bytes((saved / file).read_bytes())
    with pytest.raises(ConfigError, match="no tokenizer beside the reward model"):
        RewardModelReward.load(part(tmp_path / "bare"), policy)
    (tmp_path / "bare" / "scalar_head.json").write_text("[]")
    with pytest.raises(ConfigError, match="could not be loaded as a reward model"):
        ScalarModel.load(tmp_path / "bare", "float32", "cpu")


def test_ppo_learns_from_a_reward_model_and_a_rule(capsys, saved, tmp_path: Path):
    parts = [{"kind": "model", "path": str(saved), "name": "rm"}, {"kind": "ended", "weight": 0.1}]
    words = ["train", "ppo", "--json", "--model.device", "cpu", "--run.steps", "1", "--run.directory", str(tmp_path)]
    words += ["--rollout.prompts_per_step", "8", "--rollout.max_new_tokens", "4", "--run.save", "false"]
    assert cli.main([*words, "--reward.parts", json.dumps(parts)]) == 0
    [metrics] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert metrics["score"] == pytest.approx(metrics["reward/rm"] + 0.1 * metrics["reward/ended"], abs=1e-4)
    assert metrics["reward/rm/failed"] == 0


@pytest.mark.parametrize("mode", ["shared_backbone", "lora"])
def test_a_reward_model_on_the_backbone_that_the_roles_share(capsys, tmp_path: Path, mode: str):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "chosen": "yes", "rejected": "no"}\n' * 4)
    shared = ["--model.device", "cpu", "--json", "--roles.mode", mode, "--run.steps", "1", "--run.directory"]
    shared += [str(tmp_path), "--roles.trainable_layers", "1"]
    assert cli.main(["train", "reward", *shared, "--run.name", "rm", "--data.train", str(pairs)]) == 0
    words = ["train", "ppo", *shared, "--rollout.prompts_per_step", "4", "--rollout.max_new_tokens", "3"]
    parts = {"kind": "model", "path": str(tmp_path / "rm" / "model"), "shared": True}
    assert cli.main([*words, "--run.name", "on", "--run.save", "false", "--reward.parts", json.dumps([parts])]) == 0
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert metrics["reward/model/failed"] == 0 and metrics["score"] == pytest.approx(metrics["reward/model"], abs=1e-5)
    if mode == "lora":
        parts["shared"] = False
        assert cli.main([*words, "--run.name", "off", "--reward.parts", json.dumps([parts])]) == 2
        assert "holds adapters: set shared: true" in capsys.readouterr().err
