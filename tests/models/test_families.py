"""Models of other families than Llama: how each is loaded, adapted, cut, sampled from, saved and loaded back."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    MptConfig,
    PretrainedConfig,
    PreTrainedModel,
    RwkvConfig,
)

from tether.errors import ConfigError
from tether.hub.tiny_model import END_ID, PAD_ID, tiny_tokenizer
from tether.models.backbones import OutputLayer, ScalarHead, backbone_of, hidden_states, shared_tree
from tether.models.load import describe, load_causal_lm
from tether.models.lora import target_names
from tether.models.save import save_model
from tether.models.scalar_models import ScalarModel
from tether.models.shared_backbone import check_split
from tether.models.sharing import Adapters, Separate, Tops
from tether.plan.workload import Shape
from tether.rollout.native import NativeEngine
from tether.types import Sequences

IDS = {"bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
SIZES = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
GEMMA2 = Gemma2Config(**SIZES, **IDS, query_pre_attn_scalar=16, sliding_window=8)
GPT2 = GPT2Config(vocab_size=264, n_embd=32, n_layer=2, n_head=2, n_positions=64, **IDS)
GPT_OSS = GptOssConfig(
    **SIZES,
    **IDS,
    num_local_experts=2,
    num_experts_per_tok=2,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)
GRANITE = GraniteConfig(**SIZES, **IDS, logits_scaling=4.0)
MAMBA = MambaConfig(vocab_size=264, hidden_size=32, num_hidden_layers=2, state_size=4, **IDS)
MPT = MptConfig(vocab_size=264, d_model=32, n_layers=2, n_heads=2, max_seq_len=64, **IDS)


def made(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    return model


def saved(config: PretrainedConfig, folder: Path) -> str:
    return str(save_model(made(config), tiny_tokenizer(), folder / "model"))


def load(path: str | Path, **options: str):
    return load_causal_lm(str(path), dtype="float32", device="cpu", seed=0, **options)


def probe() -> Sequences:
    tokens = torch.arange(10, 34).reshape(2, 12)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    return Sequences(tokens=tokens, attention_mask=mask, response_mask=mask)


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=probe().tokens, use_cache=False).logits


@pytest.mark.parametrize("config", [GEMMA2, GPT_OSS], ids=["soft caps", "attention sinks"])
def test_a_model_whose_attention_sdpa_does_not_compute_is_loaded_with_eager(config, tmp_path: Path):
    model = load(saved(config, tmp_path)).model
    assert model.config._attn_implementation == "eager"
    assert torch.allclose(logits(model), logits(made(config)), atol=1e-5)


@pytest.mark.parametrize(
    ("config", "said"),
    [(GEMMA2, r"model\.attention is sdpa.*cap of 50.*auto or eager"), (GPT_OSS, r"model\.attention is sdpa.*use auto")],
    ids=["soft caps", "attention sinks"],
)
def test_asking_for_sdpa_where_it_is_wrong_names_the_setting(config, said: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=said):
        load(saved(config, tmp_path), attention="sdpa")


def test_other_models_keep_sdpa(tmp_path: Path):
    assert load(saved(LlamaConfig(**SIZES, **IDS), tmp_path)).model.config._attn_implementation == "sdpa"


def test_gpt2_gets_adapters_that_are_saved_and_merged_back(tmp_path: Path):
    base = load(saved(GPT2, tmp_path)).model
    assert target_names(backbone_of(base), "all-linear") == ["c_attn", "c_fc", "c_proj"]
    before = logits(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharing = Adapters(base, rank=4, alpha=8.0, targets="all-linear", seed=0)
    assert torch.equal(logits(sharing.policy), before)  # B is zero
    adapters = [parameter for name, parameter in sharing.policy.named_parameters() if "lora_" in name]
    assert len(adapters) == 2 * 2 * 4  # A and B of the four layers in each of two blocks
    with torch.no_grad():
        for parameter in adapters:
            parameter.add_(0.1)
    trained = logits(sharing.policy)
    assert not torch.allclose(trained, before, atol=1e-2)
    again = load(save_model(sharing.policy, tiny_tokenizer(), tmp_path / "adapters")).model
    assert torch.allclose(logits(again), trained, atol=1e-4)


def test_a_reward_model_of_a_family_without_a_classifier_is_saved_and_loaded(tmp_path: Path):
    policy = made(GRANITE)
    head = ScalarHead.like_output(policy, deviation=1.0, seed=1)
    reward = ScalarModel(Separate(policy).scalar_backbone(0), head, "reward")
    with torch.no_grad():
        reward.head.bias.fill_(0.25)
        expected = reward(probe()).scores
    again = ScalarModel.load(save_model(reward, tiny_tokenizer(), tmp_path / "reward"), "float32", "cpu")
    with torch.no_grad():
        assert torch.allclose(again(probe()).scores, expected, atol=1e-5)


def test_adapters_of_such_a_reward_model_come_back(tmp_path: Path):
    sharing = Adapters(made(GRANITE), rank=4, alpha=8.0, targets="all-linear", seed=0)
    head = ScalarHead.like_output(sharing.base, deviation=1.0, seed=1)
    reward = ScalarModel(sharing.scalar_backbone(3), head, "reward")
    with torch.no_grad():
        for parameter in reward.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)
        expected = reward(probe()).scores
        again = sharing.load_scalar(save_model(reward, tiny_tokenizer(), tmp_path / "reward"), "reward")
        assert torch.allclose(again(probe()).scores, expected, atol=1e-5)


def test_a_model_without_a_cache_is_refused_before_anything_is_sampled():
    with pytest.raises(ConfigError, match=r"model\.path: MambaForCausalLM returns no cache"):
        NativeEngine(describe(made(MAMBA), tiny_tokenizer()))


@pytest.mark.parametrize("config", [MAMBA, MPT], ids=["layer types that are worked out", "norm_f"])
def test_backbones_that_can_be_cut_are(config: PretrainedConfig):
    model = made(config)
    whole = hidden_states(backbone_of(model), probe())
    assert torch.allclose(Tops(model, 1).policy_backbone()(probe()), whole, atol=1e-5)


class NamesItsLayers(LlamaModel):
    """A backbone that counts on its second layer."""

    def forward(self, *args, **given):
        assert self.layers[1] is not None
        return super().forward(*args, **given)


def test_layers_that_do_not_run_alone_are_refused_in_a_sentence():
    with pytest.raises(ConfigError, match=r"roles\.mode: NamesItsLayers cannot be cut"):
        check_split(NamesItsLayers(LlamaConfig(**SIZES, **IDS)).eval(), 1)


def test_a_model_without_attention_has_a_shape():
    shape = Shape.of(made(MAMBA))
    assert (shape.layers, shape.hidden, shape.vocabulary) == (2, 32, 264)


def test_an_output_layer_that_cannot_be_described_is_the_users_to_change():
    model = made(LlamaConfig(**SIZES, **IDS))
    model.config.logit_scale = 3.0  # which the model itself does not use
    with pytest.raises(ConfigError, match=r"model\.path: the output layer of LlamaForCausalLM"):
        OutputLayer.of(model)


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_trees_that_share_a_quantised_base_compute_the_same(bits: str, tmp_path: Path):
    """The first pass takes the codes off the weight: a second tree once read them as numbers, off by 132 %."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import BitsAndBytesConfig

    config = LlamaConfig(**SIZES | {"hidden_size": 64, "num_key_value_heads": 2, "head_dim": 32}, **IDS)
    path = saved(config, tmp_path)
    options = {"load_in_8bit": True} if bits == "8bit" else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    base = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=BitsAndBytesConfig(**options), device_map={"": "cpu"}
    )
    sharing = Adapters(base, rank=4, alpha=8.0, targets="all-linear", seed=0)
    reference, policy, critic = sharing.reference()[0], sharing.policy_backbone(), sharing.scalar_backbone(1)
    with torch.no_grad():
        expected = hidden_states(backbone_of(load(path).model), probe())
        states = [backbone.plain(probe()) for backbone in (reference, policy, critic)]
    assert (states[0] - expected).norm() < (0.1 if bits == "8bit" else 0.5) * expected.norm()
    assert all(torch.equal(each, states[0]) for each in states)
    again = shared_tree(base)  # after passes have been made, too
    with torch.no_grad():
        assert torch.equal(hidden_states(backbone_of(again), probe()), states[0])
    assert Shape.of(base).linears == Shape.of(made(config)).linears


