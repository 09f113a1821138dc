"""`tether export --merge`, `--gguf`, `--push` and the model card, from runs of each kind."""

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from fake_hub import TOKEN, FakeHub
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tether.cli import main
from tether.hub.gguf import open_gguf
from tether.hub.gguf_convert import read_weights
from tether.hub.tiny_model import tiny_model, tiny_tokenizer
from tether.models.gguf_export import heads_of
from tether.models.load import load_causal_lm
from tether.models.save import load_merged
from tether.models.scalar_models import ScalarModel

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def train(folder: Path, method: str, mode: str, name: str, *words: str) -> None:
    given = ["--model.path", str(folder / "base"), "--run.directory", str(folder / "runs"), "--run.name", name]
    given += ["--run.steps", "2", "--roles.mode", mode, "--roles.trainable_layers", "1", "--store.rollouts_every", "0"]
    given += ["--optimizer.policy_lr", "0.01", "--optimizer.critic_lr", "0.01", "--model.device", "cpu"]
    assert main(["train", method, *given, *words, "--json"]) == 0


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base model with a chat template, and runs of each method and mode over it."""
    folder = tmp_path_factory.mktemp("export")
    tiny_model(3).save_pretrained(folder / "base")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "base")
    records = [{"prompt": f"say {n}", "completion": f"word {n}"} for n in range(4)]
    pairs = [{"prompt": f"say {n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(4)]
    for file, rows in {"sft.jsonl": records, "pairs.jsonl": pairs}.items():
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = str(folder / "sft.jsonl")
    compared = str(folder / "pairs.jsonl")
    for mode in ("separate", "lora", "shared_backbone"):
        train(folder, "sft", mode, f"sft-{mode}", "--data.train", data, "--checkpoint.every", "1")
        train(folder, "reward", mode, f"reward-{mode}", "--data.train", compared, "--data.held_out", compared)
    return folder


@pytest.fixture(autouse=True)
def here(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TETHER_STORE", raising=False)
    monkeypatch.chdir(workspace)


def export(capsys, *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["export", *words]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


@pytest.mark.parametrize("mode", ["separate", "lora", "shared_backbone"])
def test_a_merged_folder_says_what_the_run_said(workspace: Path, tmp_path: Path, capsys, mode: str):
    target = tmp_path / "out"
    told = json.loads(export(capsys, f"sft-{mode}", "--merge", "--to", str(target), "--json"))
    assert told["model"] == str(target) and told["check"]["largest"] <= told["check"]["limit"]
    ours = load_causal_lm(str(workspace / "runs" / f"sft-{mode}" / "model"), dtype="float32", device="cpu", seed=0)
    theirs = AutoModelForCausalLM.from_pretrained(target)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours.model(ids).logits, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(target).chat_template == TEMPLATE
    names = {file.name for file in target.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert "adapter_config.json" not in names


def test_adapters_really_changed_the_model(workspace: Path):
    base = load_causal_lm(str(workspace / "base"), dtype="float32", device="cpu", seed=0)
    merged = load_merged(workspace / "runs" / "sft-lora" / "model")
    with torch.no_grad():
        before = base.model(merged.probe).logits[0]
    assert (merged.outputs - before).abs().max() > 1e-2


@pytest.mark.parametrize("mode", ["separate", "lora", "shared_backbone"])
def test_a_merged_reward_model_is_a_classifier(workspace: Path, tmp_path: Path, capsys, mode: str):
    target = tmp_path / "out"
    export(capsys, f"reward-{mode}", "--merge", "--model", str(target))
    merged = load_merged(workspace / "runs" / f"reward-{mode}" / "model")
    theirs = AutoModelForSequenceClassification.from_pretrained(target)
    pad = torch.full((1, 5), theirs.config.pad_token_id)
    padded = torch.cat((torch.cat((merged.probe, pad), dim=1), torch.cat((merged.probe, pad), dim=1)))
    with torch.no_grad():
        score = theirs(padded, attention_mask=padded != theirs.config.pad_token_id).logits[:, 0]
    torch.testing.assert_close(score + ScalarModel.saved_bias(target), merged.outputs.expand(2), atol=1e-5, rtol=1e-5)
    card = (target / "README.md").read_text()
    assert (
        "text-classification" in card and "held_out/accuracy" in card and " to " in card.split("held_out/accuracy")[1]
    )
    again = ScalarModel.load(target, torch.float32, "cpu")
    assert again.head.bias.item() == pytest.approx(ScalarModel.saved_bias(target))


def test_the_card_holds_no_path_and_no_secret(workspace: Path, tmp_path: Path, capsys):
    target = tmp_path / "out"
    export(capsys, "sft-lora", "--merge", "--to", str(target), "--license", "apache-2.0")
    card = (target / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n") and "Trained from `base`" in card and "`sft.jsonl`" in card
    for file in target.iterdir():
        if file.suffix in (".json", ".md", ".jinja"):
            assert str(workspace) not in file.read_text() and "/tmp" not in file.read_text(), file.name
    export(capsys, "sft-lora", "--model", str(tmp_path / "adapters"))
    assert "library_name: peft" in (tmp_path / "adapters" / "README.md").read_text()


def test_a_checkpoint_can_be_merged(tmp_path: Path, capsys):
    export(capsys, "sft-lora", "--merge", "--checkpoint", "1", "--to", str(tmp_path / "one"))
    export(capsys, "sft-lora", "--merge", "--checkpoint", "-1", "--to", str(tmp_path / "last"))
    export(capsys, "sft-lora", "--merge", "--to", str(tmp_path / "model"))
    weights = {
        name: AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "last", "model")
    }
    key = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(weights["last"][key], weights["model"][key])
    assert not torch.equal(weights["one"][key], weights["model"][key])
    assert "1 of 2 steps" in (tmp_path / "one" / "README.md").read_text()


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_gguf_reads_back_by_three_readers(workspace: Path, tmp_path: Path, capsys, kind: str):
    file = tmp_path / "model.gguf"
    told = json.loads(export(capsys, "sft-lora", "--gguf", str(file), "--type", kind, "--json"))
    assert told["gguf_check"]["type"] == kind
    ours = load_causal_lm(str(workspace / "runs/sft-lora/model"), dtype="float32", device="cpu", seed=0)
    fields = GGUFReader(file).fields  # llama.cpp's own reader
    assert fields["general.architecture"].contents() == "llama"
    assert (
        fields["tokenizer.ggml.pre"].contents() == "gpt-2" and fields["tokenizer.chat_template"].contents() == TEMPLATE
    )
    assert fields["tokenizer.ggml.eos_token_id"].contents() == ours.end_id
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    read = read_weights(open_gguf(file), heads_of(ours.model.config))
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, read[name]), f"{name}: transformers and Tether read other numbers"
    ids = torch.tensor([ours.tokenizer.encode("user: say 1\nassistant: ")])
    greedy = [
        model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=ours.pad_id)[0].tolist()
        for model in (ours.model, theirs.eval())
    ]
    assert kind == "q8_0" or greedy[0] == greedy[1]
    if kind == "f32":
        with torch.no_grad():
            assert torch.equal(theirs(ids).logits, ours.model(ids).logits)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing", "--merge"), "nothing"),
        (("sft-separate", "--merge", "--best"), "best"),
        (("reward-shared_backbone", "--gguf", "r.gguf"), "reward model"),
        (("sft-shared_backbone", "--gguf", "model.bin"), "must end in .gguf"),
        (("sft-shared_backbone", "--merge", "--to", "base"), "exists already"),
        (("sft-shared_backbone", "--merge", "--metrics", "m.csv"), "by a second command"),
        (("sft-shared_backbone", "--private"), "--push"),
        (("sft-shared_backbone", "--push", "no-owner"), "OWNER/NAME"),
        (("sft-shared_backbone", "--merge", "--checkpoint", "7", "--to", "x"), "checkpoints after"),
    ],
)
def test_wrong_inputs_are_told_in_a_sentence(capsys, words, said):
    capsys.readouterr()
    code = main(["export", *words])
    error = capsys.readouterr().err
    assert code in (2, 5) and said in error and "Traceback" not in error


# -- the hub ------------------------------------------------------------------------------------------------------


@pytest.fixture
def online(monkeypatch) -> None:
    """Let the client reach the server on loopback; tests have HF_HUB_OFFLINE set."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def point_at(hub: FakeHub, monkeypatch) -> None:
    """What HF_ENDPOINT in the environment sets when the client is imported."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_URL_HOSTS", frozenset({"127.0.0.1"}))


def test_offline_is_told_before_anything_is_computed(monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in export(capsys, "sft-shared_backbone", "--push", "me/tiny", code=2)


def test_push_uploads_the_folder_with_the_users_token(online, tmp_path: Path, monkeypatch, capsys):
    with FakeHub() as hub:
        point_at(hub, monkeypatch)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        told = export(capsys, "sft-lora", "--push", "me/tiny", "--private", "--json")
        assert json.loads(told)["pushed"].endswith("/me/tiny") and TOKEN not in told
        [created] = hub.created
        assert created["name"] == "tiny" and (created.get("visibility") == "private" or created.get("private"))
        folder = tmp_path / "pulled"
        folder.mkdir()
        for name, content in hub.files.items():
            assert TOKEN.encode() not in content
            (folder / name).write_bytes(content)
        assert "# tiny" in (folder / "README.md").read_text()
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_push_that_fails_is_told_in_a_sentence(online, monkeypatch, capsys, tmp_path: Path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert "HF_TOKEN" in export(capsys, "sft-shared_backbone", "--push", "me/tiny", code=2)
    with FakeHub() as hub:
        point_at(hub, monkeypatch)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert "may not write there" in export(capsys, "sft-shared_backbone", "--push", "other/tiny", code=2)
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        error = export(capsys, "sft-shared_backbone", "--push", "me/tiny", code=2)
        assert "does not know the token" in error and "hf_wrong" not in error
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    error = export(capsys, "sft-shared_backbone", "--push", "me/tiny", code=6)
    assert "cannot be reached" in error
