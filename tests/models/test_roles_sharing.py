"""Three ways to share memory, one behaviour: what the roles compute, own and save."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tether.config.load import load_recipe
from tether.config.sections import RolesSettings
from tether.errors import ConfigError
from tether.hub.tiny_model import tiny_model, tiny_tokenizer
from tether.models.backbones import ScalarHead
from tether.models.load import load_causal_lm
from tether.models.roles import Roles
from tether.models.save import save_model
from tether.models.scalar_models import ScalarModel
from tether.models.sharing import build_sharing
from tether.train.build import build_rl, load_policy
from tether.train.rl import train_rl
from tether.types import Sequences

MODES = ["separate", "lora", "shared_backbone"]


def settings(mode: str) -> RolesSettings:
    return RolesSettings(mode=mode, trainable_layers=1, lora_rank=4)


def made(mode: str, model=None):
    return build_sharing(model if model is not None else tiny_model(seed=1), settings(mode), seed=7)


def batch(rows: int = 3, width: int = 10) -> Sequences:
    tokens = torch.randint(0, 256, (rows, width), generator=torch.Generator().manual_seed(5))
    mask = torch.ones(rows, width, dtype=torch.bool)
    mask[0, 7:] = False
    response = mask.clone()
    response[:, :4] = False
    return Sequences(tokens=tokens, attention_mask=mask, response_mask=response)


def roles_of(mode: str, model=None) -> Roles:
    return Roles.build(made(mode, model), critic="separate", with_reference=True, seed=3)


def step(roles: Roles) -> None:
    """One step of everything that is trained."""
    outputs = roles.actor(batch())
    (outputs.logprobs.sum() + outputs.values.sum()).backward()
    with torch.no_grad():
        for group in roles.actor.parameter_groups().values():
            for parameter in group:
                assert parameter.grad is not None
                parameter.sub_(0.05 * parameter.grad)


@pytest.mark.parametrize("mode", MODES)
def test_before_training_every_mode_computes_the_same(mode):
    plain, shared = roles_of("separate").evaluate(batch()), roles_of(mode).evaluate(batch())
    for name in ("old_logprobs", "ref_logprobs", "values"):
        torch.testing.assert_close(getattr(shared, name), getattr(plain, name), atol=1e-5, rtol=1e-5)
    assert torch.equal(shared.old_logprobs, shared.ref_logprobs)


@pytest.mark.parametrize("mode", MODES)
def test_training_moves_the_policy_and_the_critic_and_never_the_reference(mode):
    roles = roles_of(mode)
    before = roles.evaluate(batch())
    step(roles)
    step(roles)  # a critic's backbone learns once its head is no longer zero, an adapter once its other half is not
    after = roles.evaluate(batch())
    assert not torch.allclose(after.old_logprobs, before.old_logprobs)
    assert not torch.allclose(after.values, before.values)
    assert torch.equal(after.ref_logprobs, before.ref_logprobs)


def unique_bytes(roles: Roles, sharing) -> int:
    modules = [roles.actor, roles.reference.backbone]
    tensors = {p.data_ptr(): p.nbytes for module in modules for p in module.parameters()}
    return sum(tensors.values())


def test_sharing_saves_memory():
    model = tiny_model(seed=1, layers=8)
    one = sum(p.nbytes for p in model.parameters())
    sizes = {}
    for mode in MODES:
        sharing = build_sharing(copy.deepcopy(model), settings(mode), seed=7)
        sizes[mode] = unique_bytes(Roles.build(sharing, critic="separate", with_reference=True, seed=3), sharing) / one
    assert sizes["separate"] > 2.5
    assert sizes["shared_backbone"] < 1.4
    assert sizes["lora"] < 1.4


def test_the_shared_backbone_runs_each_row_once():
    sharing = made("shared_backbone")
    roles = Roles.build(sharing, critic="separate", with_reference=True, seed=3)
    scorer = ScalarModel(
        sharing.scalar_backbone(0), ScalarHead.like_output(sharing.policy, deviation=0.1, seed=0), "reward"
    )
    scorer(batch())
    roles.evaluate(batch())
    for _ in range(4):
        roles.actor(batch())
    assert sharing.shared.rows_run == 3


def test_remembered_states_do_not_depend_on_padding_or_company():
    sharing = made("shared_backbone")
    backbone = sharing.policy_backbone()
    whole = backbone(batch())
    alone = batch().select(torch.tensor([0])).trimmed()
    torch.testing.assert_close(backbone(alone)[0], whole[0, :7], atol=1e-5, rtol=1e-5)
    sharing.shared.memory_bytes = 0  # nothing is remembered any more, and nothing changes
    torch.testing.assert_close(backbone(batch())[1], whole[1], atol=1e-5, rtol=1e-5)
    assert len(sharing.shared._rows) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("critic", ["separate", "head"])
def test_a_ppo_run_in_every_mode(mode, critic):
    flags = ["--run.steps", "2", "--rollout.prompts_per_step", "8", "--rollout.max_new_tokens", "4"]
    flags += ["--roles.mode", mode, "--roles.critic", critic, "--roles.trainable_layers", "1", "--roles.lora_rank", "4"]
    recipe = load_recipe("ppo", None, [*flags, "--optimizer.policy_lr", "1e-2"])
    results = list(train_rl(build_rl(recipe, load_policy(recipe))))
    assert results[0].metrics["kl_ref_k3"] == 0.0
    assert results[1].metrics["kl_ref_k3"] > 0.0
    assert results[1].metrics["logprob_diff_max"] < 1e-4  # the engine samples from the tree that is trained


@pytest.fixture
def base(tmp_path):
    """The tiny model as a folder, which adapters can name as their base."""
    folder = tmp_path / "base"
    tiny_model(seed=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("mode", MODES)
def test_a_saved_policy_loads_with_transformers_or_peft_and_with_tether(mode, base, tmp_path):
    roles = roles_of(mode, load_causal_lm(base, dtype="float32", device="cpu", seed=0).model)
    step(roles)
    step(roles)
    target = save_model(roles.actor.policy, tiny_tokenizer(), tmp_path / "saved")
    rows = batch().select(torch.tensor([1]))
    expected = roles.actor.policy(rows.tokens).logits
    assert not torch.allclose(expected, tiny_model(seed=1)(rows.tokens).logits, atol=1e-3)
    if mode == "lora":
        elsewhere = peft.AutoPeftModelForCausalLM.from_pretrained(target)
    else:
        elsewhere = AutoModelForCausalLM.from_pretrained(target)
    torch.testing.assert_close(elsewhere(rows.tokens).logits, expected, atol=1e-5, rtol=1e-5)
    ours = load_causal_lm(str(target), dtype="float32", device="cpu", seed=0).model
    torch.testing.assert_close(ours(rows.tokens).logits, expected, atol=1e-5, rtol=1e-5)


def test_adapters_that_were_trained_on_adapters_stand_on_them(base, tmp_path):
    folder, models = base, []
    for stage in range(3):
        roles = roles_of("lora", load_causal_lm(folder, dtype="float32", device="cpu", seed=0).model)
        with torch.no_grad():
            for parameter in roles.actor.policy.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(stage)))
        folder = str(save_model(roles.actor.policy, tiny_tokenizer(), tmp_path / f"stage-{stage}"))
        models.append(roles.actor.policy)
    loaded = load_causal_lm(folder, dtype="float32", device="cpu", seed=0).model
    tokens = batch().tokens
    torch.testing.assert_close(loaded(tokens).logits, models[-1](tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_a_saved_reward_model_loads_elsewhere_and_starts_a_critic(mode, base, tmp_path):
    policy = load_causal_lm(base, dtype="float32", device="cpu", seed=0).model
    sharing = made(mode, policy)
    head = ScalarHead.like_output(sharing.policy, deviation=0.1, seed=0)
    model = ScalarModel(sharing.scalar_backbone(0), head, "reward")
    with torch.no_grad():
        head.bias.fill_(0.25)
        for parameter in model.parameter_groups()["reward"]:
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    target = save_model(model, tiny_tokenizer(), tmp_path / "reward")
    rows = batch().select(torch.tensor([1, 2]))
    expected = model(rows).scores
    bias = float(head.bias.detach())
    if mode == "lora":
        elsewhere = peft.AutoPeftModelForSequenceClassification.from_pretrained(target, num_labels=1)
    else:
        elsewhere = AutoModelForSequenceClassification.from_pretrained(target)
    elsewhere.config.pad_token_id = 256
    torch.testing.assert_close(elsewhere(rows.tokens).logits[:, 0] + bias, expected, atol=1e-5, rtol=1e-5)

    fresh = made(mode, load_causal_lm(base, dtype="float32", device="cpu", seed=0).model)
    loaded = fresh.load_scalar(target, "critic")
    torch.testing.assert_close(loaded(rows).scores, expected, atol=1e-5, rtol=1e-5)
    roles = Roles.build(fresh, critic="separate", with_reference=False, seed=3, start_critic_from=loaded)
    torch.testing.assert_close(roles.evaluate(rows).final_values, expected, atol=1e-5, rtol=1e-5)


def test_a_reward_model_of_another_backbone_is_refused(base, tmp_path):
    other = made("shared_backbone", tiny_model(seed=2))
    model = ScalarModel(other.scalar_backbone(0), ScalarHead.like_output(other.policy, deviation=0.1, seed=0), "reward")
    target = save_model(model, tiny_tokenizer(), tmp_path / "reward")
    with pytest.raises(ConfigError, match="backbone"):
        made("shared_backbone").load_scalar(target, "critic")
    with pytest.raises(ConfigError, match="adapters"):
        made("lora").load_scalar(target, "critic")


def test_bad_settings_say_what_to_do():
    with pytest.raises(ConfigError, match="trainable_layers is 2"):
        build_sharing(tiny_model(seed=1), RolesSettings(mode="shared_backbone", trainable_layers=2), seed=0)
    with pytest.raises(ConfigError, match="lora_targets"):
        build_sharing(tiny_model(seed=1), RolesSettings(mode="lora", lora_targets="nothing"), seed=0)
