"""The GPU engine's logic on a CPU, through its plain kernels: slots, refill, shared prompts, state on the device."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.lora import LoraLayer

from tether.accel import engine as accel_engine
from tether.accel.decode_gpu import plain_step
from tether.accel.decode_gpu.gpu_decoder import LOOK, PREFILL_TOKENS, DecoderCache, GpuBatch, GpuDecoder, bucket
from tether.accel.decode_gpu.slots import Lasting, slot_bytes, slots_that_fit
from tether.accel.spec import DecoderSpec
from tether.hub.tiny_model import tiny_tokenizer
from tether.models.load import LoadedModel, describe
from tether.models.lora import inject_lora, lora_config
from tether.protocols import Sampling
from tether.rollout.native import LogitsNotFinite, NativeEngine
from tether.types import Prompt

OFTEN = tuple(range(0, 256, 10))  # stop tokens that end an answer after about ten tokens, at different steps
SHAPE: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": 257,
    "pad_token_id": 256,
    "bos_token_id": None,
}


def gpu_engine(loaded: LoadedModel, **given: Any) -> NativeEngine:
    """An engine that takes the GPU's way on this model, wherever it lies."""
    engine = NativeEngine(loaded, **given)
    fast = engine.fast
    assert fast is not None

    def draw(base, request, slots, check, _):
        return fast.draw_on_gpu(base, request, min(slots, len(request.groups)), check)

    fast.draw = draw
    return engine


def build(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")(**SHAPE | more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(23, stop_token_ids=OFTEN),
        Sampling(12, temperature=0.7),
        Sampling(12, temperature=1.5, top_k=20, top_p=0.9),
        Sampling(12, temperature=0.0),
    ],
    ids=["whole", "cool", "truncated", "greedy"],
)
@pytest.mark.parametrize("slots", [1, 4, 12, 64])
def test_the_samples_are_those_of_the_cpu_decoder(
    exact: LoadedModel, prompts: list[Prompt], sampling: Sampling, slots: int, assert_same_rollouts
):
    given: dict[str, Any] = {"samples_per_prompt": 3, "seed": 5}
    expected = NativeEngine(exact).generate(prompts, sampling, **given)
    found = gpu_engine(exact, max_num_seqs=slots).generate(prompts, sampling, **given)
    assert_same_rollouts(found, expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.untruncated_logprobs, other.untruncated_logprobs, atol=1e-5)


class Returned(Lasting):
    """Memory that can be handed back, as a GPU's can: what it holds is then lost, but not its address."""

    def take(self) -> None:
        self.mapped = True

    def hand_back(self) -> None:
        self.mapped = False
        self.bytes.fill_(255)  # NaN in every float


