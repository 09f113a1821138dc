"""The exact pass: one token gets the same bits in a slot, in a prompt, packed or padded, whatever it is run with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from test_packed import KINDS
from torch import Tensor

from tether.accel.cpu_decoder import ContinuousBatch
from tether.accel.engine import DecodeRequest, FastDecoder
from tether.accel.exact.exact_decoder import ExactDecoder
from tether.accel.exact.exact_logprobs import LogitTile, exact_logprobs, filled
from tether.accel.exact.exact_pass import exact_states
from tether.accel.exact.key_blocks import KEYS
from tether.accel.exact.products import ROWS, tiled
from tether.accel.fused_pass.packed import packed_states
from tether.accel.supported import exact_unsupported
from tether.ops.logprobs import chunked_logprobs, mask_before, token_logprobs
from tether.ops.sampling import Draw, by_sequence
from tether.protocols import Sampling
from tether.types import Sequences

STOP = 3


def model_of(kind: str, layers: int = 3) -> Any:
    """A causal language model with weights that show."""
    backbone, config = KINDS[kind]
    if layers != config.num_hidden_layers:
        config = type(config)(**config.to_dict() | {"num_hidden_layers": layers})
    torch.manual_seed(0)
    name = backbone.__name__.replace("TextModel", "Model").replace("Model", "ForCausalLM")
    return stirred(getattr(transformers, name)(config).eval())


@torch.no_grad()
def stirred(model: Any) -> Any:
    """The model with random weights of a size at which attention is far from uniform."""
    drawn = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        centre, width = (0.0, 0.3) if parameter.dim() > 1 else (1.0, 0.2)
        parameter.copy_(torch.randn(parameter.shape, generator=drawn) * width + centre)
    return model


Answers = list[tuple[list[int], Draw]]  # each answer's prompt and draws


def sampled(model: Any, lengths: Sequence[int], new: int, slots: int, samples: int = 2) -> Answers:
    """Answers to prompts of these lengths, by the exact decoder."""
    drawn = torch.Generator().manual_seed(2)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    prompts = {
        group: torch.randint(vocabulary, (length,), generator=drawn).tolist() for group, length in enumerate(lengths)
    }
    groups = [group for group in prompts for _ in range(samples)]
    uniforms = 1.0 - torch.rand(len(groups), new, generator=drawn, dtype=torch.float64)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    request = DecodeRequest(prompts, groups, uniforms, Sampling(new), {STOP})
    answers = FastDecoder(exact=True).draw(base, request, slots, lambda *_: None, None)
    return [(prompts[group], answer) for group, answer in zip(groups, answers, strict=True)]


def stepped(model: Any, lengths: Sequence[int]) -> Answers:
    """As many answers as prompts, the first one token long, the next two: every step has one slot fewer."""
    drawn = torch.Generator().manual_seed(2)
    vocabulary, count = model.get_input_embeddings().weight.shape[0], len(lengths)
    prompts = {
        group: torch.randint(vocabulary, (length,), generator=drawn).tolist() for group, length in enumerate(lengths)
    }
    decoder = ExactDecoder(model, count, max(lengths) + count)
    batch = ContinuousBatch(decoder, count, prompts, range(count), room=count)
    given = torch.randint(STOP + 1, vocabulary, (count, count), generator=drawn)
    given[range(count), range(count)] = STOP
    sizes: list[int] = []

    def draw(logits: Tensor, due: list[tuple[int, int]]) -> Draw:
        sizes.append(len(due))
        tokens = torch.stack([given[place] for place in due])
        tiles = zip(filled(logits.t()).split(ROWS), filled(tokens).split(ROWS), strict=True)
        said = torch.cat([LogitTile.of(some.clone()).logprobs(ids) for some, ids in tiles])[: len(due)]
        return Draw(tokens, said, said)

    answers = by_sequence(batch.run(draw, {STOP}), count)
    assert sizes == list(range(count, 0, -1))
    return [(prompts[row], answer) for row, answer in enumerate(answers)]


def batch_of(rows: Sequence[tuple[list[int], Draw]], spare: int = 0) -> tuple[Sequences, Tensor]:
    """The rows padded on both sides, by `spare` columns and more, and what the sampler said of each token (B, T)."""
    width = max(len(prompt) + len(answer.tokens) for prompt, answer in rows) + 2 * spare
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    real, response = torch.zeros(2, len(rows), width, dtype=torch.bool)
    said = torch.zeros(len(rows), width)
    for row, (prompt, answer) in enumerate(rows):
        first = (row % 3) * spare // 2
        middle = first + len(prompt)
        last = middle + len(answer.tokens)
        tokens[row, first:last] = torch.tensor([*prompt, *answer.tokens.tolist()])
        real[row, first:last] = response[row, middle:last] = True
        response[row, :middle] = False
        said[row, middle:last] = answer.behavior
    return Sequences(tokens=tokens, attention_mask=real, response_mask=response), said


def trained(model: Any, batch: Sequences, *, wanted: bool = True) -> Tensor:
    """(B, T) log-probs as training computes them."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = exact_states(base.model, batch, None, mask_before(batch.response_mask) if wanted else None)
    cap = getattr(base.config, "final_logit_softcapping", None)
    given = hidden, base.lm_head.weight, batch.tokens, batch.response_mask
    return token_logprobs(*given, softcap=cap, by=exact_logprobs)[0]


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    """Equal, and not because there is nothing in them."""
    assert int((ours != theirs).sum()) == 0
    assert float(ours.abs().max()) > 0.1


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_every_family_trains_on_the_samplers_bits(kind: str):
    model = model_of(kind)
    decoder = FastDecoder(exact=True)
    assert decoder.unsupported_reason(model, model) is None
    assert decoder.disagreement(model, model) is None
    rows = sampled(model, (1, 7, KEYS - 5, KEYS + 1), new=12, slots=3)
    for some in (rows[::-1], rows[4:5]):
        batch, said = batch_of(some, spare=4)
        assert_same_bits(trained(model, batch), said)
    batch, said = batch_of(rows)
    everywhere = trained(model, batch, wanted=False)
    assert_same_bits(everywhere, said)
    hidden = packed_states(model.model, batch)
    assert hidden is not None
    given = hidden, model.lm_head.weight, batch.tokens, batch.response_mask
    cap = getattr(model.config, "final_logit_softcapping", None)
    plain, _ = token_logprobs(*given, softcap=cap)
    assert torch.allclose(plain, everywhere, atol=1e-4)  # and it is the model's


