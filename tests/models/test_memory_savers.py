"""What saves memory changes no number: layers that are run again, and a reference that waits elsewhere."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tether.config.load import load_recipe
from tether.config.sections import RolesSettings
from tether.errors import ConfigError
from tether.hub.tiny_model import tiny_model
from tether.mask_cache import loss_size
from tether.models import backbones
from tether.models.backbones import Backbone, CpuOffload, OutputLayer, probe_batch, recompute_layers
from tether.models.load import disable_dropout, quantization
from tether.models.roles import Roles, onto, prefetch
from tether.models.sharing import Separate, build_sharing
from tether.ops.losses import Aggregation
from tether.train.build import build_rl, load_policy
from tether.train.rl import train_rl
from tether.types import Sequences


def batch() -> Sequences:
    tokens = torch.randint(0, 256, (3, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[0, 9:] = False
    mask[2, :3] = False
    return Sequences(tokens=tokens, attention_mask=mask, response_mask=mask & (torch.arange(12) > 4))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=2, n_positions=32))
    disable_dropout(model)
    return model


def gradients(roles: Roles) -> dict[str, torch.Tensor]:
    roles.actor.zero_grad()
    outputs = roles.actor(batch())
    (outputs.logprobs.sum() + outputs.entropy.sum() + outputs.values.square().sum()).backward()
    return {name: p.grad.clone() for name, p in roles.actor.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["separate", "lora", "shared_backbone", "gpt2"])
def test_layers_that_are_run_again_give_the_same_gradient_to_the_bit(mode: str):
    """For a model of a known kind, and for one that its own modules run."""
    model = gpt2() if mode == "gpt2" else tiny_model(seed=1)
    settings = RolesSettings(mode="separate" if mode == "gpt2" else mode, trainable_layers=1, lora_rank=4)
    roles = Roles.build(build_sharing(model, settings, 7), critic="separate", with_reference=False, seed=3)
    with torch.no_grad():  # a head that speaks, so that the critic's layers learn
        roles.actor.critic.head.weight.normal_(0.0, 0.1)
    kept = gradients(roles)
    recompute_layers(roles.actor)
    again = gradients(roles)
    assert kept.keys() == again.keys() and len(kept) > 4
    for name, gradient in kept.items():
        assert torch.equal(again[name], gradient), name


def test_layers_are_really_run_again(monkeypatch):
    roles = Roles.build(Separate(tiny_model(seed=1)), critic=None, with_reference=False, seed=3)
    runs = []
    layer = roles.actor.backbone.model.layers[0].mlp.down_proj
    forward = type(layer).forward
    monkeypatch.setattr(type(layer), "forward", lambda self, x: (runs.append(self is layer), forward(self, x))[1])
    for times in (1, 2):
        runs.clear()
        roles.actor(batch()).logprobs.sum().backward()
        assert sum(runs) == times
        recompute_layers(roles.actor)


def test_a_reference_that_waits_says_the_same():
    here, offload = (
        Roles.build(Separate(tiny_model(seed=1)), critic=None, with_reference=True, seed=0, offload_reference=offload)
        for offload in (False, True)
    )
    assert offload.reference.offload is not None and here.reference.offload is None
    assert torch.equal(offload.evaluate(batch()).ref_logprobs, here.evaluate(batch()).ref_logprobs)


def test_only_a_reference_with_weights_of_its_own_waits():
    sharing = build_sharing(tiny_model(seed=1), RolesSettings(mode="lora", lora_rank=4), 0)
    roles = Roles.build(sharing, critic=None, with_reference=True, seed=0, offload_reference=True)
    assert roles.reference.offload is None


def test_what_waits_is_back_in_host_memory_after_its_visit(monkeypatch):
    module = torch.nn.Linear(3, 3).requires_grad_(False)
    homes, brought = [parameter.data_ptr() for parameter in module.parameters()], []
    offload = CpuOffload(module)
    monkeypatch.setattr(offload, "_brought", lambda home: brought.append(home) or home.clone())  # another memory
    with offload.on_device():
        away = [parameter.data_ptr() for parameter in module.parameters()]
        with offload.on_device():
            pass
        assert [parameter.data_ptr() for parameter in module.parameters()] == away != homes
    assert [parameter.data_ptr() for parameter in module.parameters()] == homes
    assert len(brought) == 2  # once each: a visit within a visit is the same one


def test_what_is_trained_cannot_wait():
    with pytest.raises(AssertionError, match="trained"):
        CpuOffload(torch.nn.Linear(2, 2))


def test_a_batch_put_onto_a_device_is_the_batch():
    moved = onto(batch(), "meta")
    assert moved.tokens.device.type == "meta" and moved.tokens.shape == (3, 12)
    assert onto(batch(), "cpu").tokens.tolist() == batch().tokens.tolist()


def test_what_is_foreseen_of_a_batch_is_what_would_be_found(monkeypatch):
    """A copy stands for the batch on a device: its masks are never looked at, and the roles say the same."""
    roles = Roles.build(Separate(tiny_model(seed=1)), critic="separate", with_reference=True, seed=0)
    here = batch()
    expected, moved = roles.evaluate(here), here.map_tensors(torch.clone)
    prefetch(moved, here)
    aggregation = Aggregation()
    size = loss_size(aggregation, here.response_mask)
    looked = []
    nonzero = torch.Tensor.nonzero
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda x, *given: looked.append(x) or nonzero(x, *given))
    found = roles.evaluate(moved)
    assert loss_size(aggregation, moved.response_mask) == size
    assert not looked
    for name in ("old_logprobs", "ref_logprobs", "values", "final_values"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    roles.evaluate(here.map_tensors(torch.clone))
    assert looked  # of a batch of which nothing is known


@pytest.mark.parametrize("flag", ["model.gradient_checkpointing=true", "roles.offload_reference=true"])
def test_a_run_with_it_is_the_run_without_it(flag: str):
    def metrics(flags: list[str]) -> list[float]:
        small = ["run.steps=2", "rollout.prompts_per_step=4", "rollout.max_new_tokens=4", "ppo.minibatch_size=4"]
        recipe = load_recipe("ppo", None, [f"--{each}" for each in (*small, "ppo.epochs=2", *flags)])
        steps = train_rl(build_rl(recipe, load_policy(recipe)))
        return [step.metrics[name] for step in steps for name in ("loss", "grad_norm/policy", "kl_ref_k3")]

    assert metrics([flag]) == metrics([])


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_fewer_bits_need_a_package_that_the_error_names(monkeypatch, bits: str):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    with pytest.raises(ConfigError, match=rf"model.quantize is {bits}.*tether-rl\[quantize\]"):
        quantization(bits, torch.bfloat16, torch.device("cuda"))


def test_fewer_bits_need_a_device(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: object())
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        quantization("4bit", torch.bfloat16, torch.device("cpu"))
    assert quantization("none", torch.bfloat16, torch.device("cpu")) is None


def test_weights_in_fewer_bits_are_not_trained():
    with pytest.raises(ConfigError, match=r"roles\.mode lora"):
        load_policy(load_recipe("ppo", None, ["--model.quantize=4bit"]))


def test_a_model_that_cannot_run_on_fewer_bits_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Mamba multiplies by the weights of its layers itself, which a quantised layer does not hold as numbers."""
    model: Any = tiny_model(0)

    def forward(*_: object, **__: object) -> None:
        raise NotImplementedError("\"baddbmm_cuda\" not implemented for 'Char'")

    monkeypatch.setattr(model.model.layers[0].mlp.down_proj, "forward", forward)
    with pytest.raises(NotImplementedError):
        OutputLayer.of(model)
    model.is_quantized = True
    with pytest.raises(ConfigError, match=r"model\.quantize: .*cannot run .*set model\.quantize none"):
        OutputLayer.of(model)


