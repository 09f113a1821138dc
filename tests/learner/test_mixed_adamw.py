"""AdamW in half precision: master weights keep what bf16 would round away, and 8-bit state learns as well."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tether.learner import adamw
from tether.learner.adamw import BLOCK, SIGNED, UNSIGNED, Codes, MixedAdamW, drawn_master, draws
from tether.learner.learner import Learner, LearnerSettings
from tether.learner.learner import LearnerSettings as Settings
from tether.types import Loss, Metrics, Sequences


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
    without = Settings({}, 1, master_weights="none").adamw([{"params": [lost], "lr": 1e-5, "name": "policy"}])
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
    """At 1.5 the spacing is the same on both sides: drawn master weights are 0 on average, 1 / sqrt(12) of it apart."""
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


def blocks_of(x: torch.Tensor) -> torch.Tensor:
    """(numbers,) the largest magnitude of each number's block."""
    return torch.cat([block.abs().amax().expand(len(block)) for block in x.split(BLOCK)])


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
    kept, ranges = codes.close(x, seed)
    found = codes.open(kept, ranges, x.shape)
    level = ranges.remainder(8).repeat_interleave(BLOCK)[: len(x)]
    rung = torch.exp2(2.0**-level) - 1.0
    assert float(rung.max()) < 0.091
    lowest = blocks_of(x) * 2.0 ** ((2 - codes.steps) / 8)  # of the coarsest ladder
    bound = torch.maximum(rung * x.abs(), lowest) * (1.0 + 1e-5)  # exp2() in fp32
    assert ((found - x).abs() <= bound).all()