@torch.no_grad()
def test_every_number_of_answers_and_every_cut_give_the_same_bits():
    model = model_of("llama", layers=1)
    drawn = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 8, (64,), generator=drawn).tolist()
    rows = stepped(model, lengths)
    for count in range(1, 65):
        some = [rows[place] for place in torch.randperm(64, generator=drawn)[:count].tolist()]
        batch, said = batch_of(some, spare=count % 4)
        assert_same_bits(trained(model, batch), said)


@torch.no_grad()
@pytest.mark.parametrize(("on", "rank"), [(True, 4), (True, 1), (False, 4)])
def test_adapters_sample_and_train_alike(on: bool, rank: int):
    config = LoraConfig(r=rank, target_modules="all-linear", lora_alpha=8)
    base = model_of("llama")
    model = stirred(get_peft_model(base, config).eval())
    if not on:
        model.base_model.disable_adapter_layers()
    rows = sampled(model, (3, 17, 66), new=20, slots=2)
    batch, said = batch_of(rows, spare=2)
    assert_same_bits(trained(model, batch), said)
    model.base_model.enable_adapter_layers()
    changed = int((trained(model, batch) != said).sum())
    assert (changed == 0) is on


@torch.no_grad()
@pytest.mark.parametrize("out", [1, 2, 5, 10, 17])
@pytest.mark.parametrize("width", [1, 5, 9, 33])
def test_a_place_in_the_tile_does_not_matter_for_small_weights(out: int, width: int):
    drawn = torch.Generator().manual_seed(9)
    x, weight = torch.randn(ROWS, width, generator=drawn), torch.randn(out, width, generator=drawn)
    order = torch.randperm(ROWS, generator=drawn)
    assert torch.equal(tiled(x[order], weight), tiled(x, weight)[order])


@torch.no_grad()
def test_adapters_that_add_nothing_leave_the_bits():
    model = model_of("llama")
    rows = sampled(model, (5, 30), new=20, slots=3)
    batch, said = batch_of(rows)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).eval()
    assert_same_bits(trained(adapted, batch), said)


