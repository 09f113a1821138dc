"""Loading: what is loaded, what is refused and with which words, padding ids, vocabularies and dropout."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

from tether.hub.tiny_model import tiny_model, tiny_tokenizer
from tether.models import load
from tether.models.load import (
    NO_LIMIT,
    check_same_vocabulary,
    describe,
    disable_dropout,
    load_causal_lm,
    resolve_device,
    train_every_embedding,
)


def load_on_cpu(path: str | Path, seed: int = 0):
    return load_causal_lm(str(path), dtype="float32", device="cpu", seed=seed)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_model(7, layers=1, width=16, heads=2).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_tiny_bytes_is_built_from_the_seed():
    loaded = load_on_cpu("tiny-bytes", seed=3)
    assert torch.equal(loaded.model.lm_head.weight, tiny_model(3).lm_head.weight)
    assert (loaded.end_id, loaded.pad_id, loaded.context_length, loaded.notices) == (257, 256, 256, ())
    assert not loaded.model.training


def test_a_saved_folder_comes_back_and_the_random_stream_is_left_alone(saved: Path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    loaded = load_on_cpu(saved)
    assert torch.equal(torch.rand(3), expected)
    original = tiny_model(7, layers=1, width=16, heads=2)
    assert all(torch.equal(value, loaded.model.state_dict()[name]) for name, value in original.state_dict().items())
    assert loaded.tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    assert loaded.model.config._attn_implementation == "sdpa"
    check_same_vocabulary(load_on_cpu("tiny-bytes"), loaded, "critic")


def test_a_folder_that_does_not_exist(tmp_path: Path):
    with pytest.raises(ValueError, match=r"model\.path .*does not exist"):
        load_on_cpu(tmp_path / "nowhere")


def test_a_folder_without_config(tmp_path: Path):
    with pytest.raises(ValueError, match=r"model\.path .*config\.json"):
        load_on_cpu(tmp_path)


def test_a_file(saved: Path):
    with pytest.raises(ValueError, match=r"model\.path .*is a file"):
        load_on_cpu(saved / "config.json")


def test_no_tokenizer(saved: Path):
    for file in saved.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"model\.path .*tokenizer"):
        load_on_cpu(saved)


def test_only_safetensors_are_read(saved: Path):
    torch.save(tiny_model(7, layers=1, width=16, heads=2).state_dict(), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.path .*safetensors"):
        load_on_cpu(saved)


def test_a_damaged_weights_file(saved: Path):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model\.path .*safetensors"):
        load_on_cpu(saved)


def test_weights_without_a_head_are_refused_instead_of_invented(saved: Path):
    config = LlamaConfig.from_pretrained(saved)
    LlamaModel(config).save_pretrained(saved)
    with pytest.raises(ValueError, match=r"model\.path .*lacks 1 weights.*lm_head"):
        load_on_cpu(saved)


def test_code_in_a_checkpoint_is_not_run(saved: Path):
    config = json.loads((saved / "config.json").read_text())
    config |= {
        "model_type": "homemade",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ValueError, match=r"model\.path"):
        load_on_cpu(saved)


def test_hub_ids_are_tried_offline_first(monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []

    def unreachable(path: str, **options: object):
        asked.append(bool(options["local_files_only"]))
        assert options["trust_remote_code"] is False and options["use_safetensors"] is True
        raise OSError("We couldn't connect to 'https://huggingface.co'\nmore")

    monkeypatch.setattr(load.AutoConfig, "from_pretrained", lambda path, **options: LlamaConfig())
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", unreachable)
    monkeypatch.setattr(load, "ask_hub", lambda path: None)  # the hub has it, and goes away
    with pytest.raises(ValueError, match=r"model\.path 'acme/model'.*hub.*couldn't connect"):
        load_on_cpu("acme/model")
    assert asked == [True, False]


def test_the_hub_is_asked_once_and_never_for_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No network is reached here, so that the one question fails at once and no download is tried."""
    with pytest.raises(ValueError, match=r"model\.path 'acme/model': no folder .* hub cannot be reached"):
        load_on_cpu("acme/model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(load, "ask_hub", lambda path: pytest.fail(f"{path} is a path"))
    for path in ("runs/nothing", "./model", "out/nothing", "a/b/c", "~/nothing", "model/"):
        with pytest.raises(ValueError, match="this folder does not exist"):
            load_on_cpu(path)


def test_devices(monkeypatch: pytest.MonkeyPatch):
    for cuda, mps, expected in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert resolve_device("auto").type == expected
    with pytest.raises(ValueError, match=r"model\.device is cuda"):
        resolve_device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"model\.device is cuda:2.*last one is cuda:1"):
        resolve_device("cuda:2")
    with pytest.raises(ValueError, match=r"model\.device is mps"):
        resolve_device(torch.device("mps"))


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
def test_half_precision_is_refused_on_the_cpu(dtype: str | torch.dtype):
    with pytest.raises(ValueError, match="use float32 on CPU"):
        load_causal_lm("tiny-bytes", dtype=dtype, device="cpu", seed=0)