@pytest.mark.parametrize(
    ("family", "method", "mode", "result"),
    [
        ("gemma2", "ppo", "lora", "fast"),
        ("gpt2", "dpo", "lora", "slow"),
        ("granite", "reward", "separate", "slow"),
        ("mamba", "grpo", "separate", "refused"),
        ("qwen3", "sft", "shared_backbone", "fast"),
    ],
)
def test_cells_of_the_matrix(
    family: str, method: str, mode: str, result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run of two steps from a folder, saved and loaded back, as benchmarks/families.py makes them by the hundred."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import families
    from family_models import save_family

    families.write_data(tmp_path)
    assert save_family(family, tmp_path / "model") is None
    options = SimpleNamespace(device="cpu", dtype="float32")
    cell = families.run_cell(family, f"{method}/{mode}", (method, mode, {}), tmp_path, options)
    assert cell.result == result, cell.detail


def test_states_come_out_in_the_dtype_of_the_weights():
    class Float32Residual(torch.nn.Module):
        """As Mamba has it: weights in half precision, a residual stream in float32."""

        dtype = torch.bfloat16

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool):
            return SimpleNamespace(last_hidden_state=torch.zeros(*input_ids.shape, 4))

    real = torch.ones(1, 3, dtype=torch.bool)
    batch = Sequences(tokens=torch.zeros(1, 3, dtype=torch.long), attention_mask=real, response_mask=real)
    assert hidden_states(Float32Residual(), batch).dtype == torch.bfloat16


def test_rwkv_saved_after_an_evaluation_is_the_model_that_was_loaded(tmp_path: Path):
    """Evaluation divides the weights of later layers in place unless it is kept from it."""
    config = RwkvConfig(vocab_size=264, hidden_size=32, num_hidden_layers=3, rescale_every=2, context_length=64, **IDS)
    model = load(saved(config, tmp_path)).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_mamba_gets_adapters_on_the_layers_that_take_them(tmp_path: Path):
    loaded = load(saved(MAMBA, tmp_path))
    sharing = Adapters(loaded.model, rank=4, alpha=8.0, targets="all-linear", seed=0)
    names = {name.split(".")[-4] for name, _ in sharing.policy.named_parameters() if "lora_A" in name}
    assert "in_proj" in names and "out_proj" not in names