@pytest.mark.parametrize("codes", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_rounding_is_right_on_average(codes: Codes):
    """Also below the lowest rung, where signed numbers are 0 most of the time."""
    draw = torch.Generator().manual_seed(0)
    x = 10.0 ** torch.empty(2 * BLOCK).uniform_(-3.0, 0.0, generator=draw)
    x[0], x[1] = 1.0, 3e-6
    x = x if not codes.signed else x * torch.where(torch.rand(x.shape, generator=draw) < 0.5, -1.0, 1.0)
    keys = 500
    mean = sum(codes.open(*codes.close(x, key), x.shape).double() for key in range(keys)) / keys
    error = torch.full_like(x, 0.045 / math.sqrt(keys))  # at most half a rung, as a deviation
    error[1] = 1.0 if not codes.signed else math.sqrt(2.0 ** (-126 / 8) / 3e-6 / keys)
    assert (((mean - x) / x).abs() <= 5.0 * error).all()


def test_a_number_on_a_rung_stays_there_when_the_range_of_its_block_moves():
    x = 10.0 ** torch.empty(BLOCK).uniform_(-1.0, 0.0, generator=torch.Generator().manual_seed(0))
    kept, ranges = UNSIGNED.close(x, 0)
    on_rungs = UNSIGNED.open(kept, ranges, x.shape)
    for key, factor in ((1, 1.37), (2, 0.4)):
        moved = on_rungs.clone()
        moved[moved.argmax()] *= factor
        codes, now = UNSIGNED.close(moved, key, ranges)
        others = moved == on_rungs
        assert float(now.remainder(8)) >= float(ranges.remainder(8))
        torch.testing.assert_close(UNSIGNED.open(codes, now, x.shape)[others], on_rungs[others], rtol=1e-6, atol=0.0)


def test_a_block_takes_a_finer_level_only_with_room_to_spare():
    """Of 255 codes 253 reach over 7.9 octaves in steps of a 32nd, and 6.9 leave an octave over."""
    for octaves, fresh, from_four in ((7.85, 5.0, 4.0), (6.85, 5.0, 5.0), (8.0, 4.0, 4.0)):
        x = torch.tensor([1.0, 2.0**-octaves])
        assert UNSIGNED.close(x, 0)[1].remainder(8).tolist() == [fresh]
        assert UNSIGNED.close(x, 0, torch.tensor([4.0]))[1].remainder(8).tolist() == [from_four]
        assert UNSIGNED.close(x, 0, torch.tensor([7.0]))[1].remainder(8).tolist() == [fresh]


@pytest.mark.parametrize("codes", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
@pytest.mark.parametrize("count", [0, 1, BLOCK, 5 * BLOCK + 3])
def test_numbers_in_parts_have_the_codes_they_have_together(monkeypatch, codes: Codes, count: int):
    x = torch.randn(count, generator=torch.Generator().manual_seed(0))
    x = x if codes.signed else x.square()
    together = codes.close(x, 7)
    opened = codes.open(*together, x.shape)
    monkeypatch.setattr(adamw, "PART", 2 * BLOCK)
    apart = codes.close(x, 7)
    assert all(torch.equal(*pair) for pair in zip(together, apart, strict=True))
    assert torch.equal(codes.open(*apart, x.shape), opened)


def test_draws_are_even_and_do_not_depend_on_where_they_begin():
    def drawn(start: int, count: int, key: int) -> torch.Tensor:
        return draws(start, count, key, torch.device("cpu"), torch.Size([count]))

    found = drawn(0, 2**16, 3).double()
    assert float(found.min()) >= 0.0 and float(found.max()) < 1.0
    assert float(found.mean()) == pytest.approx(0.5, abs=0.005)
    assert torch.histc(found, 16).sub(2**12).abs().max() < 5 * 64
    assert torch.equal(drawn(1000, 500, 3), drawn(0, 2000, 3)[1000:1500])
    far = drawn(2**31 - 5, 10, 3)  # places beyond 31 bits wrap around
    assert torch.equal(far[5:], drawn(2**31, 5, 3))
    other = drawn(0, 2**16, 4).double()
    for pair in (torch.stack([found, other]), torch.stack([found[1:], found[:-1]])):
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.02


def test_nothing_is_kept_exactly_and_what_is_not_finite_shows():
    x = torch.tensor([0.0, -3.0, 0.0, 1.5])
    codes, ranges = SIGNED.close(x, 0)
    assert codes.dtype == torch.int8 and ranges.shape == (1,)
    assert SIGNED.open(codes, ranges, x.shape)[[0, 2]].tolist() == [0.0, 0.0]
    zeros = UNSIGNED.close(torch.zeros(7), 0)
    assert UNSIGNED.open(*zeros, torch.Size([7])).tolist() == [0.0] * 7
    grown = UNSIGNED.close(torch.full((7,), 2.0), 1, zeros[1])  # from a block of zeros to a block of twos
    torch.testing.assert_close(UNSIGNED.open(*grown, torch.Size([7])), torch.full((7,), 2.0))
    for bad in (math.inf, math.nan):
        assert not torch.isfinite(UNSIGNED.close(torch.tensor([1.0, bad]), 0)[1]).any()


def test_a_mean_of_squares_never_becomes_nothing():
    x = torch.tensor([1.0, 1e-12, 1e-30, 0.0])
    found = UNSIGNED.open(*UNSIGNED.close(x, 0), x.shape)
    assert (found > 0).tolist() == [True, True, True, False]
    assert found[1] >= x[1] and found[2] >= x[2]


def moments(gradients: Iterable[torch.Tensor], size: int) -> tuple[torch.Tensor, ...]:
    """Both running means after these gradients: in 8 bits, and as they are."""
    kept, whole = (nn.Parameter(torch.zeros(size)) for _ in range(2))
    eight, full = MixedAdamW([{"params": [kept]}], eight_bit=True), MixedAdamW([{"params": [whole]}])
    for gradient in gradients:
        kept.grad, whole.grad = gradient, gradient
        eight.step()
        full.step()
    state = eight.state[kept]
    mean = SIGNED.open(state["exp_avg_codes"], state["exp_avg_ranges"], kept.shape)
    square = UNSIGNED.open(state["exp_avg_sq_codes"], state["exp_avg_sq_ranges"], kept.shape)
    return mean, square, full.state[whole]["exp_avg"], full.state[whole]["exp_avg_sq"]


def test_the_second_moment_follows_stationary_gradients():
    """Rounded to the nearest, its median error was about 0.2 after a thousand steps."""
    draw, size = torch.Generator().manual_seed(0), 8 * BLOCK
    spread = {0.0: 0.03, 1.0: 0.08, 3.0: 0.16}  # decades that the gradients of a block span, and the largest error
    scale = torch.cat([10.0 ** -torch.empty(size).uniform_(0.0, width, generator=draw) for width in spread])
    drawn = (torch.randn(len(scale), generator=draw) * scale for _ in range(1000))
    _, square, _, expected = moments(drawn, len(scale))
    for error, most in zip(((square - expected) / expected).split(size), spread.values(), strict=True):
        assert float(error.abs().median()) < most
        assert abs(float(error.mean())) < 4.0 * float(error.std()) / math.sqrt(size) + 1e-3


def test_a_steady_gradient_is_reached_by_both_moments():
    """Rounded to the nearest, the first moment stopped at two thirds of the gradient."""
    mean, square, expected, expected_square = moments([torch.full((BLOCK,), 0.3)] * 400, BLOCK)
    assert float(mean.mean()) == pytest.approx(float(expected.mean()), rel=0.02)
    assert float(square.mean()) == pytest.approx(float(expected_square.mean()), rel=0.02)


def test_rounding_depends_on_neither_buckets_nor_other_parameters(monkeypatch):
    def trained(bucket: int) -> list[torch.Tensor]:
        monkeypatch.setattr(adamw, "BUCKET", bucket)
        draw = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.zeros(size)) for size in (300, 7, 1000)]
        optimizer = MixedAdamW([{"params": weights[:2]}, {"params": weights[2:]}], eight_bit=True, seed=5)
        for _ in range(5):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=draw)
            optimizer.step()
        return [*(weight.detach() for weight in weights), *(optimizer.state[w]["exp_avg_sq_codes"] for w in weights)]

    assert all(map(torch.equal, trained(2**26), trained(1)))


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
    state = optimizer.state[weight]
    kept = sum(value.nbytes for name, value in state.items() if name not in ("step", "rounded"))
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
        return Loss((outputs - 3.0) ** 2, Metrics())


def rows(seed: int) -> Sequences:
    tokens = torch.randint(0, 9, (2, 4), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    return Sequences(tokens=tokens, attention_mask=mask, response_mask=mask)


@pytest.mark.parametrize("state", ["adamw", "adamw_8bit"])
def test_a_resumed_learner_goes_on_bit_for_bit(state: str):
    def learner() -> Learner:
        return Learner(Twice(), LearnerSettings({"policy": 1e-3}, 8, optimizer=state))

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
    learner = Learner(Twice(), LearnerSettings({"policy": 1e-3}, 8, optimizer="adamw_8bit"))
    learner.backward(rows(0), Squared())
    learner.step()
    before = learner.state(copy=True)
    learner.backward(rows(1), Squared())
    gradient = learner.named["policy/weight"].grad
    assert gradient is not None
    gradient[0] = math.nan
    assert learner.step().counts["skipped_steps"] == 1
    assert all(torch.equal(tensor, before.tensors[name]) for name, tensor in learner.state().tensors.items())
