"""`kl.reference`: the KL is to the model that it names, in every role mode; or a sentence says why it cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tether.config.load import load_recipe
from tether.errors import ConfigError
from tether.hub.tiny_model import tiny_model, tiny_tokenizer
from tether.models.backbones import backbone_of, layer_list
from tether.models.load import load_causal_lm
from tether.models.lora import load_config
from tether.models.save import save_model
from tether.models.sharing import Adapters
from tether.plan.machine import Machine
from tether.plan.plan import make_plan
from tether.plan.workload import Lengths, shape_of
from tether.store.folder import RunFolder
from tether.train.build import build_rl, load_policy
from tether.train.resume import forked_recipe, resumable_recipe
from tether.train.rl import RLParts, train_rl
from tether.train.run import train_recipe

SMALL = (
    *("--run.steps", "2", "--rollout.prompts_per_step", "4", "--rollout.max_new_tokens", "4", "--model.device", "cpu"),
    *("--store.top_logprobs", "0", "--run.doctor_every", "0", "--model.dtype", "float32", "--ppo.minibatch_size", "4"),
)
MODES = {
    "separate": (),
    "lora": ("--roles.mode", "lora", "--roles.lora_rank", "2", "--roles.lora_alpha", "4"),
    "shared_backbone": ("--roles.mode", "shared_backbone", "--roles.trainable_layers", "1"),
}
MODES_AND_CRITICS = [(mode, critic) for mode in MODES for critic in ("separate", "head")]


def moved(model: torch.nn.Module, seed: int = 5) -> None:
    """Add noise to parameters, as training would have."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def loaded(folder: Path) -> PreTrainedModel:
    return load_causal_lm(str(folder), dtype="float32", device="cpu", seed=0).model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base, and what training it would have made: a model with another top, another whole model, and adapters."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    base = save_model(tiny_model(seed=1), tokenizer, root / "base")
    top = loaded(base)
    moved(layer_list(backbone_of(top))[1][-1])
    whole = loaded(base)
    moved(whole)
    found = {"base": base, "top": save_model(top, tokenizer, root / "top")}
    found["whole"] = save_model(whole, tokenizer, root / "whole")
    found["wider"] = save_model(tiny_model(seed=1, width=96), tokenizer, root / "wider")
    adapted = Adapters(loaded(base), 3, 6.0, "all-linear", 0)
    for name, parameter in adapted.policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(7))
    found["adapters"] = save_model(adapted.policy, tokenizer, root / "adapters")
    return found


def recipe_of(folders: dict[str, Path], reference: str | Path, *flags: str):
    return load_recipe(
        "ppo", None, [*SMALL, "--model.path", str(folders["base"]), "--kl.reference", str(reference), *flags]
    )


def build(folders: dict[str, Path], reference: str | Path, *flags: str) -> RLParts:
    recipe = recipe_of(folders, reference, *flags)
    return build_rl(recipe, load_policy(recipe))


def logprobs_of(folder: Path, parts: RLParts, batch) -> torch.Tensor:
    """The model's own log-probs of the sampled tokens, by transformers alone."""
    model = loaded(folder)
    with torch.no_grad():
        logits = model(input_ids=batch.tokens, attention_mask=batch.attention_mask.long()).logits / batch.temperature
    after = logits[:, :-1].log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    found = torch.zeros(batch.tokens.shape)
    found[:, 1:] = after
    return found.masked_fill(~batch.response_mask, 0.0)


