"""The native engine on a CUDA device against the model's own forward pass. Skipped where there is none."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tether.accel.decode_gpu import plain_step
from tether.accel.decode_gpu.gpu_decoder import GpuDecoder
from tether.hub.tiny_model import tiny_tokenizer
from tether.models.load import LoadedModel, describe, disable_dropout
from tether.models.lora import inject_lora, lora_config
from tether.protocols import Sampling
from tether.rollout.native import NativeEngine
from tether.types import Prompt, Rollout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPE: dict[str, Any] = {
    "vocab_size": 1500,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 257,
    "pad_token_id": 256,
    "bos_token_id": None,
}
PROMPTS = [Prompt.from_text(f"prompt {i}", text) for i, text in enumerate(["a", "hello " * 20, "xyz" * 9, "seven!!"])]
STOPS = tuple(range(0, 1500, 20))


def build(kind: str = "Llama", dtype: torch.dtype = torch.float32) -> LoadedModel:
    torch.manual_seed(0)
    gemma = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24} if "Gemma" in kind else {}
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")(**SHAPE, **gemma)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    disable_dropout(model)
    return describe(model.to("cuda", dtype).eval(), tiny_tokenizer())


@torch.no_grad()
def gap(loaded: LoadedModel, rollouts: list[Rollout], temperature: float = 1.0) -> float:
    """The largest distance of the untruncated log-probs from the model's own."""
    worst = 0.0
    for rollout in rollouts:
        tokens = rollout.token_ids[None].cuda()
        logits: Tensor = loaded.model(input_ids=tokens, use_cache=False).logits[0, :-1].float() / temperature
        own = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].cpu()
        far = (own - rollout.untruncated_logprobs[1:]).abs()
        worst = max(worst, float(far[rollout.response_mask[1:]].max()))
    return worst


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3", "Olmo2"])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-4), (torch.bfloat16, 0.15)], ids=["float32", "bfloat16"])
def test_logprobs_are_those_of_the_models_own_forward_pass(kind: str, dtype: torch.dtype, limit: float):
    loaded = build(kind, dtype)
    engine = NativeEngine(loaded, max_num_seqs=16)
    assert not engine.notices
    sampling = Sampling(40, temperature=0.8, stop_token_ids=STOPS)
    rollouts = engine.generate(PROMPTS, sampling, samples_per_prompt=12, seed=0)
    assert gap(loaded, rollouts, 0.8) < limit


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(12, stop_token_ids=STOPS),
        Sampling(12, top_k=20, top_p=0.9),
        Sampling(12, temperature=0.7, top_p=0.5),
        Sampling(12, temperature=0.0),
    ],
    ids=["whole", "truncated", "nucleus", "greedy"],
)
def test_the_same_tokens_come_out_as_on_the_general_way(sampling: Sampling):
    loaded = build()
    general = NativeEngine(loaded)
    general._distrusted = "asked for"
    fast = NativeEngine(loaded, max_num_seqs=8)
    given = {"samples_per_prompt": 5, "seed": 3}
    pairs = zip(general.generate(PROMPTS, sampling, **given), fast.generate(PROMPTS, sampling, **given), strict=True)
    for one, other in pairs:
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.allclose(one.behavior_logprobs, other.behavior_logprobs, atol=2e-4)


def test_captured_steps_survive_updates_in_place_and_are_made_again_for_new_parameters():
    loaded = build()
    engine = NativeEngine(loaded, max_num_seqs=8)
    given = {"samples_per_prompt": 2, "seed": 0}
    engine.generate(PROMPTS, Sampling(10), **given)
    decoder = engine.fast.gpu.decoder
    assert decoder is not None and not decoder.cache.memory.mapped, "the cache's memory is handed back"
    captures = decoder.captures
    other = torch.full((64 << 20,), 7.0, device="cuda")  # somebody else has the memory meanwhile
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.1)
    assert gap(loaded, engine.generate(PROMPTS, Sampling(10), **given)) < 2e-4
    assert engine.fast.gpu.decoder is decoder and decoder.captures == captures
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.data = parameter.data * 0.9
    assert gap(loaded, engine.generate(PROMPTS, Sampling(10), **given)) < 2e-4
    assert engine.fast.gpu.decoder is not decoder
    assert bool((other == 7.0).all())


