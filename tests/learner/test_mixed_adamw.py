"""AdamW for weights in half precision: masters keep what bf16 would round away, and 8-bit state learns as well."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tether.learner import quantize
from tether.learner.adamw import MixedAdamW, drawn_master
from tether.learner.learner import Learner, LearnerSettings
from tether.learner.quantize import BLOCK, SIGNED, UNSIGNED, Codes
from tether.learner.settings import LearnerSettings as Settings
from tether.types import Loss, Measures, Sequences


def parameter(values: list[float], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def stepped(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        weight.grad = gradient.to(weight.dtype)
        optimizer.step()


def test_steps_too_small_for_bf16_add_up_in_the_master():
    """1e-5 is far below half of the spacing of bf16 at 1 (2^-8): 1,000 such steps are 0.01 or nothing."""
    kept, lost = parameter([1.0], torch.bfloat16), parameter([1.0], torch.bfloat16)
    with_masters = Settings({}, 1).adamw([{"params": [kept], "lr": 1e-5, "name": "policy"}])
    without = Settings({}, 1, masters="none").adamw([{"params": [lost], "lr": 1e-5, "name": "policy"}])
    for optimizer, weight in ((with_masters, kept), (without, lost)):
        stepped(optimizer, weight, [torch.ones(1)] * 1000)
    assert lost.item() == 1.0
    master = with_masters.state[kept]["master"].item()
    assert master == pytest.approx(drawn_master(torch.ones(1).bfloat16(), seed=0).item() - 0.01, abs=1e-4)
    assert kept.item() == torch.tensor(master).bfloat16().item() < 1.0


def test_masters_step_as_fp32_weights_do():
    start = torch.randn(300, generator=torch.Generator().manual_seed(0))
    half = parameter(start.tolist(), torch.bfloat16)
    full = nn.Parameter(drawn_master(half, seed=0))
    gradients = [torch.randn(300, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(1, 20)]
    options = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    mixed, plain = MixedAdamW([{"params": [half]}], **options), torch.optim.AdamW([full], fused=True, **options)
    stepped(mixed, half, gradients)
    stepped(plain, full, gradients)
    assert torch.equal(mixed.state[half]["master"], full.detach())
    assert torch.equal(half.detach(), full.detach().bfloat16())


@settings(max_examples=100, deadline=None)
@given(
    numbers=st.lists(st.floats(-6e4, 6e4, width=16), min_size=1, max_size=50),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_a_drawn_master_rounds_to_its_weight(numbers: list[float], dtype: torch.dtype, seed: int):
    edges = [0.0, 1.0, -2.0, 2.0**-14, 2.0**-24, torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal]
    weights = torch.tensor([*numbers, *edges, *(-edge for edge in edges)]).to(dtype)
    master = drawn_master(weights, seed)
    assert torch.equal(master.to(dtype), weights)
    assert torch.equal(master == 0, weights == 0) and torch.equal(master, drawn_master(weights, seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_fill_the_whole_of_their_cells(dtype: torch.dtype):
    """At 1.5 the spacing is the same on both sides: drawn masters are 0 on average, 1 / sqrt(12) of it apart."""
    spacing = torch.finfo(dtype).eps
    places = (drawn_master(torch.full((40_000,), 1.5, dtype=dtype), 0) - 1.5).double() / spacing
    assert abs(float(places.mean())) < 0.01 and abs(float(places.std()) * math.sqrt(12.0) - 1.0) < 0.01
    assert float(places.max()) > 0.499 and float(places.min()) < -0.499


def test_the_weights_move_on_average_as_their_masters_do():
    """Steps of a tenth of the spacing are nothing to a weight in the middle of its cell; here they are a tenth."""
    spacing = torch.finfo(torch.bfloat16).eps
    weight = parameter([1.5] * 20_000, torch.bfloat16)
    optimizer = MixedAdamW([{"params": [weight]}], lr=0.1 * spacing)
    stepped(optimizer, weight, [-torch.ones(20_000)])
    moved = (weight.detach().double() - 1.5) / spacing
    assert set(moved.tolist()) == {0.0, 1.0}
    assert float(moved.mean()) == pytest.approx(0.1, abs=0.01)


def test_fp32_weights_get_the_optimiser_they_always_had():
    chosen = Settings({}, 1).adamw([{"params": [parameter([1.0], torch.float32)], "name": "policy"}])
    assert type(chosen) is torch.optim.AdamW


@settings(max_examples=60, deadline=None)
@given(
    codes=st.sampled_from([SIGNED, UNSIGNED]),
    exponents=st.lists(st.floats(-12.0, 6.0), min_size=1, max_size=3 * BLOCK),
    seed=st.integers(0, 1000),
)
def test_every_number_of_a_block_is_near_to_what_its_code_says(codes: Codes, exponents: list[float], seed: int):
    x = 10.0 ** torch.tensor(exponents)
    if codes.signed:
        x = x * torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.5, -1.0, 1.0)
    found = codes.open(*codes.close(x), x.shape)
    scales = torch.cat([block.abs().amax().expand(len(block)) for block in x.split(BLOCK)])
    relative = codes.ratio**0.5 - 1.0 + 1e-4
    assert relative < 0.05  # two numbers that are neighbours on the ladder are at most this far from their middle
    bound = torch.maximum(relative * x.abs(), codes.floor * scales) * (1.0 + 1e-5)  # exp() in fp32
    assert ((found - x).abs() <= bound).all()


@pytest.mark.parametrize("codes", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
@pytest.mark.parametrize("count", [0, 1, BLOCK, 5 * BLOCK + 3])
def test_numbers_in_parts_have_the_codes_they_have_together(monkeypatch, codes: Codes, count: int):
    x = torch.randn(count, generator=torch.Generator().manual_seed(0))
    x = x if codes.signed else x.square()
    together = codes.close(x)
    opened = codes.open(*together, x.shape)
    monkeypatch.setattr(quantize, "PART", 2 * BLOCK)
    apart = codes.close(x)
    assert all(torch.equal(*pair) for pair in zip(together, apart, strict=True))
    assert torch.equal(codes.open(*apart, x.shape), opened)


def test_nothing_and_the_largest_are_kept_exactly():
    x = torch.tensor([0.0, -3.0, 0.0, 1.5])
    codes, scales = SIGNED.close(x)
    assert codes.dtype == torch.int8 and scales.tolist() == [3.0]
    opened = SIGNED.open(codes, scales, x.shape)
    assert opened[[0, 2]].tolist() == [0.0, 0.0] and opened[1].item() == pytest.approx(-3.0, rel=1e-6)
    assert UNSIGNED.open(*UNSIGNED.close(torch.zeros(7)), torch.Size([7])).tolist() == [0.0] * 7


def test_a_mean_of_squares_never_becomes_nothing():
    x = torch.tensor([1.0, 1e-12, 1e-30, 0.0])
    found = UNSIGNED.open(*UNSIGNED.close(x), x.shape)
    assert (found > 0).tolist() == [True, True, True, False]
    assert found[1] >= x[1] and found[2] >= x[2]


def regression(eight_bit: bool, dtype: torch.dtype) -> list[float]:
    """Losses of a least-squares problem whose inputs span four magnitudes."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(256, 40, generator=draws) * torch.logspace(-2, 2, 40)
    target = x @ torch.randn(40, generator=draws)
    weight = nn.Parameter(torch.zeros(40, dtype=dtype))
    optimizer = MixedAdamW([{"params": [weight]}], lr=0.05, eight_bit=eight_bit)
    losses = []
    for _ in range(300):
        error = x @ weight.detach().float() - target
        weight.grad = (x.t() @ error / len(x)).to(dtype)
        losses.append(float(error.square().mean()))
        optimizer.step()
    return losses


