"""What the plan says a forward pass keeps, against what autograd is really handed to keep."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tether.config.load import load_recipe
from tether.hub.tiny_model import tiny_tokenizer
from tether.models.load import LoadedModel
from tether.models.roles import Roles
from tether.models.sharing import build_sharing
from tether.plan.memory import Held, memory_of, micro_pass
from tether.plan.workload import Lengths, Shape, work_of
from tether.types import Sequences

FAMILIES: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"head_dim": 32, "sliding_window": 512}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
}


def wide_model(kv_heads: int, family: str = "llama") -> LoadedModel:
    """Wide enough that masks and angles count for little."""
    model_class, config_class, more = FAMILIES[family]
    config = config_class(
        vocab_size=258,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
        **more,
    )
    model = model_class(config).eval()
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
    predicted, measured = predicted_and_measured(wide_model(kv_heads), mode, critic)
    assert predicted == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("family", ["gemma3", "olmo2", "qwen3"])
def test_norms_after_a_part_and_of_heads_keep_their_inputs(family, kv_heads):
    predicted, measured = predicted_and_measured(wide_model(kv_heads, family), "separate", "separate")
    assert predicted == pytest.approx(measured, rel=0.03)


def predicted_and_measured(loaded: LoadedModel, mode: str, critic: Literal["separate", "head"]) -> tuple[int, int]:
    """Bytes of activations: the plan's, and what autograd keeps."""
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
    return sum(role.activations for role in memory.roles if role.gradients), measured


def test_layers_that_are_run_again_keep_what_enters_them():
    shape = Shape.of(wide_model(6).model)
    recipe = load_recipe("ppo", None, ["--model.dtype=float32"])
    work = work_of(recipe, Lengths.assumed(24, "as given"))
    one = micro_pass(recipe, shape, work, Held.of(recipe, shape, "cpu"), 8)
    again = dataclasses.replace(one, recompute=True)
    assert again.kept(shape) == one.tokens * 4 * (192 * 5 + 2 * shape.head_dim)  # and the angles
    assert again.rerun(shape) == one.layer(shape)
    assert one.rerun(shape) == 0
