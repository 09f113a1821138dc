"""Reward models that do not have the policy's tokenizer, or come from elsewhere."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from other_reward_models import byte_tokenizer, save_encoder, save_llama
from rollout_factory import rollout_of

from tether import cli
from tether.config.rewards import ModelPart
from tether.errors import ConfigError
from tether.models.backbones import ScalarHead
from tether.models.load import LoadedModel, load_causal_lm
from tether.models.scalar_models import ClassifierModel, ScalarModel
from tether.models.sharing import Separate
from tether.rewards.model import RewardModelReward, reading_text
from tether.rewards.server import build_service
from tether.types import Message, Prompt


@pytest.fixture(scope="module")
def policy() -> LoadedModel:
    return load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_llama(folder)


def load(folder: Path, policy: LoadedModel | None, **settings) -> RewardModelReward:
    return RewardModelReward.load(ModelPart(kind="model", path=str(folder), **settings), policy)


def logit(model, ids: list[int]) -> float:
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits)


def rollouts():
    return [rollout_of("yes"), rollout_of("no, never", finish="length"), rollout_of("a"), rollout_of("")]


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 8192])
def test_another_tokenizer_reads_text_in_its_own_template(policy, llama, micro_batch_tokens: int):
    folder, model = llama
    tokenizer = byte_tokenizer()
    reward = load(folder, policy, micro_batch_tokens=micro_batch_tokens)
    asked = "<s><|user|>question</s>\n"
    texts = [f"{asked}<|assistant|>{answer}" for answer in ("yes</s>\n", "no, never", "a</s>\n", "</s>\n")]
    wanted = [logit(model, tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    assert [score.value for score in reward(rollouts())] == pytest.approx(wanted, abs=1e-5)
    assert "reads the answers as text" in reward.notices[0] and "vocabulary size 261, not 258" in reward.notices[0]
    assert not any(parameter.requires_grad for parameter in reward.model.parameters())


def test_without_a_template_its_own_end_token_follows_what_ended(policy, tmp_path: Path):
    model = save_llama(tmp_path, template=None)
    tokenizer = byte_tokenizer()
    values = [score.value for score in load(tmp_path, policy)(rollouts()[:2])]
    ended = [*tokenizer.encode("questionyes", add_special_tokens=False), 1]
    cut = tokenizer.encode("questionno, never", add_special_tokens=False)
    assert values == pytest.approx([logit(model, ended), logit(model, cut)], abs=1e-5)


def test_a_pad_token_that_is_the_end_token_does_not_move_the_score(policy, tmp_path: Path):
    """The model's own forward pass would look for the last token that is no padding, and miss the end token."""
    model = save_llama(tmp_path, template=None, pad="</s>")
    ids = [*byte_tokenizer().encode("questionyes", add_special_tokens=False), 1]
    assert load(tmp_path, policy)(rollouts()[:1])[0].value == pytest.approx(logit(model, ids), abs=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_encoder_scores_prompt_and_answer_as_a_pair(policy, tmp_path: Path, kind: str):
    model = save_encoder(tmp_path, kind)
    reward = load(tmp_path, policy, micro_batch_tokens=64)
    assert isinstance(reward.model, ClassifierModel)
    ids = [byte_tokenizer(template=None)("question", answer)["input_ids"] for answer in ("yes", "no, never", "a", "")]
    assert [score.value for score in reward(rollouts())] == pytest.approx([logit(model, row) for row in ids], abs=1e-5)
    long = reward([rollout_of("x" * 80)])[0]
    assert long.parts == {"failed/too_long": 1.0}


def test_what_the_template_refuses_fails_alone(policy, llama):
    prompt = Prompt("p7", (Message(role="system", content="be kind"), Message(role="user", content="question")))
    first, second = load(llama[0], policy)([dataclasses.replace(rollout_of("yes"), prompt=prompt), rollout_of("yes")])
    assert first.parts == {"failed/not_rendered": 1.0} and second.valid
    assert first.error == "the reward model's chat template rejects prompt 'p7': no system turns"
    assert load(llama[0], policy)([rollout_of("x" * 96)])[0].parts == {"failed/too_long": 1.0}


def test_the_policys_tokenizer_is_read_as_tokens_to_the_bit(policy, tmp_path: Path):
    head = ScalarHead.like_output(policy.model, deviation=0.1, seed=3)
    ScalarModel(Separate(policy.model).scalar_backbone(0), head, "reward").save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    reward = load(tmp_path, policy)
    assert reward.reads == "tokens" and "it reads the sampled tokens" in reward.notices[0]
    tokens = [*policy.tokenizer.encode("questionyes"), policy.end_id]
    rows = [rollout_of("yes", tokens=tokens), rollout_of("other words", tokens=tokens)]
    one, other = (reward([row])[0].value for row in rows)
    assert one == other == reward.values([torch.tensor(tokens)])[0], "the text is not looked at"
    same, another = (reading_text(reward)([row])[0].value for row in rows)
    assert same == one and another != one, "a model trained here reads text as it was trained"


def test_same_vocabulary_and_another_template_is_read_as_text(policy, tmp_path: Path):
    head = ScalarHead.like_output(policy.model, deviation=0.1, seed=3)
    ScalarModel(Separate(policy.model).scalar_backbone(0), head, "reward").save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    reward = load(tmp_path, policy)
    assert reward.reads == "text" and "(another chat template)" in reward.notices[0]


def test_a_hugging_face_id_is_read_from_the_cache(policy, llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = tmp_path / "models--maker--judge"
    shutil.copytree(llama[0], place / "snapshots" / "abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    values = [[s.value for s in load(path, policy)(rollouts())] for path in (Path("maker/judge"), llama[0])]
    assert values[0] == values[1]
    with pytest.raises(ConfigError, match=r"reward model .* is here.* the Hugging Face hub cannot be reached"):
        load(Path("maker/absent"), policy)


def test_what_cannot_be_a_reward_model_is_told(policy, llama, tmp_path: Path):
    save_llama(tmp_path / "two", labels=2)
    with pytest.raises(ConfigError, match="needs a saved `score` layer with one output"):
        load(tmp_path / "two", policy)
    save_encoder(tmp_path / "three", "bert", labels=3)
    with pytest.raises(ConfigError, match="it has 3 labels"):
        load(tmp_path / "three", policy)
    shutil.copytree(llama[0], tmp_path / "pickled")
    torch.save({}, tmp_path / "pickled" / "pytorch_model.bin")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="could not be loaded as a reward model"):
        load(tmp_path / "pickled", policy)


def run(capsys, tmp_path: Path, *words: str) -> tuple[int, str, str]:
    few = [
        "--rollout.prompts_per_step",
        "4",
        "--rollout.max_new_tokens",
        "3",
        "--run.steps",
        "1",
        "--run.save",
        "false",
    ]
    code = cli.main(["train", "ppo", "--json", "--model.device", "cpu", "--run.directory", str(tmp_path), *few, *words])
    out, err = capsys.readouterr()
    return code, out, " ".join(err.split())


@pytest.mark.parametrize("mode", ["lora", "shared_backbone"])
def test_shared_with_another_tokenizer_is_refused(capsys, llama, tmp_path: Path, mode: str):
    parts = json.dumps([{"kind": "model", "path": str(llama[0]), "shared": True}])
    code, _, err = run(capsys, tmp_path, "--roles.mode", mode, "--roles.trainable_layers", "1", "--reward.parts", parts)
    assert code == 2 and "has another tokenizer than the policy" in err and "set shared: false" in err


def test_a_critic_from_another_tokenizer_is_refused(capsys, llama, tmp_path: Path):
    code, _, err = run(capsys, tmp_path, "--roles.critic_init", str(llama[0]))
    assert code == 2 and "roles.critic_init: the critic does not share the policy's vocabulary" in err


def test_ppo_learns_from_another_makers_model(capsys, llama, tmp_path: Path):
    code, out, err = run(capsys, tmp_path, "--reward.parts", json.dumps([{"kind": "model", "path": str(llama[0])}]))
    assert code == 0 and json.loads(out.splitlines()[-1])["reward/model/failed"] == 0
    assert "it reads the answers as text" in err


def test_a_server_reads_as_the_run_does(policy, llama):
    service = build_service(str(llama[0]))
    item = {"id": "a", "prompt": "question", "completion": "yes", "finish": "stop"}
    [entry] = service.answer(json.dumps({"version": 1, "items": [item]}).encode())["scores"]
    assert entry["value"] == load(llama[0], policy)(rollouts()[:1])[0].value