def test_a_decoder_is_kept_between_calls_and_its_memory_is_not(
    exact: LoadedModel, prompts: list[Prompt], assert_same_rollouts, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tether.accel.decode_gpu.slots.cache_memory", Returned)
    engine = gpu_engine(exact, max_num_seqs=8)
    engine.generate(prompts, Sampling(20, temperature=0.3), samples_per_prompt=4, seed=9)
    kept = engine.fast.gpu.decoder
    assert kept is not None and not kept.cache.memory.mapped and kept.cache.keys.isnan().all()
    again = engine.generate(prompts[2:5], Sampling(9, stop_token_ids=OFTEN), samples_per_prompt=3, seed=1)
    assert engine.fast.gpu.decoder is kept and engine.fast.gpu.made == 1
    fresh = gpu_engine(exact).generate(prompts[2:5], Sampling(9, stop_token_ids=OFTEN), samples_per_prompt=3, seed=1)
    assert_same_rollouts(again, fresh)
    engine.generate(prompts, Sampling(90), samples_per_prompt=1, seed=1)
    assert engine.fast.gpu.made == 2, "longer answers need a longer cache"


def test_memory_that_cannot_be_handed_back_goes_with_the_decoder(exact: LoadedModel, prompts: list[Prompt]):
    engine = gpu_engine(exact, max_num_seqs=8)
    engine.generate(prompts, Sampling(3), samples_per_prompt=1, seed=9)
    assert engine.fast.gpu.decoder is None and engine.fast.gpu.cache_bytes > 0


def test_a_cache_that_finds_too_little_memory_has_fewer_slots(monkeypatch: pytest.MonkeyPatch):
    def scarce(size: int, device: torch.device) -> Lasting:
        if size > 3 * slot_bytes(DecoderSpec.from_model(model), 128):
            raise torch.cuda.OutOfMemoryError("none is free")
        return Returned(size, device)

    model = build("Llama")
    monkeypatch.setattr("tether.accel.decode_gpu.slots.cache_memory", scarce)
    decoders = DecoderCache()
    decoder = decoders.ready(model, 16, 20, 4)
    assert decoder.slots == 2 and decoder.length == 128
    assert decoders.ready(model, 16, 20, 4) is decoder, "asking again finds no more"
    decoders.release()
    monkeypatch.setattr(
        "tether.accel.decode_gpu.gpu_decoder.free_memory", lambda _: slot_bytes(DecoderSpec.from_model(model), 128)
    )
    assert decoders.ready(model, 16, 20, 4).slots == 1, "what is free now does not hold two"


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3", "Olmo2"])
@torch.inference_mode()
def test_the_logits_are_the_models_own(kind: str):
    model = build(kind)
    expected = torch.stack([model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in accel_engine.TRIAL])
    assert torch.allclose(accel_engine.gpu_trial(model), expected, atol=1e-5)


NARROW: dict[str, dict[str, Any]] = {  # windows and caps that show, and layers that differ in them
    "Mistral": {"sliding_window": 5},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Gemma2": {
        "sliding_window": 5,
        "query_pre_attn_scalar": 4,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "Gemma3": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize("kind", NARROW)
def test_windows_caps_and_several_rotary_tables_are_the_models_own(
    kind: str, prompts: list[Prompt], assert_matches_plain_forward
):
    loaded = describe(build(kind, **NARROW[kind]).float(), tiny_tokenizer())
    engine = gpu_engine(loaded, max_num_seqs=4)
    sampling = Sampling(9, temperature=0.9, stop_token_ids=OFTEN)
    rollouts = engine.generate(prompts, sampling, samples_per_prompt=2, seed=0)
    assert engine.notices == ()
    assert_matches_plain_forward(loaded.model, rollouts, sampling)


@torch.inference_mode()
def test_adapters_are_applied():
    model = build("Llama")
    for parameter in inject_lora(model, lora_config(4, 8.0, ["k_proj", "o_proj", "up_proj"]), seed=0):
        parameter.normal_(std=0.3)
    model.double()
    expected = torch.stack([model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in accel_engine.TRIAL])
    assert torch.allclose(accel_engine.gpu_trial(model), expected, atol=1e-5)


@torch.inference_mode()
def answers(model: Any, prompts: dict[int, list[int]], groups: list[int], slots: int, room: int, stops: set[int]):
    """What each sequence draws, and the batch that drew it."""
    uniforms = 1.0 - torch.rand(len(groups), room, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    decoder = GpuDecoder(model, slots, max(map(len, prompts.values())) + room, room)
    batch = GpuBatch(decoder, slots, prompts, groups, uniforms, Sampling(room), stops)
    return [drawn.tokens.tolist() for drawn in batch.run()], batch


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=6),
    st.integers(1, 20),
    st.integers(1, 20),
)
def test_what_a_sequence_draws_does_not_depend_on_the_slots(shapes: list[tuple[int, int]], slots: int, room: int):
    model = build("Llama")
    prompts = {group: [group + 1] * length for group, (length, _) in enumerate(shapes)}
    groups = [group for group, (_, samples) in enumerate(shapes) for _ in range(samples)]
    stops = set(range(0, 258, 9))
    found, batch = answers(model, prompts, groups, slots, room, stops)
    assert found == answers(model, prompts, groups, len(groups), room, stops)[0]
    for tokens in found:
        assert len(tokens) == room or tokens[-1] in stops
        assert not stops & set(tokens[:-1])
    if len(groups) <= slots:
        assert batch.tokens_read == sum(length - 1 for length, _ in shapes), "each prompt is read once"


def test_freed_slots_are_refilled_and_steps_shrink_when_none_wait():
    groups = list(range(60))
    found, batch = answers(build("Llama"), {g: [g, 1, 2] for g in groups}, groups, 16, 60, set(range(0, 258, 12)))
    lengths = sorted(map(len, found))
    assert lengths[0] < 5 and lengths[-1] > 30, "the test needs answers of different lengths"
    chunked = sum(max(map(len, found[start : start + 16])) for start in range(0, 60, 16))
    assert batch.steps < 0.9 * chunked
    assert batch.slot_steps < 16 * batch.steps, "the last sequences run in a smaller batch"


def test_answers_of_one_length_leave_no_slot_idle():
    found, batch = answers(build("Llama"), {0: [1, 2], 1: [3]}, [0] * 8 + [1] * 8, 16, LOOK + 3, set())
    assert batch.steps == LOOK + 3 and batch.slot_steps == sum(map(len, found))


def test_long_prompts_are_read_in_passes_of_bounded_size(monkeypatch: pytest.MonkeyPatch):
    widths: list[int] = []
    read = torch.nn.Embedding.forward

    def counted(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        widths.append(ids.numel())
        return read(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", counted)
    monkeypatch.setattr("tether.accel.decode_gpu.gpu_decoder.PREFILL_TOKENS", 64)
    answers(
        build("Llama"), {g: [1] * length for g, length in enumerate((70, 31, 30, 29, 3))}, list(range(5)), 5, 1, set()
    )
    assert PREFILL_TOKENS > 64 and widths[:-1] == [69, 60, 56], "one prompt is too long, then two and two by length"


def test_logits_that_are_not_finite_are_named(exact: LoadedModel, prompts: list[Prompt]):
    model = build("Llama")
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    engine = gpu_engine(exact)
    engine.loaded = dataclasses.replace(exact, model=model)
    with pytest.raises(LogitsNotFinite, match="step 0 of prompt"):
        engine.generate(prompts, Sampling(4), samples_per_prompt=1, seed=0)


def test_a_decoder_serves_the_same_parameters_and_no_others():
    model = build("Llama")
    decoder = GpuDecoder(model, 4, 32, 8)
    assert decoder.serves(32, 8) and not decoder.serves(33, 8) and not decoder.serves(32, 9)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    assert decoder.serves(32, 8), "an update in place"
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    assert not decoder.serves(32, 8)


def test_a_decoder_does_not_serve_once_adapters_are_turned_off():
    model = build("Llama")
    inject_lora(model, lora_config(4, 8.0, ["q_proj"]), seed=0)
    decoder = GpuDecoder(model, 4, 32, 8)
    assert decoder.serves(32, 8)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.enable_adapters(False)
    assert not decoder.serves(32, 8)


@torch.inference_mode()
def test_an_idle_slot_keeps_what_it_had():
    decoder = GpuDecoder(build("Llama"), 2, 8, 3)
    state = decoder.state
    state.live.copy_(torch.tensor([True, False]))
    state.answers.fill_(-7)
    state.limits.fill_(3)
    decoder.step(2, Sampling(3))
    assert state.answers[0, 0] >= 0 and (state.answers == -7).sum() == 5
    assert state.drawn.tolist() == state.columns.tolist() == [1, 0] and state.live.tolist() == [True, False]


def test_slots_are_as_many_as_the_free_memory_holds():
    each = slot_bytes(DecoderSpec.from_model(build("Llama")), 10)
    assert each == 5120, "2 layers x 2 heads x 8 wide x (key, value) x 8 bytes = 512 bytes a token"
    assert slots_that_fit(100, each, free=5120 * 10) == 8, "four fifths of the free memory"
    assert slots_that_fit(5, each, free=5120 * 10) == 5
    assert slots_that_fit(100, each, free=0) == 1


@pytest.mark.parametrize(
    "count, slots, size",
    [(1, 256, 8), (9, 256, 16), (17, 256, 32), (33, 256, 64), (250, 256, 256), (3, 5, 5), (1025, 2000, 1280)],
)
def test_steps_are_captured_for_few_sizes(count: int, slots: int, size: int):
    assert bucket(count, slots) == size


def test_kernels_that_do_not_run_are_said_aloud(monkeypatch: pytest.MonkeyPatch):
    def broken(_: Any) -> None:
        raise ValueError("no C compiler")

    monkeypatch.setattr(accel_engine, "gpu_trial", broken)
    model: Any = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]))
    assert accel_engine.disagreement(model) == "its kernels do not run here (ValueError: no C compiler)"


def test_rotation_keeps_the_type_of_states_where_tables_are_in_float32():
    """OLMo 2's tables are; its keys go into a cache of the model's own type."""
    states, angles = torch.randn(3, 2, 8).bfloat16(), torch.randn(3, 1, 4)
    turned = plain_step.rotate(states, angles.cos(), angles.sin())
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, plain_step.rotate(states.float(), angles.cos(), angles.sin()).bfloat16())