def small(**options: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=258, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, **options
        )
    )


def test_pad_equal_to_end_is_replaced():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    loaded = describe(small(), tokenizer)
    assert loaded.pad_id != loaded.end_id
    assert 0 <= loaded.pad_id < 258
    assert "pads with its end token" in loaded.notices[0]


def test_a_missing_pad_prefers_the_unknown_token():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    assert "has no padding token" in describe(small(), tokenizer).notices[0]
    assert describe(small(), tokenizer).pad_id == 0
    tokenizer.unk_token = "Q"
    assert describe(small(), tokenizer).pad_id == tokenizer.convert_tokens_to_ids("Q")


def test_a_pad_without_embedding_is_replaced_and_the_extra_tokens_are_noticed():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    loaded = describe(small(), tokenizer)
    assert loaded.pad_id < 258
    assert "259 tokens" in loaded.notices[0] and "no embedding" in loaded.notices[1]


def test_no_end_token_is_an_error():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"model\.path: the tokenizer has no end token"):
        describe(small(), tokenizer)


def test_other_end_tokens_and_unknown_context_are_noticed():
    model = BloomForCausalLM(BloomConfig(vocab_size=258, hidden_size=8, n_layer=1, n_head=1))
    model.generation_config.eos_token_id = [257, 5]
    loaded = describe(model, tiny_tokenizer())
    assert loaded.context_length == NO_LIMIT
    assert loaded.end_ids == {257, 5} and loaded.end_id == 257
    assert any("(5) or " in notice for notice in loaded.notices)
    assert any("no context length" in notice for notice in loaded.notices)


def test_vocabularies_must_agree():
    policy = load_on_cpu("tiny-bytes")
    grown = tiny_tokenizer()
    grown.add_tokens(["extra"])
    elsewhere = tiny_tokenizer()
    elsewhere.eos_token = "&"
    changes = {
        "vocabulary size": dataclasses.replace(policy, tokenizer=grown),
        "end token id: policy 257, reward model 5": dataclasses.replace(policy, tokenizer=elsewhere),
    }
    for words, other in changes.items():
        with pytest.raises(ValueError, match=words):
            check_same_vocabulary(policy, other, "reward model")
    check_same_vocabulary(policy, dataclasses.replace(policy, pad_id=5), "reward model")  # padding is never read


def test_vocabularies_of_one_size_with_other_ids():
    policy = load_on_cpu("tiny-bytes")
    one, two = tiny_tokenizer(), tiny_tokenizer()
    one.add_tokens(["cat"])
    two.add_tokens(["dog"])
    with pytest.raises(ValueError, match="with other ids"):
        check_same_vocabulary(
            dataclasses.replace(policy, tokenizer=one), dataclasses.replace(policy, tokenizer=two), "reference"
        )


def with_dropout(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=258, n_embd=16, n_layer=2, n_head=2, n_positions=32)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.5
        return GPT2LMHeadModel(config)
    return small(attention_dropout=0.5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_dropout_is_gone_even_in_training_mode(kind: str):
    model = with_dropout(kind)
    tokens = torch.arange(12)[None]
    model.train()
    assert not torch.equal(model(tokens).logits, model(tokens).logits), "the test needs a model with real dropout"
    disable_dropout(model)
    assert not model.training
    quiet = model(tokens).logits
    model.train()
    assert torch.equal(model(tokens).logits, quiet)
    assert torch.equal(model(tokens).logits, quiet)
    numbers = {name: value for name, value in vars(model.config).items() if "drop" in name and isinstance(value, float)}
    assert numbers and not any(numbers.values())


def test_loading_takes_dropout_out(saved: Path):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    loaded = load_on_cpu(saved)
    assert loaded.model.config.attention_dropout == 0.0
    assert all(layer.self_attn.attention_dropout == 0.0 for layer in loaded.model.model.layers)


def test_hub_failure_of_the_cache_lets_the_network_speak(monkeypatch: pytest.MonkeyPatch, saved: Path):
    def only_online(real: Any):
        def read(path: str, **options: Any):
            if options["local_files_only"]:
                raise OSError("not cached")
            return real(str(saved), **options)

        return read

    for kind in (load.AutoConfig, load.AutoModelForCausalLM):
        monkeypatch.setattr(kind, "from_pretrained", only_online(kind.from_pretrained))
    monkeypatch.setattr(load.AutoTokenizer, "from_pretrained", lambda path, **options: tiny_tokenizer())
    monkeypatch.setattr(load, "ask_hub", lambda path: None)  # the hub has it
    assert load_on_cpu("acme/model").context_length == 256


def test_the_end_tokens_embedding_is_trained_even_where_it_is_the_pad_token():
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=2
    )
    model = LlamaForCausalLM(config)
    tokens = torch.tensor([[1, 2, 3]])

    def slope_of_row_two():
        model.zero_grad()
        model(tokens).logits.sum().backward()
        return float(model.model.embed_tokens.weight.grad[2].abs().sum())

    assert slope_of_row_two() == 0.0  # the danger is real
    train_every_embedding(model)
    assert slope_of_row_two() > 0.0