@pytest.mark.parametrize(("mode", "critic"), MODES_AND_CRITICS)
@pytest.mark.parametrize("reference", ["top", "whole", "adapters"])
def test_the_kl_is_to_the_named_model(folders: dict[str, Path], mode: str, critic: str, reference: str):
    if mode == "shared_backbone" and reference != "top":
        with pytest.raises(ConfigError, match=r"kl\.reference .*was not trained on this model's backbone"):
            build(folders, folders[reference], *MODES[mode], "--roles.critic", critic)
        return
    parts = build(folders, folders[reference], *MODES[mode], "--roles.critic", critic)
    result = next(iter(train_rl(parts)))
    batch = result.experience
    expected = logprobs_of(folders[reference], parts, batch)
    torch.testing.assert_close(batch.ref_logprobs, expected, rtol=1e-4, atol=1e-4)
    difference = (expected - logprobs_of(folders["base"], parts, batch)).masked_fill(~batch.response_mask, 0.0)
    k3 = (difference.exp() - 1 - difference).sum(dim=1).mean().item()  # policy and start are one before the first step
    assert k3 > 0.01 and result.metrics["kl_ref_k3"] == pytest.approx(k3, rel=1e-3)
    start = next(iter(train_rl(build(folders, "start", *MODES[mode], "--roles.critic", critic))))
    assert start.metrics["kl_ref_k3"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_the_runs_own_model_by_its_path_is_the_start(folders: dict[str, Path], mode: str):
    by_path, start = (build(folders, name, *MODES[mode]) for name in (folders["base"], "start"))
    assert by_path.reference_digest == ""
    ours, theirs = ([repr(step.metrics) for step in train_rl(parts)] for parts in (by_path, start))
    strip = lambda rows: [row.split("'seconds")[0] for row in rows]  # noqa: E731
    assert strip(ours) == strip(theirs)


def test_adapters_on_the_same_base_share_it(folders: dict[str, Path]):
    parts = build(folders, folders["adapters"], *MODES["lora"])
    assert parts.roles.reference is not None
    base = parts.roles.actor.backbone.model.get_input_embeddings().weight
    assert parts.roles.reference.backbone.model.get_input_embeddings().weight.data_ptr() == base.data_ptr()
    assert load_config(folders["adapters"]).r == 3, "their rank is their own"
    whole = build(folders, folders["whole"], *MODES["lora"]).roles.reference
    assert whole is not None and whole.backbone.model.get_input_embeddings().weight.data_ptr() != base.data_ptr()


def test_a_reference_may_be_of_another_size_where_nothing_is_shared(folders: dict[str, Path]):
    for mode in ("separate", "lora"):
        assert next(iter(train_rl(build(folders, folders["wider"], *MODES[mode])))).metrics["kl_ref_k3"] > 0
    with pytest.raises(ConfigError, match=r"kl\.reference .*another model .*layers of width 96.* separate"):
        build(folders, folders["wider"], *MODES["shared_backbone"])


def test_it_waits_in_host_memory_and_stays_as_it_is(folders: dict[str, Path]):
    parts = build(folders, folders["whole"], "--roles.offload_reference", "true")
    assert parts.roles.reference is not None and parts.roles.reference.offload is not None
    before = parts.roles.reference.output.weight.clone()
    assert len(list(train_rl(parts))) == 2
    assert torch.equal(before, parts.roles.reference.output.weight)


@pytest.mark.parametrize(
    ("reference", "flags", "message"),
    [
        ("./nowhere", (), r"kl\.reference: there is no run and no model at \./nowhere"),
        ("base", ("--kl.apply_to", "none"), "apply_to is none, so no KL is computed"),
    ],
)
def test_a_wrong_reference_is_one_sentence(folders: dict[str, Path], reference: str, flags: tuple[str, ...], message):
    with pytest.raises(ConfigError, match=message):
        build(folders, folders.get(reference, reference), *flags)


def test_the_plan_counts_it(folders: dict[str, Path]):
    machine = Machine("cpu", "a CPU", 2**34, 2e11, 3e10, "as given")

    def reference_of(name: str, mode: str):
        recipe = recipe_of(folders, folders.get(name, name), *MODES[mode])
        plan = make_plan(recipe, shape_of(str(folders["base"])), Lengths.assumed(8, "as given"), machine)
        return [role for role in plan.memory.roles if role.role == "reference"][-1]

    own = sum(x.nbytes for x in loaded(folders["wider"]).parameters())
    assert reference_of("wider", "separate").weights == own
    assert reference_of("wider", "lora").weights == own
    assert reference_of("start", "lora").weights == 0 and reference_of("adapters", "lora").weights == 0
    assert "adapters" in reference_of("adapters", "lora").what
    assert "another model" in reference_of("top", "shared_backbone").what


def test_resuming_finds_the_same_reference_and_a_fork_may_change_it(folders: dict[str, Path], tmp_path: Path):
    reference = save_model(
        loaded(folders["whole"]),
        tiny_tokenizer(),
        tmp_path / "ref",
    )
    flags = ("--run.directory", str(tmp_path / "runs"), "--run.name", "x", "--checkpoint.every", "1")
    recipe = recipe_of(folders, reference, *flags)
    taken: list[int] = []
    quiet = {"advance": lambda step, metrics: taken.append(step), "notify": lambda text: None}
    assert not train_recipe(recipe, stop=lambda: len(taken) == 1, **quiet).finished
    changed = loaded(folders["top"])
    shutil.move(reference, tmp_path / "kept")
    save_model(changed, tiny_tokenizer(), reference)
    folder = tmp_path / "runs" / "x"
    with pytest.raises(ConfigError, match=r"kl\.reference changed since the run|reference .*changed since the run"):
        train_recipe(resumable_recipe(folder), stop=lambda: False, resume=True, **quiet)
    child, forked = forked_recipe(folder, None, ["--kl.reference", str(folders["top"])])
    assert train_recipe(child, stop=lambda: False, forked=forked, **quiet).finished
    shutil.rmtree(reference)
    shutil.move(tmp_path / "kept", reference)
    assert train_recipe(resumable_recipe(folder), stop=lambda: False, resume=True, **quiet).finished
    assert RunFolder(folder).is_finished