def test_the_cache_takes_its_share_of_what_is_free_and_no_more():
    loaded = build()
    engine = NativeEngine(loaded)
    free = torch.cuda.mem_get_info()[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tether.accel.decode_gpu.gpu_decoder.free_memory", lambda _: 3 << 20)  # a slot takes 256 KiB
        rollouts = engine.generate(PROMPTS, Sampling(10), samples_per_prompt=20, seed=0)
        assert engine.fast.gpu.decoder is not None and engine.fast.gpu.decoder.slots == 9
    assert gap(loaded, rollouts) < 2e-4
    assert free - torch.cuda.mem_get_info()[0] < 256 << 20


def test_engines_that_are_let_go_leave_no_memory_taken():
    loaded, held = build(dtype=torch.bfloat16), []
    for _ in range(3):
        NativeEngine(loaded, max_num_seqs=8).generate(PROMPTS, Sampling(10), samples_per_prompt=2, seed=0)
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[2] == held[1] == held[0]


def test_answers_of_many_lengths_in_many_slots():
    loaded = build()
    rollouts = NativeEngine(loaded).generate(
        PROMPTS, Sampling(60, stop_token_ids=STOPS), samples_per_prompt=150, seed=0
    )
    few = NativeEngine(loaded, max_num_seqs=30).generate(
        PROMPTS, Sampling(60, stop_token_ids=STOPS), samples_per_prompt=150, seed=0
    )
    assert gap(loaded, rollouts) < 5e-4
    same = [torch.equal(a.token_ids, b.token_ids) for a, b in zip(rollouts, few, strict=True)]
    assert sum(same) >= 595, "only a uniform within rounding of a boundary may fall otherwise"


TARGETS = ["q_proj down_proj gate_proj", "v_proj k_proj o_proj up_proj", "q_proj k_proj v_proj gate_proj up_proj"]


def adapted(dtype: torch.dtype, targets: str, kind: str = "Llama") -> LoadedModel:
    loaded = build(kind, dtype)
    parameters = inject_lora(loaded.model, lora_config(24, 48.0, targets.split()), seed=0)
    loaded.model.cuda()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(std=0.05)
    return loaded


@pytest.mark.parametrize("targets", TARGETS)
def test_adapters_are_applied(targets: str):
    loaded = adapted(torch.float32, targets)
    engine = NativeEngine(loaded, max_num_seqs=8)
    assert not engine.notices
    assert gap(loaded, engine.generate(PROMPTS, Sampling(10), samples_per_prompt=2, seed=0)) < 5e-4


@pytest.mark.parametrize(
    "targets", ["", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"], ids=["bare", "lora"]
)
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Olmo2"])
@torch.inference_mode()
def test_fused_reading_of_prompts_is_no_farther_from_the_exact_than_plain_reading(kind: str, targets: str):
    loaded = adapted(torch.bfloat16, targets, kind) if targets else build(kind, torch.bfloat16)
    prompts, slots = [[5, 6, 7], list(range(200)), [9]], [3, 0, 2]
    found = []
    for model, kernels in (
        (copy.deepcopy(loaded.model).double(), plain_step),
        (loaded.model, plain_step),
        (loaded.model, None),
    ):
        decoder = GpuDecoder(model, 5, 256, 1, kernels=kernels)
        decoder.prefill(prompts, slots)
        both = torch.cat([decoder.cache.keys, decoder.cache.values]).double()
        assert not both[:, [1, 4]].any(), "other slots are left alone"
        found.append(torch.cat([both[:, slot, :, : len(ids)] for ids, slot in zip(prompts, slots, strict=True)], dim=2))
    assert decoder.kernels is not plain_step
    exact, plain, fast = found
    assert 0.0 < (fast - exact).norm() <= 1.1 * (plain - exact).norm()


def test_a_graph_that_becomes_garbage_during_a_capture_does_not_spoil_it(monkeypatch: pytest.MonkeyPatch):
    sampling, prompts = Sampling(max_new_tokens=4), PROMPTS[:1]
    old: Any = NativeEngine(build(dtype=torch.bfloat16), max_num_seqs=4)
    old.generate(prompts, sampling, samples_per_prompt=1, seed=0)
    old.itself, held, captured = old, [old], []
    del old
    plain_step_of, before = GpuDecoder.step, gc.get_threshold()

    def step(self: GpuDecoder, n: int, kind: Sampling) -> None:
        if torch.cuda.is_current_stream_capturing():
            held.clear()
            captured.append([[] for _ in range(100)])  # each a reason for the collector to look
        plain_step_of(self, n, kind)

    monkeypatch.setattr(GpuDecoder, "step", step)
    gc.set_threshold(1, 1, 1)
    try:
        engine = NativeEngine(build(dtype=torch.bfloat16), max_num_seqs=4)
        rollouts = engine.generate(prompts, sampling, samples_per_prompt=1, seed=0)
    finally:
        gc.set_threshold(*before)
    assert captured and not held and len(rollouts) == 1
