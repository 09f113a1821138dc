"""What the plan says a forward pass keeps, against what autograd is really handed to keep."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tether.config.load import load_recipe
from tether.hub.tiny_model import tiny_tokenizer
from tether.models.load import LoadedModel
from tether.models.roles import Roles, build_sharing
from tether.plan.memory import Held, memory_of, micro_pass
from tether.plan.workload import Lengths, Shape, work_of
from tether.types import Sequences


def wide_model(kv_heads: int) -> LoadedModel:
    """Wide enough that masks and angles count for little."""
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    return LoadedModel(model, tiny_tokenizer(), end_id=257, pad_id=256, context_length=512)


def kept_bytes(run, parameters) -> int:
    """Bytes of all storages that autograd keeps during `run`, each counted once, parameters not at all."""
    ours = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    seen: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours and tensor.is_floating_point():
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(seen.values())


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("mode", ["separate", "lora", "shared_backbone"])
@pytest.mark.parametrize("critic", ["separate", "head"])
def test_activations_are_what_autograd_keeps(mode, critic, kv_heads):
    rows, prompt, new = 8, 24, 40
    flags = {
        "model.dtype": "float32",
        "roles.mode": mode,
        "roles.critic": critic,
        "roles.trainable_layers": "2",
        "roles.lora_rank": "4",
        "rollout.prompts_per_step": rows,
        "rollout.max_new_tokens": new,
        "ppo.minibatch_size": rows,
    }
    recipe = load_recipe("ppo", None, [f"--{key}={value}" for key, value in flags.items()])
    loaded = wide_model(kv_heads)
    shape = Shape.of(loaded.model)
    sharing = build_sharing(loaded.model, recipe.roles, 0)
    actor = Roles.build(sharing, critic=critic, with_reference=True, seed=0).actor
    mask = torch.ones(rows, prompt + new, dtype=torch.bool)
    answers = mask.clone()
    answers[:, :prompt] = False
    tokens = torch.randint(0, 256, mask.shape)
    batch = Sequences(tokens=tokens, attention_mask=mask, response_mask=answers)
    measured = kept_bytes(lambda: actor(batch), actor.parameters())

    work = work_of(recipe, Lengths.assumed(prompt, "as given"))
    memory = memory_of(recipe, shape, work, "cpu")
    assert (memory.micro_rows, memory.micro_batches) == (rows, 1)
    predicted = sum(role.activations for role in memory.roles if role.gradients)
    assert predicted == pytest.approx(measured, rel=0.03)


def test_layers_that_are_run_again_keep_what_enters_them():
    shape = Shape.of(wide_model(6).model)
    recipe = load_recipe("ppo", None, ["--model.dtype=float32"])
    work = work_of(recipe, Lengths.assumed(24, "as given"))
    one = micro_pass(recipe, shape, work, Held.of(recipe, shape, "cpu"), 8)
    again = dataclasses.replace(one, recompute=True)
    assert again.kept(shape) == one.tokens * 4 * (192 * 5 + 2 * shape.head_dim)  # and the angles
    assert again.rerun(shape) == one.layer(shape)
    assert one.rerun(shape) == 0