def test_eight_bit_state_learns_like_the_whole():
    full, eight = regression(False, torch.float32), regression(True, torch.float32)
    assert full[-1] < 1e-2 * full[0]
    assert eight[-1] < 2.0 * full[-1] + 1e-3 * full[0]


def test_eight_bit_state_is_small():
    weight = parameter([0.5] * 4096, torch.float32)
    optimizer = MixedAdamW([{"params": [weight]}], eight_bit=True)
    stepped(optimizer, weight, [torch.ones(4096)])
    kept = sum(value.nbytes for name, value in optimizer.state[weight].items() if name != "step")
    assert kept == 2 * (4096 + 4 * 4096 // BLOCK)


class Twice(nn.Module):
    """A model of one bf16 vector, computed elementwise: this CPU may have no bf16 products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 300).bfloat16())

    def forward(self, batch: Sequences) -> torch.Tensor:
        return (self.weight.float() * (batch.tokens.sum() % 7 + 1.0)).sum()

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"policy": [self.weight]}


class Squared:
    def size(self, batch: Sequences) -> float:
        return float(len(batch))

    def __call__(self, outputs: torch.Tensor, batch: Sequences) -> Loss:
        del batch
        return Loss((outputs - 3.0) ** 2, Measures())


def rows(seed: int) -> Sequences:
    tokens = torch.randint(0, 9, (2, 4), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    return Sequences(tokens=tokens, attention_mask=mask, response_mask=mask)


@pytest.mark.parametrize("state", ["full", "8bit"])
def test_a_resumed_learner_goes_on_bit_for_bit(state: str):
    def learner() -> Learner:
        return Learner(Twice(), LearnerSettings({"policy": 1e-3}, 8, state=state))

    straight, first, second = learner(), learner(), learner()
    for seed in range(6):
        straight.backward(rows(seed), Squared())
        straight.step()
    for seed in range(3):
        first.backward(rows(seed), Squared())
        first.step()
    second.load_state(first.state(copy=True))
    for seed in range(3, 6):
        second.backward(rows(seed), Squared())
        second.step()
    ours, theirs = straight.state(), second.state()
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert "policy/weight/master" in ours.tensors
    for name, tensor in ours.tensors.items():
        assert torch.equal(tensor, theirs.tensors[name]), name


def test_what_is_not_finite_leaves_masters_and_codes_as_they_were():
    learner = Learner(Twice(), LearnerSettings({"policy": 1e-3}, 8, state="8bit"))
    learner.backward(rows(0), Squared())
    learner.step()
    before = learner.state(copy=True)
    learner.backward(rows(1), Squared())
    gradient = learner.named["policy/weight"].grad
    assert gradient is not None
    gradient[0] = math.nan
    assert learner.step().counts["skipped_steps"] == 1
    assert all(torch.equal(tensor, before.tensors[name]) for name, tensor in learner.state().tensors.items())