def test_a_pass_follows_a_model_to_another_type(monkeypatch: pytest.MonkeyPatch):
    """The pass is chosen as the backbone is made; a model that is converted later must not run by the old one."""
    backbone = Backbone(tiny_model(0).model)
    batch = probe_batch(backbone.model)
    real = batch.attention_mask
    expected = backbone(batch)[real]
    backbone.fast.backend = "fused"  # as if it had been made in half precision, on a device
    monkeypatch.setattr(backbones, "packed_states", lambda *_, **__: pytest.fail("the pass for another type was taken"))
    assert torch.allclose(backbone(batch)[real], expected, atol=1e-5)


def test_a_backbone_that_runs_layers_again_holds_no_graphs(monkeypatch: pytest.MonkeyPatch):
    """Not in evaluation either: a captured pass keeps its activations between two iterations."""
    passed: list[object] = []
    whole = backbones.packed_states

    def watched(*arguments: object, captured: object = None, **named: object) -> object:
        passed.append(captured)
        return whole(*arguments, **named)  # pyright: ignore[reportArgumentType]

    backbone = backbones.Backbone(tiny_model(0).model)
    backbone.fast.captured = object()
    monkeypatch.setattr(backbones, "packed_states", watched)
    with torch.no_grad():
        backbone(batch())
        backbone.recompute()
        backbone(batch())
    backbone(batch())
    assert passed == [backbone.fast.captured, None, None]