@torch.no_grad()
@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}])
def test_the_log_prob_of_training_is_kept_beside_a_truncated_one(sampling: dict[str, Any]):
    model = model_of("gemma2")
    prompts = {0: [5, 6, 7], 1: [8] * 20}
    uniforms = 1.0 - torch.rand(2, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    request = DecodeRequest(prompts, [0, 1], uniforms, Sampling(16, **sampling), set())
    answers = FastDecoder(exact=True).draw(model, request, 2, lambda *_: None, None)
    rows = [(prompts[row], answer._replace(behavior=answer.untruncated)) for row, answer in enumerate(answers)]
    batch, said = batch_of(rows)
    hidden = exact_states(model.model, batch)
    found, _ = token_logprobs(
        hidden, model.lm_head.weight, batch.tokens, batch.response_mask, by=exact_logprobs,
        temperature=sampling.get("temperature") or 1.0, softcap=model.config.final_logit_softcapping,
    )  # fmt: skip
    assert_same_bits(found, said)
    truncated = any(key in sampling for key in ("top_k", "top_p"))
    assert any(bool((answer.behavior > answer.untruncated).any()) for answer in answers) is truncated


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen2, windows", "olmo2"])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_the_packed_pass(kind: str, recompute: bool):
    model = model_of(kind)
    with torch.no_grad():
        rows = sampled(model, (2, 9, 70), new=10, slots=4)
    batch, _ = batch_of(rows, spare=2)
    wanted = mask_before(batch.response_mask)
    found: list[dict[str, Tensor]] = []
    for exact in (True, False):
        model.zero_grad()
        passed = exact_states if exact else packed_states
        hidden = passed(model.model, batch, None, wanted, recompute=recompute)
        assert hidden is not None
        by = exact_logprobs if exact else chunked_logprobs
        logprobs, entropy = token_logprobs(hidden, model.lm_head.weight, batch.tokens, batch.response_mask, by=by)
        (logprobs.sin().sum() + 0.3 * entropy.sum()).backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, ours in found[0].items():
        scale = float(found[1][name].abs().max())
        assert scale > 0, name
        assert torch.allclose(ours, found[1][name], atol=1e-4 * scale), name


@pytest.mark.parametrize("count", [1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS])
def test_tiles_are_the_product(count: int):
    drawn = torch.Generator().manual_seed(5)
    x, weight = torch.randn(count, 24, generator=drawn), torch.randn(40, 24, generator=drawn)
    assert torch.allclose(tiled(x, weight).double(), x.double() @ weight.double().t(), atol=1e-5)


def test_log_probs_and_entropies_are_those_of_the_plain_way():
    drawn = torch.Generator().manual_seed(6)
    states, weight = torch.randn(50, 8, generator=drawn), torch.randn(300, 8, generator=drawn)
    bias, targets = torch.randn(300, generator=drawn), torch.randint(300, (50,), generator=drawn)
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.5, "bias": bias}, {"softcap": 2.0, "scale": 0.5}]
    for given in settings:
        ours = exact_logprobs(states, weight, targets, **given)
        theirs = chunked_logprobs(states, weight, targets, **given)
        assert torch.allclose(ours[0], theirs[0], atol=1e-5)
        assert torch.allclose(ours[1], theirs[1], atol=1e-5)


def test_a_frozen_output_layer_has_the_same_gradient():
    drawn = torch.Generator().manual_seed(7)
    weight, targets = torch.randn(70, 8, generator=drawn), torch.randint(70, (40,), generator=drawn)
    found: list[Tensor] = []
    for by in (exact_logprobs, chunked_logprobs):
        states = torch.randn(40, 8, generator=torch.Generator().manual_seed(8)).requires_grad_()
        by(states, weight, targets, temperature=0.7)[0].sin().sum().backward()
        assert states.grad is not None
        found.append(states.grad)
    assert torch.allclose(found[0], found[1], atol=1e-5)


def test_what_is_refused_has_a_reason():
    model = model_of("llama")
    assert exact_unsupported(model) is None
    assert "float32" in str(exact_unsupported(model.double()))
    other = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1)
    assert "GPT2" in str(exact_unsupported(transformers.GPT2LMHeadModel(other)))
    odd = model_of("llama")
    odd.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    assert "ReLU" in str(exact_unsupported(odd))
    dora = get_peft_model(model_of("llama"), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)).eval()
    assert "plain LoRA" in str(exact_unsupported(dora.get_base_model(), dora))
